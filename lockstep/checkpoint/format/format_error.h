// Bytes that are not what they should be. Whoever knows the file's name turns it into a ConfigError that
// names it.
#pragma once

#include <lockstep/base/error.h>

namespace lockstep::detail {

class FormatError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep::detail
