// Fixed lists of cells; see suites.h.
#include "bench/suites.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "headwater/error.h"

namespace headwater::bench {
namespace {

Workload cell(std::int64_t batch, std::int64_t shared, std::int64_t own) {
  Workload out;
  out.name = fmt::format("1,{}|{},{}", batch, shared, own);
  out.forest = two_level(shared, batch, own);
  return out;
}

Workload nothing_shared() {
  Workload out;
  out.name = "8|2048";
  out.forest = unshared(8, 2048);
  return out;
}

Workload small_model() {
  Workload out = cell(16, 2048, 64);
  out.num_qo_heads = 9;
  out.num_kv_heads = 3;
  out.head_dim = 64;
  return out;
}

std::vector<Workload> main_cells() {
  std::vector<Workload> out;
  for (const int shared : {512, 2048, 8192}) {
    for (const int batch : {1, 4, 8, 32}) out.push_back(cell(batch, shared, 256));
  }
  out.push_back(cell(64, 4096, 128));
  out.push_back(nothing_shared());
  out.push_back(small_model());
  return out;
}

BenchConfig with_types(BenchConfig config, DType type) {
  config.shape.q_dtype = config.shape.kv_dtype = config.shape.out_dtype = type;
  return config;
}

SuiteGroup group(std::string name, std::string what, std::vector<Workload> workloads, BenchConfig config,
                 double mean_bound, double cell_bound) {
  SuiteGroup out;
  out.name = std::move(name);
  out.what = std::move(what);
  out.workloads = std::move(workloads);
  out.config = std::move(config);
  out.mean_bound = mean_bound;
  out.cell_bound = cell_bound;
  return out;
}

/// One workload in many variants: types, options, head, group and page sizes. Tokens are such that all variants read as
/// many bytes as the first, fp16 with 32/8 heads of 128 in pages of 16.
std::vector<Workload> feature_cells(bool shared) {
  std::vector<Workload> out;
  const auto add = [&](const std::string& name, std::function<void(BenchConfig&)> configure, int num_rows = 1,
                       std::int64_t more_tokens = 0) {
    Workload one;
    BenchConfig config;
    config.shape = {32, 8, 128, 128, DType::f16, DType::f16, DType::f16};
    configure(config);
    const AttentionShape& s = config.shape;
    const double bytes =
        s.num_kv_heads * (s.head_dim_qk + s.head_dim_vo) * static_cast<double>(size_of(s.kv_dtype));  // of a token
    // Whole pages of 16, so that a shared last page is not stored again by every request.
    const auto tokens = [&](int of_base) { return 16 * std::llround(of_base / 16 * 8 * 256 * 2 / bytes); };
    one.forest =
        shared ? two_level(tokens(4096) + more_tokens, 32, tokens(256)) : unshared(32, tokens(2048) + more_tokens);
    for (ForestRequest& request : one.forest.requests) request.num_rows = num_rows;
    one.name = (shared ? "shared, " : "unshared, ") + name;
    one.configure = [shape = config.shape, configure](BenchConfig& to) {
      to.shape = shape;
      configure(to);
    };
    out.push_back(std::move(one));
  };
  add("fp16 32/8/128", [](BenchConfig&) {});
  add("fp8 KV", [](BenchConfig& c) { c.shape.kv_dtype = DType::f8e4m3; });
  // As many tokens in the window as the base has in all.
  add(
      "window", [shared](BenchConfig& c) { c.plan.window_left = (shared ? 4096 + 256 : 2048) - 1; }, 1, 2048);
  add(
      "window from within a page", [shared](BenchConfig& c) { c.plan.window_left = (shared ? 4096 + 256 : 2048) - 9; },
      1, 2048);
  add("soft-cap", [](BenchConfig& c) { c.plan.logits_soft_cap = 30.0F; });
  add("learned sinks", [](BenchConfig& c) { c.plan.sinks = true; });
  add("ALiBi", [](BenchConfig& c) { c.plan.alibi = true; });
  for (const int dim : {64, 96, 192, 256}) {
    add(fmt::format("head size {}", dim), [dim](BenchConfig& c) { c.shape.head_dim_qk = c.shape.head_dim_vo = dim; });
  }
  for (const int size : {1, 3, 5, 8}) {
    add(fmt::format("group of {}", size), [size](BenchConfig& c) { c.shape.num_qo_heads = 8 * size; });
  }
  for (const int size : {1, 8, 64, 256}) {
    add(fmt::format("pages of {}", size), [size](BenchConfig& c) { c.page_size = size; });
  }
  add(
      "4 query rows", [](BenchConfig&) {}, 4);
  return out;
}

std::vector<SuiteGroup> all_groups(const BenchConfig& base) {
  BenchConfig bf16 = with_types(base, DType::bf16);
  bf16.shape.num_qo_heads = 32;
  bf16.shape.num_kv_heads = 8;
  bf16.shape.head_dim_qk = bf16.shape.head_dim_vo = 128;
  bf16.page_size = 16;
  BenchConfig nhd = bf16;
  nhd.layout = Layout::nhd;
  bf16.layout = Layout::hnd;
  BenchConfig mla = bf16;
  mla.mla = true;
  mla.shape.num_qo_heads = 16;
  mla.shape.num_kv_heads = 1;
  mla.shape.head_dim_qk = 576;
  mla.shape.head_dim_vo = 512;
  const std::vector<Workload> three = {cell(8, 2048, 256), cell(32, 2048, 256), nothing_shared()};

  std::vector<SuiteGroup> out;
  out.push_back(group("hnd", "bf16, 32/8/128, page 16, HND", main_cells(), bf16, 1.6, 2.1));
  out.push_back(group("nhd", "bf16, 32/8/128, page 16, NHD", main_cells(), nhd, 1.9, 2.6));
  out.push_back(group("fp32", "fp32 q and KV, 32/8/128, HND", {cell(8, 2048, 256), cell(32, 2048, 256)},
                      with_types(bf16, DType::f32), 1.6, 0));
  out.push_back(group("avx2", "bf16 on AVX2, HND", three, bf16, 0, 2.2));
  out.back().isa = Isa::avx2;
  out.push_back(group("fp16", "fp16 q and KV, HND", three, with_types(bf16, DType::f16), 0, 2.2));
  out.push_back(group("mla", "latent attention 576/512, V a view of K, bf16", {cell(8, 2048, 256), cell(32, 2048, 256)},
                      mla, 0, 4.0));
  SuiteGroup cascade = group("cascade", "bf16, B = 8, P = 8192: cascade over flat", {cell(8, 8192, 256)}, bf16, 0, 0);
  cascade.config.policies = {Policy::flat, Policy::automatic};
  cascade.config.min_samples = kMinPairs;
  cascade.speedup_bound = 1.5;
  out.push_back(std::move(cascade));

  SuiteGroup policies = group("policies", "every policy; auto never slower than flat", main_cells(), bf16, 0, 0);
  for (const char* set : {"losing", "beam", "random:1:12"}) {
    for (Workload& workload : find_workloads(set)) policies.workloads.push_back(std::move(workload));
  }
  policies.config.policies = {Policy::flat, Policy::automatic, Policy::two_level, Policy::vllm, Policy::forest};
  policies.config.min_samples = kMinPairs;
  policies.never_slower = true;
  out.push_back(std::move(policies));

  for (const bool shared : {false, true}) {
    SuiteGroup features = group("features", "the same bytes in every cell; time / limit against the first cell's",
                                feature_cells(shared), with_types(bf16, DType::f16), 0, 0);
    features.config.page_size = 16;
    features.config.error_rows = 1;
    features.feature_bound = 3;
    out.push_back(std::move(features));
  }
  return out;
}

}  // namespace

std::vector<SuiteGroup> find_suite(std::string_view name, const BenchConfig& base, bool cuda) {
  std::vector<SuiteGroup> out;
  for (SuiteGroup& candidate : all_groups(base)) {
    const bool in_cells = candidate.name == "hnd" || candidate.name == "nhd" || candidate.name == "fp32";
    const bool in_isa = candidate.name == "avx2" || candidate.name == "fp16" || candidate.name == "mla";
    if (candidate.name == name || (name == "cells" && in_cells) || (name == "isa" && in_isa))
      out.push_back(std::move(candidate));
  }
  if (out.empty()) {
    throw Error(ErrorCode::invalid_argument, fmt::format("suite: expected one of cells, hnd, nhd, fp32, isa, avx2, "
                                                         "fp16, mla, cascade, policies, features, got \"{}\"",
                                                         name));
  }
  if (!cuda) {
    std::erase_if(out, [](const SuiteGroup& one) { return one.feature_bound > 0; });
    if (out.empty()) throw Error(ErrorCode::unsupported, fmt::format("suite {}: its cells run on a device only", name));
    return out;
  }
  std::erase_if(out, [](const SuiteGroup& one) {
    return one.config.mla || one.config.shape.q_dtype == DType::f32 || one.isa.has_value();
  });
  if (out.empty()) throw Error(ErrorCode::unsupported, fmt::format("suite {}: its cells run on the CPU only", name));
  for (SuiteGroup& one : out) one.mean_bound = one.cell_bound = 0;
  return out;
}

}  // namespace headwater::bench
