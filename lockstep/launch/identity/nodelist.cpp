#include <lockstep/launch/identity/nodelist.h>

#include <charconv>
#include <cstdint>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

constexpr std::size_t kLongestText = 1 << 16;
constexpr std::size_t kMostHosts = 1 << 16;
constexpr std::size_t kLongestHost = 255;  // The limit of DNS.
constexpr std::size_t kMostDigits = 9;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool belongs_to_a_name(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.' || c == '_';
}

class Reader {
 public:
  Reader(std::string_view what, std::string_view text) : what_(what), text_(text) {
    if (text.empty() || text.size() > kLongestText)
      fail(fmt::format("expected 1 to {} characters, got {}", kLongestText, text.size()));
  }

  std::vector<std::string> list() {
    std::vector<std::string> all;
    do {
      auto hosts = item();
      if (all.size() + hosts.size() > kMostHosts) too_many();
      all.insert(all.end(), std::make_move_iterator(hosts.begin()), std::make_move_iterator(hosts.end()));
    } while (take(','));
    if (at_ < text_.size()) fail(fmt::format("unexpected '{}' {}", text_[at_], place()));
    return all;
  }

 private:
  // Parses alternating names and brackets. Each bracket multiplies the names before it; the last one varies
  // fastest.
  std::vector<std::string> item() {
    std::vector<std::string> hosts{""};
    const auto begin = at_;
    while (at_ < text_.size() && (text_[at_] == '[' || belongs_to_a_name(text_[at_]))) {
      const auto parts = text_[at_] == '[' ? bracket() : std::vector<std::string>{name()};
      if (hosts.size() * parts.size() > kMostHosts) too_many();
      std::vector<std::string> longer;
      longer.reserve(hosts.size() * parts.size());
      for (const auto& host : hosts)
        for (const auto& part : parts) {
          longer.push_back(host + part);
          if (longer.back().size() > kLongestHost)
            fail(fmt::format("a host name has more than {} characters", kLongestHost));
        }
      hosts = std::move(longer);
    }
    if (at_ == begin) fail("missing host " + place());
    return hosts;
  }

  std::string name() {
    const auto begin = at_;
    while (at_ < text_.size() && belongs_to_a_name(text_[at_])) ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::vector<std::string> bracket() {
    std::vector<std::string> parts;
    ++at_;
    do {
      const auto first = digits(), last = take('-') ? digits() : first;
      const auto from = value(first), to = value(last);
      if (to < from) fail(fmt::format("the range {}-{} counts down", first, last));
      if (parts.size() + (to - from) >= kMostHosts) too_many();
      // The first number sets the width: 08-10 is 08, 09, 10.
      for (auto each = from; each <= to; ++each) parts.push_back(fmt::format("{:0{}}", each, first.size()));
    } while (take(','));
    if (!take(']')) fail("missing ']' " + place());
    return parts;
  }

  std::string_view digits() {
    const auto begin = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    if (at_ == begin) fail("missing number " + place());
    if (at_ - begin > kMostDigits)
      fail(fmt::format("expected numbers of at most {} digits, got {} digits", kMostDigits, at_ - begin));
    return text_.substr(begin, at_ - begin);
  }

  static std::size_t value(std::string_view digits) {
    std::size_t number = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), number);
    return number;
  }

  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  std::string place() const {
    return at_ < text_.size() ? fmt::format("at character {}", at_ + 1) : "at the end";
  }

  [[noreturn]] void too_many() const { fail(fmt::format("expected at most {} hosts", kMostHosts)); }

  [[noreturn]] void fail(const std::string& why) const {
    const bool cut = text_.size() > 80;
    throw ConfigError(fmt::format("{}: expected a list of hosts such as a,b[1-3,07], got '{}{}': {}", what_,
                                  text_.substr(0, 80), cut ? "..." : "", why));
  }

  std::string_view what_, text_;
  std::size_t at_ = 0;
};

}  // namespace

std::vector<std::string> expand_nodelist(std::string_view what, std::string_view text) {
  return Reader(what, text).list();
}

}  // namespace lockstep::detail
