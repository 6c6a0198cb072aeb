// Thrown for malformed bytes. Callers that know the file's name convert it to a ConfigError with that name.
#pragma once

#include <lockstep/base/error.h>

namespace lockstep::detail {

class FormatError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep::detail
