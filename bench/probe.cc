// Machine probes; see probe.h. The loops of each instruction set are compiled with that set's target attribute, so that
// this file needs no special flags; only the set that was asked for is executed.
#include "bench/probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headwater::bench {
namespace {

constexpr std::size_t kColdBytes = std::size_t{256} << 20;
constexpr std::size_t kReadBytes = std::size_t{8} << 20;  ///< of one sample
constexpr int kAccumulators = 12;  ///< independent chains: enough to hide the latency of two units

// Each loop: `rounds` x kAccumulators multiply-adds of one vector; returns a value that depends on all of them.
struct Loop {
  float (*run)(std::int64_t rounds) noexcept;
  int flops;  ///< of one vector operation
};

float loop_scalar(std::int64_t rounds) noexcept {
  float acc[kAccumulators * 4] = {};
  float x = 1.0F;
  asm volatile("" : "+x"(x));
  for (std::int64_t i = 0; i < rounds; ++i) {
    for (float& a : acc) a = a * 0.5F + x;
  }
  float sum = 0;
  for (const float a : acc) sum += a;
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float loop_avx2(std::int64_t rounds) noexcept {
  __m256 acc[kAccumulators];
  for (__m256& a : acc) a = _mm256_setzero_ps();
  const __m256 x = _mm256_set1_ps(0.5F);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m256& a : acc) a = _mm256_fmadd_ps(a, x, x);
  }
  __m256 sum = acc[0];
  for (const __m256& a : acc) sum = _mm256_add_ps(sum, a);
  return _mm256_cvtss_f32(sum);
}

__attribute__((target("avx512f"))) float loop_avx512(std::int64_t rounds) noexcept {
  __m512 acc[kAccumulators];
  for (__m512& a : acc) a = _mm512_setzero_ps();
  const __m512 x = _mm512_set1_ps(0.5F);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m512& a : acc) a = _mm512_fmadd_ps(a, x, x);
  }
  __m512 sum = acc[0];
  for (const __m512& a : acc) sum = _mm512_add_ps(sum, a);
  return _mm512_cvtss_f32(sum);
}

__attribute__((target("avx512f,avx512bf16"))) float loop_avx512_bf16(std::int64_t rounds) noexcept {
  __m512 acc[kAccumulators];
  for (__m512& a : acc) a = _mm512_setzero_ps();
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3F003F00);  // pairs of 0.5
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m512& a : acc) a = _mm512_dpbf16_ps(a, x, x);
  }
  __m512 sum = acc[0];
  for (const __m512& a : acc) sum = _mm512_add_ps(sum, a);
  return _mm512_cvtss_f32(sum);
}
#endif

Loop loop_for(Isa isa, bool dot16) {
#if defined(__x86_64__)
  if (isa == Isa::avx512_bf16 && dot16) return {loop_avx512_bf16, 64};
  if (isa >= Isa::avx512) return {loop_avx512, 32};
  if (isa == Isa::avx2) return {loop_avx2, 16};
#endif
  (void)isa;
  (void)dot16;
  return {loop_scalar, 8};
}

/// Runs task(worker) on every worker and returns the seconds it took.
template <typename Task>
double timed_parallel(Executor& executor, Task& task) {
  const double start = now();
  executor.parallel([](void* context, int worker) noexcept { (*static_cast<Task*>(context))(worker); }, &task);
  return now() - start;
}

/// Sums all words of a range: eight independent chains, plain loads.
std::uint64_t read_all(const std::byte* data, std::size_t bytes) noexcept {
  std::uint64_t sums[8] = {};
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  const std::size_t count = bytes / sizeof(std::uint64_t) / 64 * 64;
  for (std::size_t i = 0; i < count; i += 64) {
    __builtin_prefetch(words + i + 512);
    for (std::size_t j = 0; j < 64; ++j) sums[j % 8] += words[i + j];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t s : sums) sum += s;
  return sum;
}

volatile std::uint64_t sink_bits;  // keeps the loops' results alive

}  // namespace

double now() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

MachineProbe::MachineProbe(Executor& executor, Isa isa) : executor_(executor), isa_(isa), cold_(kColdBytes) {
  std::memset(cold_.data(), 1, kColdBytes);  // pages exist from here on
  // Peaks from the calling thread alone, times the workers: whether they really run side by side is what sample()
  // watches. The best of several runs counts, since any single one may be interrupted by other programs.
  const auto best_seconds = [&](bool dot16, std::int64_t rounds, int runs) {
    const Loop loop = loop_for(isa_, dot16);
    double seconds = 1e9;
    for (int i = 0; i < runs; ++i) {
      const double start = now();
      sink_bits = static_cast<std::uint64_t>(loop.run(rounds));
      seconds = std::min(seconds, now() - start);
    }
    return seconds;
  };
  std::int64_t rounds = 4096;
  while (best_seconds(false, rounds, 5) < 2e-4) rounds *= 2;
  const auto peak = [&](bool dot16) {
    const double operations = static_cast<double>(rounds) * kAccumulators * loop_for(isa_, dot16).flops;
    return operations * executor_.num_workers() / best_seconds(dot16, rounds, 50) / 1e9;
  };
  peaks_.fma32 = peak(false);
  peaks_.dot16 = isa == Isa::avx512_bf16 ? peak(true) : peaks_.fma32;
  short_rounds_ = rounds;
  short_seconds_ = best_seconds(false, short_rounds_, 50);
}

double MachineProbe::peak_gflops(DType q_dtype, DType kv_dtype) const noexcept {
  const bool dot16 = q_dtype == DType::bf16 && (kv_dtype == DType::bf16 || kv_dtype == DType::f8e4m3);
  return dot16 ? peaks_.dot16 : peaks_.fma32;
}

double MachineProbe::timed_arithmetic(std::int64_t rounds) {
  const Loop loop = loop_for(isa_, false);
  auto task = [&](int /*worker*/) { sink_bits = static_cast<std::uint64_t>(loop.run(rounds)); };
  return timed_parallel(executor_, task);
}

double MachineProbe::timed_read(const std::byte* data, std::size_t bytes) {
  const auto workers = static_cast<std::size_t>(executor_.num_workers());
  const std::size_t part = bytes / workers / 4096 * 4096;
  auto task = [&](int worker) { sink_bits = read_all(data + static_cast<std::size_t>(worker) * part, part); };
  const double seconds = timed_parallel(executor_, task);
  return static_cast<double>(part * workers) / seconds / 1e9;
}

MachineProbe::Sample MachineProbe::sample() {
  Sample out;
  out.throttled = timed_arithmetic(short_rounds_) > 1.4 * short_seconds_;
  cold_at_ = cold_at_ + 2 * kReadBytes > kColdBytes ? 0 : cold_at_ + kReadBytes;
  out.read_gbs = timed_read(cold_.data() + cold_at_, kReadBytes);
  return out;
}

double MachineProbe::cached_read_gbs(std::size_t bytes) {
  double best = 0;
  for (int i = 0; i < 20; ++i) best = std::max(best, timed_read(cold_.data(), std::min(bytes, kColdBytes)));
  return best;
}

double MachineProbe::memory_gbs() {
  std::vector<double> rates;
  for (int i = 0; i < 31; ++i) rates.push_back(sample().read_gbs);
  std::ranges::nth_element(rates, rates.begin() + 15);
  return rates[15];
}

}  // namespace headwater::bench
