// Machine probes; see probe.h. The loops of each instruction set are compiled with that set's target attribute, so that
// this file needs no special flags; only the set that was asked for is executed.
#include "bench/probe.h"

#include <algorithm>
#include <array>
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

/// Sums all words of a range that is read as kStreams neighbouring parts at once, each line asked for kAhead bytes
/// before its turn (0: by the processor's own foresight).
template <int kStreams, std::size_t kAhead>
std::uint64_t read_all(const std::byte* data, std::size_t bytes) noexcept {
  using Vector = std::uint64_t __attribute__((vector_size(16)));
  constexpr std::size_t kBlock = 256;
  constexpr std::size_t kVectors = kBlock / sizeof(Vector);
  const std::size_t part = bytes / kStreams / kBlock * kBlock;
  Vector sums[kVectors] = {};
  for (std::size_t i = 0; i < part; i += kBlock) {
    for (int s = 0; s < kStreams; ++s) {
      const std::byte* at = data + static_cast<std::size_t>(s) * part + i;
      for (std::size_t line = 0; kAhead > 0 && line < kBlock; line += 64) __builtin_prefetch(at + kAhead + line);
      const auto* vectors = reinterpret_cast<const Vector*>(at);
      for (std::size_t v = 0; v < kVectors; ++v) sums[v] += vectors[v];
    }
  }
  std::uint64_t sum = 0;
  for (const Vector& v : sums) sum += v[0] + v[1];
  return sum;
}

/// Processors differ in how they are read fastest; a limit must be that of the fastest.
constexpr std::array kReaders{&read_all<1, 4096>, &read_all<2, 0>, &read_all<4, 0>, &read_all<4, 1024>};

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
  read_ = kReaders[0];
  double best_rate = 0;
  for (const Reader reader : kReaders) {
    std::vector<double> rates;
    for (int i = 0; i < 9; ++i) rates.push_back(timed_read(reader, next_cold(), kReadBytes));
    std::ranges::nth_element(rates, rates.begin() + 4);
    if (rates[4] <= best_rate) continue;
    best_rate = rates[4];
    read_ = reader;
  }
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

double MachineProbe::timed_read(Reader reader, const std::byte* data, std::size_t bytes) {
  const auto workers = static_cast<std::size_t>(executor_.num_workers());
  const std::size_t part = bytes / workers / 4096 * 4096;
  auto task = [&](int worker) { sink_bits = reader(data + static_cast<std::size_t>(worker) * part, part); };
  const double seconds = timed_parallel(executor_, task);
  return static_cast<double>(part * workers) / seconds / 1e9;
}

const std::byte* MachineProbe::next_cold() noexcept {
  cold_at_ = cold_at_ + 2 * kReadBytes > kColdBytes ? 0 : cold_at_ + kReadBytes;
  return cold_.data() + cold_at_;
}

MachineProbe::Sample MachineProbe::sample() {
  Sample out;
  out.throttled = timed_arithmetic(short_rounds_) > 1.4 * short_seconds_;
  out.read_gbs = timed_read(read_, next_cold(), kReadBytes);
  return out;
}

double MachineProbe::cached_read_gbs(std::size_t bytes) {
  double best = 0;
  for (int i = 0; i < 20; ++i) best = std::max(best, timed_read(read_, cold_.data(), std::min(bytes, kColdBytes)));
  return best;
}

double MachineProbe::memory_gbs() {
  std::vector<double> rates;
  for (int i = 0; i < 31; ++i) rates.push_back(sample().read_gbs);
  std::ranges::nth_element(rates, rates.begin() + 15);
  return rates[15];
}

}  // namespace headwater::bench
