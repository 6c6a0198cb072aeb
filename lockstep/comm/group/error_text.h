// Text of an exception as a user should see it.
#pragma once

#include <exception>
#include <string>

namespace lockstep::detail {

// Without stack trace and without the engine's source locations.
std::string plain_text(const std::exception& error);

// The same for any exception. LibTorch's come without their backtrace.
std::string plain_text(const std::exception_ptr& error);

}  // namespace lockstep::detail
