// Sets variables for the duration of a scope; nullopt unsets. Only for single-threaded tests.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace lockstep::testing {

class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const std::map<std::string, std::optional<std::string>>& variables) {
    for (const auto& [name, value] : variables) {
      const char* old = std::getenv(name.c_str());
      before_[name] = old ? std::optional<std::string>(old) : std::nullopt;
      set(name, value);
    }
  }
  ScopedEnvironment(const std::string& name, const std::optional<std::string>& value)
      : ScopedEnvironment(std::map<std::string, std::optional<std::string>>{{name, value}}) {}
  ~ScopedEnvironment() {
    for (const auto& [name, value] : before_) set(name, value);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  static void set(const std::string& name, const std::optional<std::string>& value) {
    if (value)
      ::setenv(name.c_str(), value->c_str(), 1);
    else
      ::unsetenv(name.c_str());
  }
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace lockstep::testing
