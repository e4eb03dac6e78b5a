/* Checks for tests in C: print what failed and count it; the program's result is the count. */
#ifndef HEADWATER_TESTS_CAPI_CHECK_H_
#define HEADWATER_TESTS_CAPI_CHECK_H_

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "headwater/headwater_c.h"

static int failures = 0;

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                             \
    }                                                                         \
  } while (0)

/* The call succeeds. `error` is the hw_error that the call was given. */
#define CHECK_OK(call)                                                                \
  do {                                                                                \
    if ((call) != HW_OK) {                                                            \
      fprintf(stderr, "%s:%d: %s\n  %s\n", __FILE__, __LINE__, #call, error.message); \
      ++failures;                                                                     \
    }                                                                                 \
  } while (0)

/* The call fails with this code and message. */
#define CHECK_ERROR(call, expected_code, expected_message)                                                      \
  do {                                                                                                          \
    const int got_ = (call);                                                                                    \
    if (got_ != (expected_code) || error.code != got_ || strcmp(error.message, (expected_message)) != 0) {      \
      fprintf(stderr, "%s:%d: %s\n  got %d, code %d: %s\n  expected %d: %s\n", __FILE__, __LINE__, #call, got_, \
              error.code, error.message, (int)(expected_code), (expected_message));                             \
      ++failures;                                                                                               \
    }                                                                                                           \
  } while (0)

#define CHECK_NULL(call, name) CHECK_ERROR(call, HW_ERROR_INVALID_ARGUMENT, name " = null, expected a pointer")

static int finish(void) {
  if (failures == 0) puts("all checks passed");
  return failures == 0 ? 0 : 1;
}

#endif
