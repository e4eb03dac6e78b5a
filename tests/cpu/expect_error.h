// A call that must throw headwater::Error with exactly this code and message.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "headwater/error.h"

namespace headwater {

template <class F>
void expect_error(ErrorCode code, const std::string& message, F&& call) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_EQ(std::string(error.what()), message);
  }
}

}  // namespace headwater
