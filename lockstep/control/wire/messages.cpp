#include <lockstep/control/wire/messages.h>

#include <bit>
#include <limits>

namespace lockstep::control {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();
constexpr std::size_t kLine = 1024, kText = 65536;
constexpr std::size_t kMostText = 8192;  // Maximum text sent; a failure's text may contain other texts.
constexpr std::int64_t kMostMs = 24 * 3600 * 1000;  // Longest wait, as the board caps it.

// Maximum of steps and of their microseconds: sums stay exact integers.
constexpr std::int64_t kMostSteps = std::int64_t{1} << 50;

// Truncates a text for users, keeping its beginning, which names the subject.
std::string cut(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  const auto rest = " ... (" + std::to_string(text.size()) + " bytes in all)";
  auto end = most - rest.size();
  // Do not split a UTF-8 character.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + rest;
}

void write(Writer& out, const std::vector<int>& list) {
  out.number(static_cast<std::int64_t>(list.size()));
  for (int each : list) out.number(each);
}

std::vector<int> read_list(Reader& in, int lowest) {
  std::vector<int> list;
  for (auto left = in.number(0, kMostRanks); left > 0; --left) list.push_back(in.integer(lowest, kAny));
  return list;
}

}  // namespace

std::string Hello::encode() const {
  return Writer()
      .number(rank)
      .number(size)
      .number(local_rank)
      .number(local_size)
      .number(pid)
      .number(world)
      .number(attempt)
      .number(threads)
      .text(version)
      .text(host)
      .take();
}

Hello Hello::decode(std::string_view payload) {
  Reader in(payload);
  Hello hello;
  hello.rank = in.integer(0, kMostRanks - 1);
  hello.size = in.integer(hello.rank + 1, kMostRanks);
  hello.local_rank = in.integer(-1, kMostRanks - 1);
  hello.local_size = in.integer(-1, kMostRanks);
  hello.pid = in.integer(1, kAny);
  hello.world = in.integer(0, kAny);
  hello.attempt = in.integer(0, kAny);
  hello.threads = in.integer(0, kAny);
  hello.version = in.text(kLine);
  hello.host = in.text(kLine);
  in.end();
  return hello;
}

std::string Attach::encode() const {
  return Writer().number(agent_pid).number(agent_rank).number(stop_grace_ms).take();
}

Attach Attach::decode(std::string_view payload) {
  Reader in(payload);
  Attach attach;
  attach.agent_pid = in.integer(1, kAny);
  attach.agent_rank = in.integer(-1, kMostRanks - 1);
  attach.stop_grace_ms = in.integer(0, kAny);
  in.end();
  return attach;
}

std::string Welcome::encode() const {
  Writer out;
  out.number(local_rank).number(local_size).text(address);
  write(out, nodes);
  write(out, threads);
  return out.take();
}

Welcome Welcome::decode(std::string_view payload) {
  Reader in(payload);
  Welcome welcome;
  welcome.local_rank = in.integer(0, kMostRanks - 1);
  welcome.local_size = in.integer(1, kMostRanks);
  welcome.address = in.text(kLine);
  welcome.nodes = read_list(in, 0);
  welcome.threads = read_list(in, 0);
  in.end();
  return welcome;
}

std::string GroupMade::encode() const {
  Writer out;
  out.number(key).text(cut(name, kLine));
  write(out, ranks);
  return out.take();
}

GroupMade GroupMade::decode(std::string_view payload) {
  Reader in(payload);
  GroupMade group;
  group.key = in.number();
  group.name = in.text(kLine);
  group.ranks = read_list(in, 0);
  in.end();
  return group;
}

std::string Fault::encode() const {
  return Writer().number(static_cast<int>(kind)).text(cut(text, kMostText)).take();
}

Fault Fault::decode(std::string_view payload) {
  Reader in(payload);
  Fault fault;
  fault.kind = static_cast<Kind>(in.number(0, static_cast<int>(Kind::uncaught_comm)));
  fault.text = in.text(kText);
  in.end();
  return fault;
}

std::string Rows::encode() const {
  Writer out;
  out.number(step).number(committed).number(threads).number(blocked);
  out.number(static_cast<std::int64_t>(rows.size()));
  for (const Row& row : rows)
    out.number(row.key)
        .text(row.group)
        .number(row.sequence)
        .text(row.operation)
        .text(row.site)
        .number(row.message)
        .number(row.peer)
        .number(row.running)
        .number(row.since_ms)
        .number(row.waited_ms)
        .number(row.waits_for);
  out.number(static_cast<std::int64_t>(times.size()));
  for (const StepTime& time : times)
    out.number(time.step).number(time.steps).number(time.took_us).number(time.waited_us);
  out.number(static_cast<std::int64_t>(metrics.size()));
  for (const Metric& metric : metrics)
    out.text(metric.name).number(std::bit_cast<std::int64_t>(metric.value)).number(metric.step);
  return out.take();
}

Rows Rows::decode(std::string_view payload) {
  Reader in(payload);
  Rows rows;
  rows.step = in.number_from(-1);
  rows.committed = in.number_from(-1);
  rows.threads = in.integer(0, kAny);
  rows.blocked = in.integer(0, kAny);
  for (auto left = in.number(0, 256); left > 0; --left) {
    Row row;
    row.key = in.number();
    row.group = in.text(kLine);
    row.sequence = in.number_from(-1);
    row.operation = in.text(kLine);
    row.site = in.text(kLine);
    row.message = in.number(0, 1) != 0;
    row.peer = in.integer(-1, kAny);
    row.running = in.number(0, 1) != 0;
    row.since_ms = in.number(0, kMostMs);
    row.waited_ms = in.number(-1, kMostMs);
    row.waits_for = in.number_from(-1);
    rows.rows.push_back(std::move(row));
  }
  for (auto left = in.number(0, 256); left > 0; --left) {
    StepTime time;
    time.step = in.number_from(-1);
    time.steps = in.number(1, kMostSteps);
    time.took_us = in.number(0, kMostSteps);
    time.waited_us = in.number(0, time.took_us);
    rows.times.push_back(time);
  }
  for (auto left = in.number(0, 256); left > 0; --left) {
    Metric metric;
    metric.name = in.text(kLine);
    metric.value = std::bit_cast<double>(in.number());
    metric.step = in.number_from(-1);
    rows.metrics.push_back(std::move(metric));
  }
  in.end();
  return rows;
}

std::string NodeHello::encode() const {
  return Writer()
      .number(node)
      .number(num_nodes)
      .number(local_ranks)
      .number(agent_rank)
      .number(agent_pid)
      .text(version)
      .text(address)
      .take();
}

NodeHello NodeHello::decode(std::string_view payload) {
  Reader in(payload);
  NodeHello hello;
  hello.node = in.integer(-1, kMostRanks);
  hello.num_nodes = in.integer(0, kMostRanks);
  hello.local_ranks = in.integer(0, kMostRanks);
  hello.agent_rank = in.integer(-1, kMostRanks - 1);
  hello.agent_pid = in.integer(0, kAny);
  hello.version = in.text(kLine);
  hello.address = in.text(kLine);
  in.end();
  return hello;
}

std::string encode(const Ended& ended) {
  return Writer()
      .number(ended.pid)
      .number(ended.status.value_or(-1))
      .number(ended.signal.value_or(-1))
      .number(ended.core)
      .text(cut(ended.note, kMostText))
      .take();
}

Ended decode_ended(std::string_view payload) {
  Reader in(payload);
  Ended ended;
  ended.pid = in.integer(0, kAny);
  if (int status = in.integer(-1, 255); status >= 0) ended.status = status;
  if (int signal = in.integer(-1, 127); signal >= 0) ended.signal = signal;
  ended.core = in.number(0, 1) != 0;
  ended.note = in.text(kText);
  in.end();
  return ended;
}

std::string encode(const Failure& failure) {
  return Writer()
      .number(failure.rank)
      .number(failure.pid)
      .number(failure.step)
      .number(failure.sequence)
      .number(failure.status)
      .number(static_cast<std::int64_t>(failure.kind))
      .text(cut(failure.cause, kMostText))
      .text(cut(failure.where, kMostText))
      .take();
}

Failure decode_failure(std::string_view payload) {
  Reader in(payload);
  Failure failure;
  failure.rank = in.integer(-1, kMostRanks - 1);
  failure.pid = in.integer(0, kAny);
  failure.step = in.number_from(-1);
  failure.sequence = in.number_from(-1);
  failure.status = in.integer(0, 255);
  failure.kind = static_cast<CommError::Kind>(in.integer(0, static_cast<int>(CommError::Kind::stopped)));
  failure.cause = in.text(kText);
  failure.where = in.text(kText);
  in.end();
  return failure;
}

std::string encode(const Order& order) {
  Writer out;
  out.number(static_cast<std::int64_t>(order.index()));
  if (const auto* start = std::get_if<Start>(&order))
    out.number(start->attempt).number(start->first_rank).number(start->world_size).text(start->address);
  if (const auto* stop = std::get_if<Stop>(&order)) out.number(stop->signal);
  if (const auto* failed = std::get_if<Failed>(&order)) out.text(encode(failed->failure));
  if (const auto* finish = std::get_if<Finish>(&order))
    out.number(finish->status).text(cut(finish->why, 4 * kMostText));
  return out.take();
}

Order decode_order(std::string_view payload) {
  Reader in(payload);
  Order order;
  switch (in.number(0, 3)) {
    case 0: {
      Start start;
      start.attempt = in.integer(0, kAny);
      start.first_rank = in.integer(0, kMostRanks);
      start.world_size = in.integer(1, kMostRanks);
      start.address = in.text(kLine);
      order = start;
      break;
    }
    case 1: order = Stop{in.integer(1, 127)}; break;
    case 2: order = Failed{decode_failure(in.text())}; break;
    default: {
      Finish finish;
      finish.status = in.integer(0, 255);
      finish.why = in.text(kText);
      order = finish;
    }
  }
  in.end();
  return order;
}

}  // namespace lockstep::control
