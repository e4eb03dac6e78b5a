// One way to check a refusal: its code, and the part of the message that names place, expected and got.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "headwater/error.h"

namespace headwater::test {

template <typename Call>
void expect_error(ErrorCode code, std::string_view part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was refused, expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos)
        << "message: " << error.what() << "\nexpected part: " << part;
  }
}

}  // namespace headwater::test
