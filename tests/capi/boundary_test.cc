// What C programs cannot provoke: exceptions of every kind at the boundary, long messages, and structs that have grown
// apart.
#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "capi/capi.h"

namespace headwater::capi {
namespace {

template <typename F>
hw_error caught(F&& f) {
  hw_error error{};
  error.code = guard(&error, std::forward<F>(f));
  return error;
}

TEST(CBoundary, EveryExceptionBecomesACode) {
  const auto error = caught([] { throw Error(ErrorCode::io, "no such file"); });
  EXPECT_EQ(error.code, HW_ERROR_IO);
  EXPECT_STREQ(error.message, "no such file");
  EXPECT_EQ(caught([] { throw std::bad_alloc(); }).code, HW_ERROR_OUT_OF_MEMORY);
  EXPECT_STREQ(caught([] { throw std::bad_alloc(); }).message, "out of memory");
  EXPECT_EQ(caught([] { throw std::logic_error("x"); }).code, HW_ERROR_INTERNAL);
  EXPECT_STREQ(caught([] { throw std::logic_error("x"); }).message, "x");
  EXPECT_EQ(caught([] { throw 7; }).code, HW_ERROR_INTERNAL);
  EXPECT_EQ(caught([] {}).code, HW_OK);
  EXPECT_EQ(guard(nullptr, [] { throw 7; }), HW_ERROR_INTERNAL);
}

TEST(CBoundary, LongMessagesAreCutWithDots) {
  constexpr std::size_t kRoom = sizeof(hw_error::message) - 1;
  for (const std::size_t length : {kRoom - 1, kRoom, kRoom + 1, 10 * kRoom}) {
    const std::string message(length, 'x');
    const auto error = caught([&] { throw Error(ErrorCode::io, message); });
    const std::string expected = length <= kRoom ? message : std::string(kRoom - 3, 'x') + "...";
    EXPECT_EQ(error.message, expected);
  }
}

TEST(CBoundary, SuccessClearsTheMessage) {
  hw_error error{HW_ERROR_IO, "old"};
  EXPECT_EQ(guard(&error, [] {}), HW_OK);
  EXPECT_EQ(error.code, HW_OK);
  EXPECT_STREQ(error.message, "");
}

/// Every field of the C struct survives the way to C++ and back: fill with distinct small values, compare the bytes.
TEST(CBoundary, NoFieldIsForgotten) {
  hw_device_model model{
      0, 1, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1, {16, 17, 18, 19, 20}, {21, 22, 23, 24, 25}};
  const hw_device_model model_back = to_c(to_cpp(model));
  EXPECT_EQ(std::memcmp(&model, &model_back, sizeof model), 0);

  hw_plan_options options{};
  std::memset(&options, 0, sizeof options);
  options.policy = 4;
  options.cascade = 2;
  options.min_shared_pages = 3;
  options.min_members = 4;
  options.causal = 1;
  options.window_left = 6;
  options.local_chunk = 7;
  options.num_sink_tokens = 8;
  options.sm_scale = 9;
  options.logits_soft_cap = 10;
  options.alibi = options.sinks = options.batch_invariant = 1;
  options.invariant_chunk = 14;
  options.num_workers = 15;
  hw_plan_options options_back;
  std::memset(&options_back, 0, sizeof options_back);
  options_back = to_c(to_cpp(options));
  EXPECT_EQ(options_back.policy, 4);
  EXPECT_EQ(options_back.cascade, 2);
  EXPECT_EQ(options_back.min_shared_pages, 3);
  EXPECT_EQ(options_back.min_members, 4);
  EXPECT_EQ(options_back.window_left, 6);
  EXPECT_EQ(options_back.local_chunk, 7);
  EXPECT_EQ(options_back.num_sink_tokens, 8);
  EXPECT_EQ(options_back.sm_scale, 9);
  EXPECT_EQ(options_back.logits_soft_cap, 10);
  EXPECT_EQ(options_back.causal + options_back.alibi + options_back.sinks + options_back.batch_invariant, 4);
  EXPECT_EQ(options_back.invariant_chunk, 14);
  EXPECT_EQ(options_back.num_workers, 15);
}

/// A field added to a C++ struct needs a twin in headwater_c.h: then change the size here too.
TEST(CBoundary, CppStructsHaveNotGrown) {
  EXPECT_EQ(sizeof(AttentionShape), 20U);
  EXPECT_EQ(sizeof(PlanOptions), 64U);
  EXPECT_EQ(sizeof(DeviceModel), 160U);
  EXPECT_EQ(sizeof(PlanStats), 112U);
  EXPECT_EQ(sizeof(KvCache), 88U);
  EXPECT_EQ(sizeof(cpu::RunArgs), 192U);
  EXPECT_EQ(sizeof(cpu::RunOutcome), 32U);
  EXPECT_EQ(sizeof(PrefixCacheStats), 56U);
}

}  // namespace
}  // namespace headwater::capi
