// Times the attention kernels item by item, below planner and driver: ns per key and KV head for a number of stacked
// rows, from memory and from cache, against this machine's own limits probed around it.
//
//   kernel_bench [--isa LEVEL] [--q TYPE] [--kv TYPE] [--heads 32/8] [--dim 128] [--dim-vo 128] [--page 16]
//                [--threads N] [--rows 1,4,8,...] [--keys 512] [--invariant] [--mla] [--layout hnd|nhd]
//
// --rows counts query rows; each brings group_size stacked rows. "limit" is max(bytes / read rate, products / peak) of
// the threads used; "x" is time over limit. The pool is several times the last-level cache, its page ids are shuffled.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"

namespace headwater::bench {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Processor time of this thread: what others take of a shared machine is not counted.
double cpu_now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class T>
T* huge_alloc(std::size_t n) {
  const std::size_t bytes = (n * sizeof(T) + (1U << 21) - 1) >> 21 << 21;
  void* p = mmap(nullptr, bytes + (1U << 21), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) std::abort();
  const auto at = (reinterpret_cast<std::uintptr_t>(p) + (1U << 21) - 1) >> 21 << 21;
  auto* const aligned = static_cast<char*>(p) + (at - reinterpret_cast<std::uintptr_t>(p));
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return reinterpret_cast<T*>(aligned);
}

/// Runs f(thread) on n threads, the caller being the first; returns the seconds until all are done.
template <class F>
double timed(int n, F&& f) {
  std::vector<std::thread> threads;
  const double begin = now();
  for (int i = 1; i < n; ++i) threads.emplace_back([&f, i] { f(i); });
  f(0);
  for (auto& t : threads) t.join();
  return now() - begin;
}

/// Others share the machine: samples are short, and their first decile is what the code costs when left alone. Times
/// and rates are taken alike, or their ratio would tell of the machine.
double undisturbed(std::vector<double>& samples) {
  const auto at = samples.begin() + static_cast<std::ptrdiff_t>((samples.size() - 1) / 10);
  std::nth_element(samples.begin(), at, samples.end());
  return *at;
}

volatile float sink_value;

__attribute__((target("avx2,fma"))) void fma_avx2(std::int64_t rounds) {
  __m256 acc[12];
  for (auto& a : acc) a = _mm256_setzero_ps();
  const __m256 x = _mm256_set1_ps(0.5F);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {  // through a copy: an array whose elements are asm operands would live in memory
      __m256 a = acc[j];
      a = _mm256_fmadd_ps(a, x, x);
      asm volatile("" : "+x"(a));
      acc[j] = a;
    }
  }
  for (int i = 1; i < 12; ++i) acc[0] = _mm256_add_ps(acc[0], acc[i]);
  sink_value = _mm256_cvtss_f32(acc[0]);
}
__attribute__((target("avx512f"))) void fma_avx512(std::int64_t rounds) {
  __m512 acc[12];
  for (auto& a : acc) a = _mm512_setzero_ps();
  const __m512 x = _mm512_set1_ps(0.5F);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {  // through a copy: an array whose elements are asm operands would live in memory
      __m512 a = acc[j];
      a = _mm512_fmadd_ps(a, x, x);
      asm volatile("" : "+v"(a));
      acc[j] = a;
    }
  }
  for (int i = 1; i < 12; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  sink_value = _mm512_cvtss_f32(acc[0]);
}
__attribute__((target("avx512f,avx512bf16"))) void dot_avx512(std::int64_t rounds) {
  __m512 acc[12];
  for (auto& a : acc) a = _mm512_setzero_ps();
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3F003F00);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {  // through a copy: an array whose elements are asm operands would live in memory
      __m512 a = acc[j];
      a = _mm512_dpbf16_ps(a, x, x);
      asm volatile("" : "+v"(a));
      acc[j] = a;
    }
  }
  for (int i = 1; i < 12; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  sink_value = _mm512_cvtss_f32(acc[0]);
}

double peak_gflops(Isa isa, bool dot, int threads) {
  const bool wide = isa >= Isa::avx512;
  const double flops = 12.0 * (dot ? 64 : wide ? 32 : 16);
  const std::int64_t rounds = 20'000;
  std::vector<double> samples;
  std::mutex mutex;
  timed(threads, [&](int) {
    std::vector<double> mine;
    for (int i = 0; i < 300; ++i) {
      const double begin = cpu_now();
      dot ? dot_avx512(rounds) : wide ? fma_avx512(rounds) : fma_avx2(rounds);
      mine.push_back(cpu_now() - begin);
    }
    const std::scoped_lock lock(mutex);
    samples.insert(samples.end(), mine.begin(), mine.end());
  });
  return flops * static_cast<double>(rounds) * threads / undisturbed(samples) / 1e9;
}

__attribute__((target("avx2"))) void read_avx2(const char* p, std::size_t bytes) {
  __m256i sum[4] = {};
  for (std::size_t i = 0; i + 128 <= bytes; i += 128) {
    for (std::size_t j = 0; j < 4; ++j) {
      sum[j] = _mm256_xor_si256(sum[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    }
    _mm_prefetch(p + i + 4096, _MM_HINT_T0);
    _mm_prefetch(p + i + 4160, _MM_HINT_T0);
  }
  sum[0] = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  sink_value = static_cast<float>(_mm256_extract_epi32(sum[0], 0));
}

/// Read rate of all threads together, over pieces of 1 MiB.
double read_gbs(const char* data, std::size_t bytes, int threads) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const std::size_t part = bytes / static_cast<std::size_t>(threads) / kPiece * kPiece;
  std::vector<double> samples;
  std::mutex mutex;
  timed(threads, [&](int t) {
    std::vector<double> mine;
    for (std::size_t i = 0; i < part; i += kPiece) {
      const double begin = cpu_now();
      read_avx2(data + static_cast<std::size_t>(t) * part + i, kPiece);
      mine.push_back(cpu_now() - begin);
    }
    const std::scoped_lock lock(mutex);
    samples.insert(samples.end(), mine.begin(), mine.end());
  });
  return static_cast<double>(kPiece) * threads / undisturbed(samples) / 1e9;
}

struct Setup {
  Isa isa = cpu::default_isa();
  DType q = DType::bf16, kv = DType::bf16;
  int hq = 32, hkv = 8, dqk = 128, dvo = 128, page = 16, threads = 1, keys = 512;
  std::vector<int> rows{1, 2, 3, 4, 8, 16, 32};
  bool invariant = false, mla = false, hnd = true, nhd = true;
};

DType dtype_of(const std::string& s) {
  for (const DType t : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
    if (s == name_of(t)) return t;
  }
  std::abort();
}

Setup parse(int argc, char** argv) {
  Setup s;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const auto next = [&] { return std::string(i + 1 < argc ? argv[++i] : ""); };
    if (a == "--isa") {
      const std::string n = next();
      for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
        if (n == name_of(isa)) s.isa = isa;
      }
    } else if (a == "--q") {
      s.q = dtype_of(next());
    } else if (a == "--kv") {
      s.kv = dtype_of(next());
    } else if (a == "--heads") {
      std::sscanf(next().c_str(), "%d/%d", &s.hq, &s.hkv);
    } else if (a == "--dim") {
      s.dqk = s.dvo = std::stoi(next());
    } else if (a == "--dim-vo") {
      s.dvo = std::stoi(next());
    } else if (a == "--page") {
      s.page = std::stoi(next());
    } else if (a == "--threads") {
      s.threads = std::stoi(next());
    } else if (a == "--keys") {
      s.keys = std::stoi(next());
    } else if (a == "--invariant") {
      s.invariant = true;
    } else if (a == "--layout") {
      s.hnd = next() == "hnd";
      s.nhd = !s.hnd;
    } else if (a == "--mla") {
      s.mla = true;
      s.hq = 128, s.hkv = 1, s.dqk = 576, s.dvo = 512;
      s.rows = {1};
    } else if (a == "--rows") {
      s.rows.clear();
      std::string list = next();
      for (char* p = list.data(); *p != 0;) {
        s.rows.push_back(static_cast<int>(std::strtol(p, &p, 10)));
        if (*p == ',') ++p;
      }
    }
  }
  return s;
}

class Bench {
 public:
  explicit Bench(const Setup& s) : s_(s) {
    es_ = size_of(s.kv);
    const std::size_t per_page = static_cast<std::size_t>(s.page * s.hkv) * static_cast<std::size_t>(s.dqk);
    pages_ = static_cast<int>((std::size_t{96} << 20) / (per_page * es_));
    k_ = huge_alloc<char>(static_cast<std::size_t>(pages_) * per_page * es_);
    v_ = s.mla ? k_ : huge_alloc<char>(static_cast<std::size_t>(pages_) * per_page * es_);
    pool_bytes_ = static_cast<std::size_t>(pages_) * per_page * es_;
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> noise(4099);
    for (float& x : noise) x = normal(rng);
    fill(k_, s.kv, static_cast<std::size_t>(pages_) * per_page, noise, 1);
    if (!s.mla) fill(v_, s.kv, static_cast<std::size_t>(pages_) * per_page, noise, 7);
    for (int i = 0; i < pages_; ++i) ids_.push_back(i);
    std::shuffle(ids_.begin(), ids_.end(), rng);
    max_rows_ = *std::max_element(s.rows.begin(), s.rows.end());
    q_.resize(static_cast<std::size_t>(max_rows_ * s.hq * s.dqk) * 4);
    fill(q_.data(), s.q, static_cast<std::size_t>(max_rows_ * s.hq * s.dqk), noise, 3);
    for (int i = 0; i < max_rows_; ++i) item_rows_.push_back(i);
    ranges_.assign(static_cast<std::size_t>(max_rows_), {0, 1 << 30, 1 << 30});
  }

  void run(bool hnd) {
    KvCache kv;
    kv.dtype = s_.kv;
    kv.page_size = s_.page;
    kv.num_pages = pages_;
    const std::int64_t per_page = std::int64_t{s_.page} * s_.hkv * s_.dqk;
    const PagedTensor strides = hnd ? PagedTensor{nullptr, per_page, s_.dqk, std::int64_t{s_.page} * s_.dqk}
                                    : PagedTensor{nullptr, per_page, std::int64_t{s_.hkv} * s_.dqk, s_.dqk};
    kv.k = kv.v = strides;
    kv.k.data = k_;
    kv.v.data = v_;
    const bool dot = s_.isa == Isa::avx512_bf16 && s_.q == DType::bf16 && s_.kv == DType::bf16;
    const double peak = peak_gflops(s_.isa, dot, s_.threads);
    std::printf("# %s %s q %s kv %s %d/%d/%d,%d page %d threads %d keys %d%s: peak %.0f GFLOP/s\n",
                std::string(name_of(s_.isa)).c_str(), hnd ? "HND" : "NHD", std::string(name_of(s_.q)).c_str(),
                std::string(name_of(s_.kv)).c_str(), s_.hq, s_.hkv, s_.dqk, s_.dvo, s_.page, s_.threads, s_.keys,
                s_.invariant ? " invariant" : "", peak);
    std::printf("%8s %8s | %9s %8s %8s %6s | %9s %8s %6s %9s\n", "rows", "stacked", "ns cached", "GFLOP/s", "limit",
                "x", "ns memory", "limit", "x", "read GB/s");
    std::printf("merge of 8 states: %.1f ns a state and query head; rows of 128: %s\n", time_merge(kv, 8),
                time_rows().c_str());
    for (const int rows : s_.rows) {
      const double flops = 2.0 * (s_.dqk + s_.dvo) * rows * s_.hq / s_.hkv;
      const double bytes = static_cast<double>(es_) * (s_.mla ? s_.dqk : s_.dqk + s_.dvo);
      const double cached = time(kv, rows, true);
      const double r0 = read_gbs(k_, pool_bytes_, s_.threads);
      const double cold = time(kv, rows, false);
      const double read = std::max(r0, read_gbs(k_, pool_bytes_, s_.threads));
      const double product_limit = flops / peak;
      const double limit = std::max(product_limit, bytes / read);
      std::printf("%8d %8d | %9.2f %8.1f %8.2f %6.2f | %9.2f %8.2f %6.2f %9.1f\n", rows, rows * s_.hq / s_.hkv, cached,
                  flops / cached, product_limit, cached / product_limit, cold, limit, cold / limit, read);
    }
  }

 private:
  static void fill(char* p, DType t, std::size_t n, const std::vector<float>& noise, std::size_t step) {
    cpu::with_type(t, [&](auto tag) {
      auto* to = reinterpret_cast<decltype(tag)*>(p);
      std::vector<decltype(tag)> values;
      for (const float x : noise) values.push_back(cpu::from_f32<decltype(tag)>(x));
      for (std::size_t i = 0, j = 0; i < n; ++i, j = (j + step) % values.size()) to[i] = values[j];
    });
  }

  [[nodiscard]] cpu::AttendParams params(const KvCache& kv) const {
    cpu::AttendParams p;
    p.num_qo_heads = s_.hq;
    p.num_kv_heads = s_.hkv;
    p.group_size = s_.hq / s_.hkv;
    p.head_dim_qk = s_.dqk;
    p.head_dim_vo = s_.dvo;
    p.q = {q_.data(), s_.q, std::int64_t{s_.hq} * s_.dqk, s_.dqk};
    p.kv = &kv;
    p.page_ids = ids_.data();
    p.item_rows = item_rows_.data();
    p.rows = ranges_.data();
    p.sm_scale = 1.0F / std::sqrt(static_cast<float>(s_.dqk));
    p.batch_invariant = s_.invariant;
    return p;
  }

  /// ns per state and query head of merging `count` states of a row (states of 64 rows in turn, so in L2 or L3).
  double time_merge(const KvCache& kv, int count) {
    constexpr int kRows = 64;
    const auto heads = static_cast<std::size_t>(kRows * count * s_.hq);
    std::vector<float> o(heads * static_cast<std::size_t>(s_.dvo), 0.5F);
    std::vector<float> lse(heads, 1.0F);
    std::vector<char> out(static_cast<std::size_t>(s_.hq * s_.dvo) * 4);
    cpu::AttendParams p = params(kv);
    p.partial_o = o.data();
    p.partial_lse = lse.data();
    p.out = {out.data(), s_.q, std::int64_t{s_.hq} * s_.dvo, s_.dvo};
    std::vector<double> samples;
    for (int rep = 0; rep < 40; ++rep) {
      const double begin = cpu_now();
      for (std::int32_t row = 0; row < kRows; ++row) {
        std::vector<std::int32_t> slots;
        for (int i = 0; i < count; ++i) slots.push_back(row * count + i);
        cpu::kernels_for(s_.isa).merge_row(p, 0, slots.data(), count);
      }
      samples.push_back(cpu_now() - begin);
    }
    return undisturbed(samples) / (static_cast<double>(kRows) * count * s_.hq) * 1e9;
  }

  /// Conversion and weighted sum of rows in L1: what append_kv and merge_states are made of.
  std::string time_rows() const {
    const cpu::Kernels& kernels = cpu::kernels_for(s_.isa);
    std::vector<float> x(128, 0.5F);
    std::vector<float> y(128, 0.0F);
    const auto least = [](auto&& f) {
      double best = 1.0;
      for (int rep = 0; rep < 200; ++rep) {
        const double begin = now();
        for (int i = 0; i < 1000; ++i) f();
        best = std::min(best, now() - begin);
      }
      return best * 1e6;  // ns a call
    };
    const double convert = least([&] { kernels.convert_row(x.data(), DType::f32, y.data(), DType::bf16, 128); });
    const double add = least([&] { kernels.add_weighted_row(x.data(), DType::f32, 1e-6F, y.data(), 128); });
    char text[96];
    std::snprintf(text, sizeof text, "f32 to bf16 %.1f ns, weighted sum %.1f ns", convert, add);
    return text;
  }

  /// ns per key and KV head, all threads together.
  double time(const KvCache& kv, int rows, bool cached) {
    cpu::AttendParams p = params(kv);
    const cpu::Kernels& kernels = cpu::kernels_for(s_.isa);
    const std::size_t scratch_bytes = kernels.scratch_bytes(p, rows);
    const int pages_per_item = s_.keys / s_.page;
    const int num_items = cached ? 1 : pages_ / pages_per_item / s_.threads;
    std::vector<std::byte*> scratch;
    std::vector<float> o(static_cast<std::size_t>(s_.threads * rows * s_.hq * s_.dvo));
    std::vector<float> lse(static_cast<std::size_t>(s_.threads * rows * s_.hq));
    p.partial_o = o.data();
    p.partial_lse = lse.data();
    for (int t = 0; t < s_.threads; ++t) scratch.push_back(huge_alloc<std::byte>(scratch_bytes));
    const auto one = [&](int t, int i) {
      detail::WorkItem item;
      item.num_tokens = s_.keys;
      item.page_begin = (t * num_items + i) * pages_per_item;
      item.pos_begin = s_.invariant ? 0 : i * s_.keys;
      item.num_rows = rows;
      item.partial_begin = t * rows;
      item.kv_head_end = static_cast<std::int16_t>(s_.hkv);
      item.unmasked_end = s_.keys;
      kernels.attend(p, item, {scratch[static_cast<std::size_t>(t)], scratch_bytes});
    };
    std::vector<double> samples;
    std::mutex mutex;
    timed(s_.threads, [&](int t) {
      std::vector<double> mine;
      const double stop = now() + 0.25;
      for (int i = 0; mine.size() < 10 || now() < stop; i = (i + 1) % num_items) {
        const double begin = cpu_now();
        one(t, i);
        mine.push_back(cpu_now() - begin);
      }
      const std::scoped_lock lock(mutex);
      samples.insert(samples.end(), mine.begin(), mine.end());
    });
    const double seconds = undisturbed(samples);
    for (std::byte* b : scratch) munmap(b, scratch_bytes);
    return seconds / (static_cast<double>(s_.keys) * s_.hkv * s_.threads) * 1e9;
  }

  Setup s_;
  std::size_t es_ = 2, pool_bytes_ = 0;
  int pages_ = 0, max_rows_ = 0;
  char* k_ = nullptr;
  char* v_ = nullptr;
  std::vector<std::int32_t> ids_, item_rows_;
  std::vector<detail::RowRange> ranges_;
  std::vector<char> q_;
};

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) {
  const headwater::bench::Setup setup = headwater::bench::parse(argc, argv);
  headwater::bench::Bench bench(setup);
  if (setup.hnd) bench.run(true);
  if (setup.nhd) bench.run(false);
}
