// The text of an exception as a user should read it.
#pragma once

#include <exception>
#include <string>

namespace lockstep::detail {

// Without a stack trace and without the source lines of an engine.
std::string plain_text(const std::exception& error);

// The same for any exception; LibTorch's come without their backtrace.
std::string plain_text(const std::exception_ptr& error);

}  // namespace lockstep::detail
