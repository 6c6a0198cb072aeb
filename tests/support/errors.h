// Texts of exceptions.
#pragma once

#include <exception>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::testing {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// The text of the E that f throws; fails the test if f throws nothing or something else.
template <typename E, typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace lockstep::testing
