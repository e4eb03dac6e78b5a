// Every instruction-set level has kernels of its own: a level that silently ran another one's would be tested in vain.
#include <gtest/gtest.h>

#include <set>

#include "cpu/kernels.h"
#include "headwater/error.h"
#include "property/scenario.h"

namespace headwater::property {
namespace {

TEST(InstructionSets, EachLevelHasItsOwnKernels) {
  std::set<const void*> kernels;
  for (const Isa isa : isas()) {
    EXPECT_EQ(cpu::kernels_for(isa).isa, isa);
    kernels.insert(reinterpret_cast<const void*>(cpu::kernels_for(isa).attend));
  }
  EXPECT_EQ(kernels.size(), isas().size());
}

TEST(InstructionSets, MissingLevelsAreRefused) {
  if (isas().back() == Isa::avx512_bf16) GTEST_SKIP() << "this processor has them all";
  EXPECT_THROW((void)cpu::kernels_for(Isa::avx512_bf16), Error);
}

}  // namespace
}  // namespace headwater::property
