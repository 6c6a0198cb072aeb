// Writes the format of chrome://tracing and Perfetto: one process per rank, with a track for each of its
// threads, one for its steps, and as many for transfers as are in flight at once.
#include <zlib.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/profile/report/arrivals.h>
#include <lockstep/profile/report/merge.h>
#include <nlohmann/json.hpp>

namespace lockstep::profile {

namespace {

// Track numbers beyond those of real threads.
constexpr int kSteps = 1'000'000, kTransfers = 1'000'001, kDevice = 2'000'000;

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

class Zipped {
 public:
  explicit Zipped(const std::filesystem::path& path) : path_(path), file_(::gzopen(path.c_str(), "wb5")) {
    if (!file_) throw ConfigError(fmt::format("cannot write {}", path.string()));
  }
  ~Zipped() {
    if (file_) ::gzclose(file_);
  }
  Zipped(const Zipped&) = delete;
  Zipped& operator=(const Zipped&) = delete;

  template <typename... T>
  void put(fmt::format_string<T...> form, T&&... values) {
    fmt::format_to(std::back_inserter(buffer_), form, std::forward<T>(values)...);
    if (buffer_.size() > 1 << 16) flush();
  }
  void close() {
    flush();
    if (::gzclose(std::exchange(file_, nullptr)) != Z_OK) fail();
  }

 private:
  void flush() {
    if (!buffer_.empty() && ::gzwrite(file_, buffer_.data(), static_cast<unsigned>(buffer_.size())) <= 0)
      fail();
    buffer_.clear();
  }
  [[noreturn]] void fail() { throw ConfigError(fmt::format("writing {} failed", path_.string())); }

  const std::filesystem::path path_;
  gzFile file_;
  std::string buffer_;
};

const char* name_of(SpanKind kind) {
  constexpr const char* kNames[] = {"operator",  "communication", "wait",   "data",
                                    "optimizer", "pipeline",      "bucket", "range"};
  return kNames[static_cast<std::size_t>(kind)];
}

// Assigns each transfer to the first free track.
class Lines {
 public:
  int place(std::int64_t begin, std::int64_t end) {
    for (std::size_t i = 0; i < free_.size(); ++i)
      if (free_[i] <= begin) {
        free_[i] = end;
        return static_cast<int>(i);
      }
    free_.push_back(end);
    return static_cast<int>(free_.size() - 1);
  }
  std::size_t count() const { return free_.size(); }

 private:
  std::vector<std::int64_t> free_;
};

struct Drawn {
  int rank = 0, line = 0;
  std::int64_t begin = 0, end = 0;
  Operation operation{};
};

class Writer {
 public:
  Writer(const std::vector<RankProfile>& profiles, const std::filesystem::path& file)
      : profiles_(profiles), file_(file) {
    zero_ = profiles.front().origin;
    for (const auto& profile : profiles) zero_ = std::min(zero_, profile.origin);
    met_ = arrivals_of(profiles);
  }

  void run() {
    file_.put("{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"made by\":\"Lockstep\"}},\"traceEvents\":[\n");
    for (const auto& profile : profiles_) put(profile);
    put_arrows();
    file_.put("\n]}}\n");
    file_.close();
  }

 private:
  double micro(const RankProfile& profile, std::int64_t time) const {
    return static_cast<double>(profile.origin - zero_ + time) / 1e3;
  }

  void title(int rank, const char* what, int thread, const std::string& name) {
    next();
    file_.put(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what, rank, thread,
              quoted(name));
  }
  void next() {
    if (!std::exchange(first_, false)) file_.put(",\n");
  }

  void put(const RankProfile& profile) {
    title(profile.rank, "process_name", 0, fmt::format("rank {} on {}", profile.rank, profile.host));
    next();
    file_.put(R"({{"ph":"M","name":"process_sort_index","pid":{},"args":{{"sort_index":{}}}}})", profile.rank,
              profile.rank);
    for (std::size_t i = 0; i < profile.threads.size(); ++i)
      title(profile.rank, "thread_name", static_cast<int>(i), profile.threads[i]);
    title(profile.rank, "thread_name", kSteps, "steps");
    for (const auto& step : profile.steps) {
      next();
      file_.put(R"({{"ph":"X","cat":"step","name":"step {}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})",
                step.step, profile.rank, kSteps, micro(profile, step.begin),
                static_cast<double>(step.end - step.begin) / 1e3);
    }
    for (const auto& event : profile.events) {
      if (event.begin == event.end && event.kind == SpanKind::range) continue;  // a step border
      next();
      file_.put(R"({{"ph":"X","cat":"{}","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f})",
                name_of(event.kind), quoted(profile.names[static_cast<std::size_t>(event.name)]),
                profile.rank, event.thread, micro(profile, event.begin),
                static_cast<double>(event.end - event.begin) / 1e3);
      if (event.bytes > 0 || event.flops > 0)
        file_.put(R"(,"args":{{"bytes":{},"flops":{}}})", event.bytes, event.flops);
      file_.put("}}");
    }
    put_transfers(profile);
    put_device(profile);
    for (const auto& sample : profile.memory) {
      next();
      file_.put(R"({{"ph":"C","name":"memory","pid":{},"ts":{:.3f},"args":{{"bytes":{}}}}})", profile.rank,
                micro(profile, sample.time), sample.bytes);
    }
  }

  void put_transfers(const RankProfile& profile) {
    auto transfers = profile.transfers;
    std::sort(transfers.begin(), transfers.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    Lines lines;
    for (const auto& t : transfers) {
      const auto& group = profile.groups[static_cast<std::size_t>(t.group)];
      const auto& tag = profile.names[static_cast<std::size_t>(t.tag)];
      const int line = kTransfers + lines.place(t.begin, t.end);
      const auto seconds = static_cast<double>(t.end - t.begin) / 1e9;
      next();
      file_.put(
          R"({{"ph":"X","cat":"communication","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{)"
          R"("group":{},"sequence":{},"bytes":{},"GB/s":{:.3f}{}}}}})",
          quoted(tag.empty() ? std::string(name(t.operation))
                             : fmt::format("{} ({})", name(t.operation), tag)),
          profile.rank, line, micro(profile, t.begin), seconds * 1e6, quoted(group.name), t.sequence, t.bytes,
          seconds > 0 ? static_cast<double>(t.bytes) / seconds / 1e9 : 0.0, more_of(t, group));
      const Drawn drawn{profile.rank, line, profile.origin + t.begin, profile.origin + t.end, t.operation};
      if (detail::point_to_point(t.operation)) {
        const bool sends = t.operation == Operation::send;
        const int from = sends ? group.place : t.peer, to = sends ? t.peer : group.place;
        messages_[{group.key, from, to, tag, t.nth}].push_back(drawn);
      } else {
        collectives_[{group.key, t.sequence}].push_back(drawn);
      }
    }
    for (std::size_t i = 0; i < lines.count(); ++i)
      title(profile.rank, "thread_name", kTransfers + static_cast<int>(i),
            i == 0 ? "communication" : fmt::format("communication {}", i + 1));
  }

  std::string more_of(const Transfer& t, const GroupOf& group) const {
    std::string more = t.unfinished ? R"(,"unfinished":true)" : "";
    if (detail::point_to_point(t.operation)) return more;
    return more + R"(,"arrival_ms":)" + arrival_text(met_.at({group.key, t.sequence}));
  }

  void put_device(const RankProfile& profile) {
    constexpr const char* kKinds[] = {"kernel", "copy", "set"};
    for (std::size_t i = 0; i < profile.device_rows.size(); ++i)
      title(profile.rank, "thread_name", kDevice + static_cast<int>(i),
            fmt::format("GPU {} stream {}", profile.device_rows[i].device, profile.device_rows[i].stream));
    for (const auto& event : profile.device) {
      const Drawn drawn{.rank = profile.rank,
                        .line = kDevice + event.row,
                        .begin = profile.origin + event.begin,
                        .end = profile.origin + event.end};
      next();
      file_.put(R"({{"ph":"X","cat":"{}","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f})",
                kKinds[static_cast<std::size_t>(event.kind)],
                quoted(profile.names[static_cast<std::size_t>(event.name)]), profile.rank, drawn.line,
                micro(profile, event.begin), static_cast<double>(event.end - event.begin) / 1e3);
      if (event.launched_by >= 0)
        file_.put(R"(,"args":{{"operator":{}}})",
                  quoted(profile.names[static_cast<std::size_t>(event.launched_by)]));
      file_.put("}}");
      if (event.thread < 0) continue;
      const Drawn launch{
          .rank = profile.rank, .line = event.thread, .begin = profile.origin + event.launched};
      arrow(launch, {.rank = drawn.rank, .line = drawn.line, .end = drawn.begin});
    }
  }

  void arrow(const Drawn& from, const Drawn& to) {
    const auto at = [&](std::int64_t time) { return static_cast<double>(time - zero_) / 1e3; };
    const auto id = ++arrows_;
    next();
    file_.put(R"({{"ph":"s","cat":"arrow","name":"arrow","id":{},"pid":{},"tid":{},"ts":{:.3f}}},)"
              "\n",
              id, from.rank, from.line, at(from.begin));
    file_.put(R"({{"ph":"f","bp":"e","cat":"arrow","name":"arrow","id":{},"pid":{},"tid":{},"ts":{:.3f}}})",
              id, to.rank, to.line, at(to.end));
  }

  // Arrows from a send to its receive, and in a collective from the last rank to arrive to each rank that
  // waited for it.
  void put_arrows() {
    for (const auto& [which, ends] : messages_) {
      if (ends.size() != 2) continue;
      const bool sent_first = ends[0].operation == Operation::send;
      arrow(ends[sent_first ? 0 : 1], ends[sent_first ? 1 : 0]);
    }
    for (const auto& [which, ranks] : collectives_) {
      const auto last = std::max_element(ranks.begin(), ranks.end(),
                                         [](const auto& a, const auto& b) { return a.begin < b.begin; });
      for (auto rank = ranks.begin(); rank != ranks.end(); ++rank)
        if (rank != last) arrow(*last, *rank);
    }
  }

  const std::vector<RankProfile>& profiles_;
  Zipped file_;
  std::int64_t zero_ = 0;
  ArrivalsByCollective met_;
  bool first_ = true;
  std::uint64_t arrows_ = 0;
  std::map<std::tuple<std::int64_t, int, int, std::string, std::int64_t>, std::vector<Drawn>> messages_;
  std::map<std::pair<std::int64_t, std::uint64_t>, std::vector<Drawn>> collectives_;
};

}  // namespace

void write_trace(const std::vector<RankProfile>& profiles, const std::filesystem::path& file) {
  auto partial = file;
  partial += ".partial";
  Writer(profiles, partial).run();
  std::filesystem::rename(partial, file);
}

}  // namespace lockstep::profile
