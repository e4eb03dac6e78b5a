// Measures the engine itself: `engine_bench switch` (cost of alternating products and attention regions),
// `engine_bench products MODEL` (the matrices of one step by number of rows), `engine_bench prefill MODEL` (a cold
// prompt), `engine_bench decode MODEL` (questions on one document: flat and cascade in turn). Tables on stdout.
//   options: --threads N, --prompt N, --questions N, --tokens N, --weights f32|bf16, --kv f32|bf16, --reps N, --chunk N
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/model.h"
#include "engine/omp_executor.h"

namespace {

using namespace headwater;
using namespace headwater::engine;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0.0 : values[values.size() / 2];
}

struct Arguments {
  std::string command;
  std::string model;
  int threads = 0;
  int prompt = 2048;
  int questions = 16;
  int tokens = 64;
  int reps = 5;
  int chunk = 512;
  WeightType weights = WeightType::automatic;
  DType kv = DType::bf16;
  ProductKind kind = ProductKind::automatic;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::stoi(argv[++i]) : 0; };
    const auto text = [&] { return std::string(i + 1 < argc ? argv[++i] : ""); };
    if (word == "--threads") {
      a.threads = number();
    } else if (word == "--prompt") {
      a.prompt = number();
    } else if (word == "--questions") {
      a.questions = number();
    } else if (word == "--tokens") {
      a.tokens = number();
    } else if (word == "--reps") {
      a.reps = number();
    } else if (word == "--chunk") {
      a.chunk = number();
    } else if (word == "--weights") {
      a.weights = text() == "bf16" ? WeightType::bf16 : WeightType::f32;
    } else if (word == "--kv") {
      a.kv = text() == "bf16" ? DType::bf16 : DType::f32;
    } else if (word == "--kind") {
      const std::string kind = text();
      a.kind = kind == "matmul"          ? ProductKind::matmul
               : kind == "inner_product" ? ProductKind::inner_product
                                         : ProductKind::convolution;
    } else if (a.command.empty()) {
      a.command = word;
    } else {
      a.model = word;
    }
  }
  return a;
}

/// Alternates a small product with an executor region and subtracts what each costs alone.
void bench_switch(const Arguments& a) {
  const std::unique_ptr<Executor> executor = make_executor(a.threads);
  const ProductThreads threads(executor->num_workers());
  const Product product({576, 576, false}, DType::f32);
  HugeBuffer weights(product.packed_bytes());
  std::vector<float> plain(std::size_t{576} * 576, 0.01F);
  product.pack(plain.data(), weights.data());
  std::vector<float> x(std::size_t{8} * 576, 1.0F);
  std::vector<float> y(std::size_t{8} * 576);
  const auto run_product = [&] { product.run(weights.data(), x.data(), y.data(), 8); };
  const auto region = [&](Executor& e) { e.parallel([](void*, int) noexcept {}, nullptr); };
  const auto time_of = [&](auto&& body) {
    std::vector<double> samples;
    for (int rep = 0; rep < 15; ++rep) {
      const auto begin = Clock::now();
      for (int i = 0; i < 200; ++i) body();
      samples.push_back(seconds_since(begin) / 200 * 1e6);
    }
    return median(samples);
  };
  ThreadPool pool(executor->num_workers());
  const double alone = time_of(run_product);
  const double region_alone = time_of([&] { region(*executor); });
  const double both = time_of([&] {
    run_product();
    region(*executor);
  });
  const double pool_alone = time_of([&] { region(pool); });
  const double both_pool = time_of([&] {
    run_product();
    region(pool);
  });
  std::printf("workers %d, microseconds (median of 15 x 200)\n", executor->num_workers());
  std::printf("product alone %.2f, region alone %.2f, product + region %.2f: switch %.2f\n", alone, region_alone, both,
              both - alone - region_alone);
  std::printf("for comparison a second pool: region alone %.2f, product + region %.2f: switch %.2f\n", pool_alone,
              both_pool, both_pool - alone - pool_alone);
}

void bench_products(const Arguments& a) {
  const Gguf gguf = Gguf::open(a.model);
  const ModelConfig c = read_model_config(gguf);
  const std::unique_ptr<Executor> executor = make_executor(a.threads);
  const ProductThreads threads(executor->num_workers());
  const DType type = a.weights == WeightType::bf16 || (a.weights == WeightType::automatic && has_bf16_products())
                         ? DType::bf16
                         : DType::f32;
  struct Shape {
    ProductShape shape;
    int count;
  };
  const std::vector<Shape> shapes{{{c.hidden, c.qkv_width(), false}, c.num_layers},
                                  {{c.q_width(), c.hidden, true}, c.num_layers},
                                  {{c.hidden, 2 * c.ffn, false}, c.num_layers},
                                  {{c.ffn, c.hidden, true}, c.num_layers},
                                  {{c.hidden, c.vocab, false}, 1}};
  std::printf("%s, %d threads; milliseconds of one step (min of %d)\n", std::string(name_of(type)).c_str(),
              executor->num_workers(), a.reps);
  std::printf("%6s %9s %9s %9s %9s %9s %9s %9s  implementation\n", "rows", "total", "qkv", "out", "gate_up", "down",
              "logits", "GFLOP/s");
  std::vector<Product> products;
  std::vector<HugeBuffer> arenas;
  for (const Shape& s : shapes) {
    products.emplace_back(s.shape, type, a.kind);
    const std::size_t bytes = products.back().packed_bytes();
    arenas.emplace_back(bytes * static_cast<std::size_t>(s.count));
    std::vector<float> plain(
        static_cast<std::size_t>(s.shape.in_features) * static_cast<std::size_t>(s.shape.out_features), 0.01F);
    for (int i = 0; i < s.count; ++i)
      products.back().pack(plain.data(), arenas.back().data() + bytes * static_cast<std::size_t>(i));
  }
  HugeBuffer x(std::size_t{2112} * static_cast<std::size_t>(std::max(c.hidden, c.ffn)) * 4);
  HugeBuffer y(std::size_t{2112} * static_cast<std::size_t>(2 * c.ffn) * 4 +
               std::size_t{64} * static_cast<std::size_t>(c.vocab) * 4);
  for (const int rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048}) {
    double total = 0;
    double flops = 0;
    std::vector<double> parts;
    for (std::size_t s = 0; s < shapes.size(); ++s) {
      const int n = s + 1 == shapes.size() ? std::min(rows, 64) : rows;
      const std::size_t bytes = products[s].packed_bytes();
      double best = 1e9;
      for (int rep = 0; rep < a.reps; ++rep) {
        const auto begin = Clock::now();
        for (int i = 0; i < shapes[s].count; ++i) {
          products[s].run(arenas[s].data() + bytes * static_cast<std::size_t>(i), x.data(), y.as<float>(), n);
        }
        best = std::min(best, seconds_since(begin) * 1e3);
      }
      parts.push_back(best);
      total += best;
      flops += 2.0 * n * shapes[s].shape.in_features * shapes[s].shape.out_features * shapes[s].count;
    }
    std::printf("%6d %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %9.1f  %s\n", rows, total, parts[0], parts[1], parts[2],
                parts[3], parts[4], flops / total * 1e-6, products[2].implementation(rows).c_str());
  }
  for (std::size_t s = 0; s < shapes.size(); ++s) {
    std::printf("rows agree bit for bit, %d -> %d: %s\n", shapes[s].shape.in_features, shapes[s].shape.out_features,
                products[s].rows_agree(arenas[s].data(), s + 1 == shapes.size() ? 64 : 512) ? "yes" : "no");
  }
}

std::vector<std::int32_t> some_tokens(const Model& model, int count, std::uint32_t seed) {
  std::vector<std::int32_t> tokens;
  std::uint32_t state = seed;
  for (int i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    tokens.push_back(static_cast<std::int32_t>(
        300 + (state >> 8) % static_cast<std::uint32_t>(std::max(1, model.config().vocab - 300))));
  }
  return tokens;
}

double resident_mib() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

std::shared_ptr<const Model> load(const Arguments& a) {
  const auto begin = Clock::now();
  ModelOptions options;
  options.num_threads = a.threads;
  options.weights = a.weights;
  auto model = load_model(a.model, options);
  std::printf("model %s, weights %s, %d threads, loaded in %.2f s, resident %.0f MiB\n", model->config().name.c_str(),
              std::string(name_of(model->weight_type())).c_str(), model->num_threads(), seconds_since(begin),
              resident_mib());
  return model;
}

/// The same engine for all repetitions, its pool just large enough: from the second on no memory is touched first.
void bench_prefill(const Arguments& a) {
  const auto model = load(a);
  EngineOptions options;
  options.kv_dtype = a.kv;
  options.max_step_tokens = a.chunk;
  options.num_pages = a.prompt / options.page_size + 2;
  Engine engine(model, options);
  for (int rep = 0; rep < a.reps; ++rep) {
    engine.submit({.prompt = some_tokens(*model, a.prompt, static_cast<std::uint32_t>(rep + 1)), .max_tokens = 1});
    const auto begin = Clock::now();
    double attention = 0;
    double append = 0;
    double products = 0;
    while (engine.has_work()) {
      (void)engine.step();
      attention += engine.last_step().attention_seconds;
      append += engine.last_step().append_seconds;
      products += engine.last_step().product_seconds;
    }
    const double total = seconds_since(begin);
    std::printf(
        "prefill of %d tokens: %.3f s (products %.3f, attention %.3f, append %.3f, rest %.3f), isa %s, peak %.0f MiB\n",
        a.prompt, total, products, attention, append, total - products - attention - append,
        std::string(name_of(engine.last_step().isa)).c_str(), peak_mib());
    std::fflush(stdout);
  }
}

void bench_decode(const Arguments& a) {
  const auto model = load(a);
  for (int rep = 0; rep < a.reps; ++rep) {
    for (const bool cascade : {false, true}) {
      EngineOptions options;
      options.kv_dtype = a.kv;
      options.max_step_tokens = a.chunk;
      options.plan.cascade = cascade ? CascadeSwitch::automatic : CascadeSwitch::off;
      Engine engine(model, options);
      const std::vector<std::int32_t> document = some_tokens(*model, a.prompt, 1);
      for (int q = 0; q < a.questions; ++q) {
        Request request;
        request.prompt = document;
        const auto question = some_tokens(*model, 32, static_cast<std::uint32_t>(100 + q));
        request.prompt.insert(request.prompt.end(), question.begin(), question.end());
        request.max_tokens = a.tokens;
        request.ignore_eos = true;
        engine.submit(request);
      }
      std::vector<double> steps, attention, products, plans;
      const auto begin = Clock::now();
      double prefill = 0;
      double decode_begin = 0;
      std::int64_t decoded = 0;
      StepStats sample;
      while (engine.has_work()) {
        (void)engine.step();
        const StepStats& s = engine.last_step();
        if (s.decode_rows == a.questions && s.prefill_rows == 0) {
          if (decoded == 0) {
            prefill = seconds_since(begin) - s.step_seconds;
            decode_begin = prefill;
          }
          decoded += s.decode_rows;
          steps.push_back(s.step_seconds * 1e3);
          attention.push_back(s.attention_seconds * 1e3);
          products.push_back(s.product_seconds * 1e3);
          plans.push_back(s.plan_seconds * 1e6);
          sample = s;
        }
      }
      const double decode = seconds_since(begin) - decode_begin;
      const double step = median(steps);
      std::printf(
          "%-7s path %s: %d x %d tokens, %.0f tok/s (by median step %.0f); step %.2f ms: attention %.2f, products "
          "%.2f, plan %.0f us; "
          "KV read/unique/flat %.1f/%.1f/%.1f MiB; prefill %.2f s; peak %.0f MiB\n",
          cascade ? "cascade" : "flat", std::string(name_of(sample.path)).c_str(), a.questions, a.tokens,
          static_cast<double>(decoded) / decode, a.questions / step * 1e3, step, median(attention), median(products),
          median(plans), static_cast<double>(sample.kv_bytes_read) / 1048576,
          static_cast<double>(sample.kv_bytes_unique) / 1048576, static_cast<double>(sample.kv_bytes_flat) / 1048576,
          prefill, peak_mib());
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments a = parse(argc, argv);
    if (a.command == "switch") {
      bench_switch(a);
    } else if (a.command == "products") {
      bench_products(a);
    } else if (a.command == "prefill") {
      bench_prefill(a);
    } else if (a.command == "decode") {
      bench_decode(a);
    } else {
      std::fprintf(stderr, "usage: engine_bench switch | products MODEL | prefill MODEL | decode MODEL [options]\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
