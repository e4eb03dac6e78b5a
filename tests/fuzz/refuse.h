// Calls a parser: its own Error is a correct answer to bad input, but an internal one, or any other exception, is not.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "headwater/error.h"

namespace headwater::fuzz {

/// Whether `parse` accepted its input.
template <class Parse>
bool accepts(Parse parse) {
  try {
    parse();
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal || *error.what() == '\0') std::abort();
    return false;
  }
}

}  // namespace headwater::fuzz
