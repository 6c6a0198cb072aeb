#include <lockstep/comm/group/error_text.h>

#include <c10/util/Exception.h>

namespace lockstep::detail {

std::string plain_text(const std::exception& error) {
  std::string text = error.what();
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&error))
    text = c10_error->what_without_backtrace();
  if (auto stack = text.find("\nException raised from"); stack != std::string::npos) text.resize(stack);
  // Engines prefix "[/path/pair.cc:451] " or "[enforce fail at file.cpp:1] ": their source lines, not the
  // user's.
  if (auto end = text.find("] "); text.starts_with('[') && end != std::string::npos &&
                                  text.substr(0, end).find(".c") != std::string::npos)
    text.erase(0, end + 2);
  while (!text.empty() && (text.back() == '\n' || text.back() == '.')) text.pop_back();
  return text;
}

std::string plain_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace lockstep::detail
