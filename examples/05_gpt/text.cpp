#include "text.h"

#include <array>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace gpt {
namespace {

// The last step of SplitMix64: each bit of the result depends on every bit of x.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// Combines three numbers into one; their order matters.
std::uint64_t mixed(std::uint64_t seed, std::uint64_t a, std::uint64_t b) {
  return mixed(mixed(mixed(seed + 0x9e3779b97f4a7c15U) + a) + b);
}

constexpr std::array<std::string_view, 16> kNames = {"Ada",   "Boris", "Clara", "Dmitri", "Edith", "Felix",
                                                     "Greta", "Hugo",  "Ines",  "Jonas",  "Klara", "Ludwig",
                                                     "Mira",  "Nils",  "Olga",  "Pavel"};
constexpr std::array<std::string_view, 12> kNouns = {"cat",  "dog",   "bird",  "farmer", "sailor", "girl",
                                                     "king", "baker", "horse", "doctor", "child",  "clock"};
// Plurals of these nouns end in s, and so does the singular of a verb.
constexpr std::array<std::string_view, 8> kAlone = {"sleep", "laugh", "wait", "sing",
                                                    "run",   "work",  "fall", "dream"};
constexpr std::array<std::string_view, 8> kOnOthers = {"see",  "know", "like", "follow",
                                                       "hear", "help", "find", "thank"};
constexpr std::array<std::string_view, 6> kAdjectives = {"old", "small", "quiet", "clever", "tired", "red"};
constexpr std::array<std::string_view, 4> kPlaces = {"near", "behind", "beside", "above"};
constexpr std::array<std::string_view, 8> kThings = {"key",  "coin", "book", "lamp",
                                                     "ring", "rope", "map",  "knife"};
constexpr std::array<std::string_view, 3> kBrackets = {"()", "[]", "{}"};

class Writer {
 public:
  Writer(std::uint64_t seed, std::size_t size) : seed_(seed), size_(size) {}

  std::string text() {
    while (out_.size() < size_) paragraph();
    out_.resize(size_);
    return std::move(out_);
  }

 private:
  std::uint64_t below(std::uint64_t n) { return mixed(seed_, 0, ++drawn_) % n; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  template <std::size_t N>
  std::string_view any(const std::array<std::string_view, N>& words) {
    return words[below(N)];
  }
  void add(std::string_view word) { out_ += word; }
  void ends_with_s(std::string_view word, bool s) { add(word), add(s ? "s" : ""); }

  // Introduces two to four people with one thing each, then some sentences, then questions about the things.
  void paragraph() {
    const auto people = 2 + below(3), first = below(kNames.size()), thing = below(kThings.size());
    const auto name = [&](std::uint64_t i) { return kNames[(first + 5 * i) % kNames.size()]; };
    const auto has = [&](std::uint64_t i) { return kThings[(thing + 3 * i) % kThings.size()]; };
    for (std::uint64_t i = 0; i < people; ++i) add(name(i)), add(" has the "), add(has(i)), add(". ");
    for (auto sentences = 1 + below(4); sentences > 0; --sentences) {
      clause(0);
      add(". ");
    }
    for (auto questions = 1 + below(people); questions > 0; --questions) {
      const auto who = below(people);
      add("who has the "), add(has(who)), add("? "), add(name(who)), add(". ");
    }
    out_.back() = '\n';
  }

  // A subject and its verb, sometimes with a clause in brackets between them, nested up to three deep.
  void clause(int depth) {
    const bool plural = noun(depth);
    if (depth < 3 && one_in(3)) {
      const auto bracket = any(kBrackets);
      add(" "), add(bracket.substr(0, 1));
      clause(depth + 1);
      add(bracket.substr(1));
    }
    add(" ");
    ends_with_s(any(kAlone), !plural);
  }

  // Writes a noun phrase. Returns true if it is plural; nouns in its relative clauses have their own number.
  bool noun(int depth) {
    const bool plural = one_in(2);
    add("the ");
    if (one_in(3)) add(any(kAdjectives)), add(" ");
    ends_with_s(any(kNouns), plural);
    if (depth < 2 && one_in(3)) {
      add(" "), add(any(kPlaces)), add(" ");
      noun(2);
    }
    if (depth < 2 && one_in(3)) {
      add(" that ");
      const bool others = noun(depth + 1);
      add(" ");
      ends_with_s(any(kOnOthers), !others);
    }
    return plural;
  }

  std::uint64_t seed_, drawn_ = 0;
  std::size_t size_;
  std::string out_;
};

}  // namespace

std::string synthetic_text(std::uint64_t seed, std::size_t size) { return Writer(seed, size).text(); }

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))  // Inserting an empty file's buffer fails too.
    throw lockstep::ConfigError(fmt::format("{}: cannot be read, or is empty", path));
  return std::move(text).str();
}

at::Tensor batch(const std::string& text, const BatchOptions& options) {
  const auto length = static_cast<std::uint64_t>(options.context) + 1;
  if (text.size() < length)
    throw lockstep::ConfigError(fmt::format("the text has {} bytes, but a context of {} needs {}",
                                            text.size(), options.context, length));
  auto tokens = at::empty({options.count, options.context + 1}, at::kLong);
  auto* next = tokens.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < options.count; ++i) {
    const auto sample = static_cast<std::uint64_t>(options.first + i) + 1;  // 0 is used for the text itself.
    const auto place =
        mixed(options.seed, sample, static_cast<std::uint64_t>(options.step)) % (text.size() - length + 1);
    for (const char each : std::string_view(text).substr(place, length))
      *next++ = static_cast<unsigned char>(each);
  }
  return tokens;
}

}  // namespace gpt
