// Which kernels this processor can run: the only place that tests for its features.
#include "cpu/kernels.h"

#include <string>

#ifdef HEADWATER_CPU_X86
#include <cpuid.h>
#endif

namespace headwater::cpu {
namespace {

Isa probe() noexcept {
#ifdef HEADWATER_CPU_X86
  __builtin_cpu_init();
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::scalar;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return Isa::avx2;
  }
  return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
#else
  return Isa::scalar;
#endif
}

/// Whether a bf16 dot product instruction is faster than converting and multiplying in fp32: twice the rate on AMD
/// since Zen 4, half the rate on Intel's server cores.
bool has_fast_dot16() noexcept {
#ifdef HEADWATER_CPU_X86
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

const Kernels& table_of(Isa isa) noexcept {
#ifdef HEADWATER_CPU_X86
  switch (isa) {
    case Isa::avx512_bf16:
      return kAvx512Bf16Kernels;
    case Isa::avx512:
      return kAvx512Kernels;
    case Isa::avx2:
      return kAvx2Kernels;
    case Isa::scalar:
      break;
  }
#else
  (void)isa;  // probe() knows no other level
#endif
  return kScalarKernels;
}

}  // namespace

Isa detect_isa() noexcept {
  static const Isa isa = probe();
  return isa;
}

Isa default_isa() noexcept {
  static const Isa isa = detect_isa() == Isa::avx512_bf16 && !has_fast_dot16() ? Isa::avx512 : detect_isa();
  return isa;
}

const Kernels& kernels_for(Isa isa, Isa highest) {
  if (isa > highest) {
    throw Error(ErrorCode::unsupported, "isa = " + std::string(name_of(isa)) + ", expected at most " +
                                            std::string(name_of(highest)) + ": this processor or build lacks it");
  }
  return table_of(isa);
}

const Kernels& kernels_for(Isa isa) {
  return kernels_for(isa, detect_isa());
}

}  // namespace headwater::cpu
