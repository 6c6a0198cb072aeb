#include <lockstep/comm/call.h>

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>

namespace lockstep {

std::string_view name(ReduceOp op) {
  constexpr std::array names = {"sum", "avg", "product", "min", "max", "and", "or", "xor"};
  return names.at(static_cast<std::size_t>(op));
}

std::string_view name(Operation operation) {
  constexpr std::array names = {"all_reduce", "reduce",         "broadcast",  "all_gather", "gather",
                                "scatter",    "reduce_scatter", "all_to_all", "barrier",    "send",
                                "recv"};
  return names.at(static_cast<std::size_t>(operation));
}

std::string_view name(Dtype dtype) {
  constexpr std::array names = {"float32",     "float64",       "bfloat16", "float16", "int8",
                                "int16",       "int32",         "int64",    "uint8",   "bool",
                                "complex64",   "complex128",    "uint16",   "uint32",  "uint64",
                                "float8_e5m2", "float8_e4m3fn", "other"};
  return names.at(static_cast<std::size_t>(dtype));
}

namespace detail {
namespace {

thread_local const Call* current = nullptr;

// The part of a path after the last slash.
std::string_view file_name(std::string_view path) {
  auto slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

std::string both(const Call& a, const Call& b, std::string_view what) {
  return fmt::format("the ranks' calls differ in {}: rank {} called {}, rank {} called {}", what, a.rank,
                     describe(a), b.rank, describe(b));
}

// Empty if the calls match.
std::string_view differing_field(const Call& a, const Call& b) {
  if (a.operation != b.operation) return "operation";
  if (a.sequence != b.sequence) return "sequence number";
  // Dtypes without a name here are distinguished at least by their size.
  if (a.dtype != b.dtype || (a.count > 0 && b.count > 0 && a.bytes / a.count != b.bytes / b.count))
    return "dtype";
  if (reduces(a.operation) && a.reduction != b.reduction) return "reduction";
  if (rooted(a.operation) && a.root != b.root) return "root";
  if (a.tag != b.tag) return "tag";
  switch (a.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
    case Operation::broadcast: return a.count != b.count ? "size" : a.shape != b.shape ? "shape" : "";
    case Operation::all_gather:
    case Operation::reduce_scatter: return a.to != b.to || a.from != b.from ? "sizes" : "";
    default: return {};
  }
}

// Sizes of the data that a exchanges with b, as each of them sees it.
std::string sizes_differ(const Call& giver, std::int64_t gives, const Call& taker, std::int64_t takes) {
  return fmt::format(
      "the ranks' calls differ in size: rank {} gives rank {} {} elements in {}, which expects {} in {}",
      giver.rank, taker.rank, gives, describe(giver), takes, describe(taker));
}

// For operations in which each pair of ranks has its own size.
std::optional<std::string> size_mismatch(std::span<const Call* const> calls) {
  const Call& first = *calls[0];
  const auto n = calls.size();
  auto check = [&](std::size_t giver, std::size_t taker, std::int64_t gives,
                   std::int64_t takes) -> std::optional<std::string> {
    if (gives == takes) return std::nullopt;
    return sizes_differ(*calls[giver], gives, *calls[taker], takes);
  };
  std::optional<std::string> found;
  const auto root = static_cast<std::size_t>(std::max(first.root, 0));
  for (std::size_t r = 0; r < n && !found; ++r) {
    switch (first.operation) {
      case Operation::gather: found = check(r, root, calls[r]->count, calls[root]->from.at(r)); break;
      case Operation::scatter: found = check(root, r, calls[root]->to.at(r), calls[r]->count); break;
      case Operation::all_to_all:
        for (std::size_t q = 0; q < n && !found; ++q)
          found = check(r, q, calls[r]->to.at(q), calls[q]->from.at(r));
        break;
      default: return std::nullopt;
    }
  }
  return found;
}

// Packed form: this struct, followed by `to` and `from` as group_size numbers each. kAbsent marks a missing
// table.
constexpr std::int64_t kAbsent = -1;
struct Packed {
  std::uint8_t operation, dtype, reduction, shape_dims;
  std::int32_t root, rank;
  std::uint64_t sequence;
  std::int64_t count, bytes;
  std::array<std::int64_t, 16> shape;
  std::array<char, 64> tag;
  std::array<char, 96> site;
};

template <std::size_t N>
void put_text(std::array<char, N>& target, std::string_view text) {
  target.fill('\0');
  std::copy_n(text.data(), std::min(text.size(), N - 1), target.data());
}

}  // namespace

std::string site_text(const Call& call) {
  if (!call.far_site.empty()) return call.far_site;
  return fmt::format("{}:{}", file_name(call.site.file_name()), call.site.line());
}

std::string tensor_text(const Call& call) {
  if (call.operation == Operation::barrier) return {};
  return fmt::format("{} [{}]", name(call.dtype), fmt::join(call.shape, ", "));
}

std::string describe(const Call& call) {
  std::vector<std::string> parts;
  if (auto tensor = tensor_text(call); !tensor.empty()) parts.push_back(std::move(tensor));
  if (reduces(call.operation)) parts.emplace_back(name(call.reduction));
  if (rooted(call.operation)) parts.push_back(fmt::format("root {}", call.root));
  if (call.operation == Operation::send) parts.push_back(fmt::format("to {}", call.root));
  if (call.operation == Operation::recv && call.root >= 0) parts.push_back(fmt::format("from {}", call.root));
  if (!call.tag.empty()) parts.push_back(fmt::format("tag '{}'", call.tag));
  return fmt::format("{}({}) at {}", name(call.operation), fmt::join(parts, ", "), site_text(call));
}

std::optional<std::string> find_difference(const Call& a, const Call& b) {
  auto field = differing_field(a, b);
  if (field.empty()) return std::nullopt;
  return both(a, b, field);
}

std::optional<std::string> find_mismatch(std::span<const Call* const> calls) {
  for (const Call* call : calls)
    if (auto difference = find_difference(*calls[0], *call)) return difference;
  return size_mismatch(calls);
}

std::optional<std::string> find_mismatch(const Call& send, const Call& recv) {
  if (send.dtype != recv.dtype) return both(send, recv, "dtype");
  if (send.count != recv.count || send.bytes != recv.bytes) return both(send, recv, "size");
  return std::nullopt;
}

Digest& Digest::add(const std::vector<std::int64_t>& values) {
  add(values.size());
  for (auto value : values) add(static_cast<std::uint64_t>(value));
  return *this;
}

Digest& Digest::add(const std::string& text) {
  add(text.size());
  for (unsigned char c : text) add(c);
  return *this;
}

Digest& Digest::add(const Call& call) {
  add(static_cast<std::uint64_t>(call.operation)).add(static_cast<std::uint64_t>(call.dtype));
  add(static_cast<std::uint64_t>(call.root)).add(call.tag);
  if (reduces(call.operation)) add(static_cast<std::uint64_t>(call.reduction));
  if (call.operation == Operation::all_gather || call.operation == Operation::reduce_scatter)
    add(call.to).add(call.from);
  else if (!pairwise(call.operation))
    add(static_cast<std::uint64_t>(call.count)).add(call.shape);
  return *this;
}

std::size_t packed_size(int group_size) {
  return sizeof(Packed) + 2 * sizeof(std::int64_t) * static_cast<std::size_t>(group_size);
}

std::vector<std::uint8_t> pack(const Call& call) {
  Packed packed{};
  packed.operation = static_cast<std::uint8_t>(call.operation);
  packed.dtype = static_cast<std::uint8_t>(call.dtype);
  packed.reduction = static_cast<std::uint8_t>(call.reduction);
  packed.shape_dims = static_cast<std::uint8_t>(std::min(call.shape.size(), packed.shape.size()));
  std::copy_n(call.shape.begin(), packed.shape_dims, packed.shape.begin());
  packed.root = call.root;
  packed.rank = call.rank;
  packed.sequence = call.sequence;
  packed.count = call.count;
  packed.bytes = call.bytes;
  put_text(packed.tag, call.tag);
  put_text(packed.site, site_text(call));

  const auto n = static_cast<std::size_t>(call.size);
  std::vector<std::int64_t> tables(2 * n, kAbsent);
  std::copy_n(call.to.begin(), std::min(n, call.to.size()), tables.begin());
  std::copy_n(call.from.begin(), std::min(n, call.from.size()),
              tables.begin() + static_cast<std::ptrdiff_t>(n));

  std::vector<std::uint8_t> bytes(packed_size(call.size));
  std::memcpy(bytes.data(), &packed, sizeof packed);
  std::memcpy(bytes.data() + sizeof packed, tables.data(), tables.size() * sizeof tables[0]);
  return bytes;
}

Call unpack(std::span<const std::uint8_t> bytes, int group_size) {
  LOCKSTEP_ASSERT(bytes.size() == packed_size(group_size), "a packed call has the wrong length");
  Packed packed;
  std::memcpy(&packed, bytes.data(), sizeof packed);
  // The bytes come from another process: an invalid value must be an error, never an index.
  if (packed.operation > static_cast<int>(Operation::recv) || packed.dtype > static_cast<int>(Dtype::other) ||
      packed.reduction > static_cast<int>(ReduceOp::BXOR) || packed.shape_dims > packed.shape.size() ||
      packed.root < -1 || packed.root >= group_size || packed.rank < 0 || packed.rank >= group_size)
    throw Error("a rank sent an invalid description of its call: do all ranks run the same build?");
  Call call;
  call.operation = static_cast<Operation>(packed.operation);
  call.dtype = static_cast<Dtype>(packed.dtype);
  call.reduction = static_cast<ReduceOp>(packed.reduction);
  call.root = packed.root;
  call.rank = packed.rank;
  call.size = group_size;
  call.sequence = packed.sequence;
  call.count = packed.count;
  call.bytes = packed.bytes;
  call.shape.assign(packed.shape.begin(), packed.shape.begin() + packed.shape_dims);
  call.tag.assign(packed.tag.data(), strnlen(packed.tag.data(), packed.tag.size()));
  call.far_site.assign(packed.site.data(), strnlen(packed.site.data(), packed.site.size()));
  const auto n = static_cast<std::size_t>(group_size);
  std::vector<std::int64_t> tables(2 * n);
  std::memcpy(tables.data(), bytes.data() + sizeof packed, tables.size() * sizeof tables[0]);
  const auto middle = tables.begin() + static_cast<std::ptrdiff_t>(n);
  if (tables.front() != kAbsent) call.to.assign(tables.begin(), middle);
  if (*middle != kAbsent) call.from.assign(middle, tables.end());
  return call;
}

const Call* current_call() { return current; }
CallScope::CallScope(const Call* call) : outer_(std::exchange(current, call)) {}
CallScope::~CallScope() { current = outer_; }

}  // namespace detail
}  // namespace lockstep
