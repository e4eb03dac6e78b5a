// Named workloads; see workloads.h. The sets are written in the notation that their publications' trees come to.
#include "bench/workloads.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <random>

#include "cli/formats.h"
#include "headwater/error.h"

namespace headwater::bench {
namespace {

constexpr std::array kFastTree = {
    "1,2,64|8,256,32",
    "1,4,256|8,256,32",
    "1,4,8,256|8,256,256,32",
    "1,256|256,32",
    "1,1024|2048,32",
    "1,16,64|1024,256,32",
    "1,4,16,512|1024,256,128,32",
    "1,4,16,64,256,1024|256,8,256,64,32,256",
    "1,10|4000,400",
    "1,2,4,8,16,32,64,128,1024|16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024|256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024|256,128,64,16,16,16,16",
    "1,8,16,32,64,256,1024|256,128,64,16,16,16,16",
    "1,16,32,64,128,1024|256,128,64,16,16,16",
    "1,16,32,64,256,1024|256,128,64,16,16,16",
};

constexpr std::array kPat = {
    "1,10|4096,416",
    "1,256|256,32",
    "1,1024|2048,32",
    "1,2,64|1024,256,256",
    "1,4,256|32,256,32",
    "1,8,512|32,512,256",
    "1,8,512|32,2048,256",
    "1,8,512|512,512,256",
    "1,4,8,256|32,256,256,32",
    "1,4,16,512|1024,256,128,32",
    "1,4,16,64,256,1024|256,32,256,64,32,256",
    "2,8,16,256|256,256,32,32",
    "4,16,256,512|512,32,128,32",
    "8,16,32,256|512,512,256,32",
    "256|1024",
    "256|4096",
};

/// Tokens drawn log-uniformly from [1, max].
std::int64_t log_uniform(std::mt19937_64& random, double max) {
  const double unit = static_cast<double>(random() >> 11) / 9007199254740992.0;  // [0, 1), the same on every platform
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::exp(unit * std::log(max))));
}

Workload named(std::string name, Forest forest) {
  Workload out;
  out.name = std::move(name);
  out.forest = std::move(forest);
  return out;
}

std::uint64_t parse_number(std::string_view text, std::string_view whole) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("workload \"{}\": expected a number, got \"{}\"", whole, text));
  }
  return value;
}

std::vector<Workload> random_workloads(std::string_view name) {
  const std::string_view rest = name.substr(std::min(name.size(), std::string_view("random:").size()));
  const std::size_t colon = rest.find(':');
  const std::uint64_t seed = rest.empty() ? 1 : parse_number(rest.substr(0, colon), name);
  const std::uint64_t count = colon == std::string_view::npos ? 1 : parse_number(rest.substr(colon + 1), name);
  if (count < 1 || count > 1000) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("workload \"{}\": count: expected 1..1000, got {}", name, count));
  }
  static constexpr std::array<std::array<int, 3>, 6> kShapes = {
      {{32, 8, 128}, {16, 2, 128}, {9, 3, 64}, {8, 8, 64}, {28, 4, 128}, {8, 1, 128}}};
  std::vector<Workload> out;
  for (std::uint64_t i = 0; i < count; ++i) {
    Workload workload = named(fmt::format("random:{}", seed + i), random_forest(seed + i));
    const auto& shape = kShapes[(seed + i) % kShapes.size()];
    workload.num_qo_heads = shape[0];
    workload.num_kv_heads = shape[1];
    workload.head_dim = shape[2];
    workload.shuffled = true;
    out.push_back(std::move(workload));
  }
  return out;
}

}  // namespace

std::vector<std::int64_t> path_lengths(const Forest& forest) {
  std::vector<std::int64_t> length(forest.nodes.size());
  for (std::size_t i = 0; i < length.size(); ++i) {
    const ForestNode& node = forest.nodes[i];
    length[i] = node.num_tokens + (node.parent < 0 ? 0 : length[static_cast<std::size_t>(node.parent)]);
  }
  return length;
}

ForestTokens count_tokens(const Forest& forest) {
  ForestTokens tokens;
  const std::vector<std::int64_t> path = path_lengths(forest);
  std::vector<char> used(forest.nodes.size(), 0);
  for (const ForestRequest& request : forest.requests) {
    const auto leaf = static_cast<std::size_t>(request.node);
    tokens.flat += path[leaf];
    tokens.longest = std::max(tokens.longest, path[leaf]);
    for (std::int32_t node = request.node; node >= 0 && used[static_cast<std::size_t>(node)] == 0;
         node = forest.nodes[static_cast<std::size_t>(node)].parent) {
      used[static_cast<std::size_t>(node)] = 1;
      tokens.unique += forest.nodes[static_cast<std::size_t>(node)].num_tokens;
    }
  }
  return tokens;
}

Forest two_level(std::int64_t shared, std::int64_t batch, std::int64_t own) {
  Forest forest;
  forest.nodes.push_back({-1, shared});
  for (std::int64_t b = 0; b < batch; ++b) {
    forest.nodes.push_back({0, own});
    forest.requests.push_back({static_cast<std::int32_t>(b + 1), 1});
  }
  return forest;
}

Forest unshared(std::int64_t batch, std::int64_t tokens) {
  Forest forest;
  for (std::int64_t b = 0; b < batch; ++b) {
    forest.nodes.push_back({-1, tokens});
    forest.requests.push_back({static_cast<std::int32_t>(b), 1});
  }
  return forest;
}

Forest random_forest(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Forest forest;
  std::vector<std::int32_t> level;  // nodes of the last complete level
  const std::uint64_t roots = 1 + random() % 3;
  for (std::uint64_t r = 0; r < roots; ++r) {
    level.push_back(static_cast<std::int32_t>(forest.nodes.size()));
    forest.nodes.push_back({-1, log_uniform(random, 2048)});
  }
  const std::uint64_t depth = random() % 4;
  for (std::uint64_t d = 0; d < depth; ++d) {
    std::vector<std::int32_t> next;
    for (const std::int32_t parent : level) {
      const std::uint64_t children = 1 + random() % 4;
      for (std::uint64_t c = 0; c < children && next.size() < 64; ++c) {
        next.push_back(static_cast<std::int32_t>(forest.nodes.size()));
        forest.nodes.push_back({parent, log_uniform(random, 2048)});
      }
    }
    level = std::move(next);
  }
  const std::uint64_t copies = 1 + random() % std::max<std::uint64_t>(1, 64 / level.size());
  for (const std::int32_t parent : level) {
    for (std::uint64_t c = 0; c < copies && forest.requests.size() < 64; ++c) {
      const std::int64_t rows = random() % 8 == 0 ? 1 + static_cast<std::int64_t>(random() % 4) : 1;
      forest.requests.push_back({static_cast<std::int32_t>(forest.nodes.size()), static_cast<std::int32_t>(rows)});
      forest.nodes.push_back({parent, std::max(rows, log_uniform(random, 512))});
    }
  }
  return forest;
}

std::vector<Workload> find_workloads(std::string_view name) {
  std::vector<Workload> out;
  if (name == "fasttree" || name == "pat") {
    const bool pat = name == "pat";
    const auto add = [&](const char* notation) {
      Workload workload = named(notation, cli::parse_workload(notation));
      workload.page_size = pat ? 32 : 0;
      workload.shuffled = pat;
      out.push_back(std::move(workload));
    };
    if (pat) {
      std::ranges::for_each(kPat, add);
    } else {
      std::ranges::for_each(kFastTree, add);
    }
  } else if (name == "chat") {
    for (const int batch : {4, 8, 64}) {
      for (const int prefix : {2048, 4096, 8192}) {
        for (const int suffix : {128, 256})
          out.push_back(named(fmt::format("1,{}|{},{}", batch, prefix, suffix), two_level(prefix, batch, suffix)));
      }
    }
  } else if (name == "beam") {
    for (const int prefix : {128, 256, 512, 1024, 2048, 4096}) {
      Workload workload = named(fmt::format("1,128|{},3", prefix), two_level(prefix, 128, 3));
      workload.num_qo_heads = 16;
      workload.num_kv_heads = 8;
      workload.page_size = 16;
      out.push_back(std::move(workload));
    }
  } else if (name == "losing") {
    Workload workload = named("1,8|4000,32", two_level(4000, 8, 32));
    workload.num_qo_heads = 8;
    workload.num_kv_heads = 1;
    out.push_back(std::move(workload));
    for (const int batch : {64, 128, 256, 512})
      out.push_back(named(fmt::format("1,{}|512,32", batch), two_level(512, batch, 32)));
  } else if (name == "codec") {
    for (const int batch : {4, 16, 64})
      out.push_back(named(fmt::format("1,{}|2048,2048", batch), two_level(2048, batch, 2048)));
    std::string nodes = "1";
    std::string tokens = "1024";
    for (int depth = 2; depth <= 6; ++depth) {
      nodes += fmt::format(",{}", 1 << (depth - 1));
      tokens += ",1024";
      const std::string notation = fmt::format("{}|{}", nodes, tokens);
      out.push_back(named(notation, cli::parse_workload(notation)));
    }
  } else if (name == "flashinfer") {
    for (const int batch : {1, 16, 128}) {
      for (const int prefix : {1024, 8192}) {
        Workload workload = named(fmt::format("1,{}|{},128", batch, prefix), two_level(prefix, batch, 128));
        workload.num_qo_heads = workload.num_kv_heads = 32;
        workload.page_size = 16;
        out.push_back(std::move(workload));
      }
    }
  } else if (name == "unshared") {
    for (const char* notation : {"1|2048", "8|512", "8|2048", "64|1024"})
      out.push_back(named(notation, cli::parse_workload(notation)));
  } else if (name == "random" || name.starts_with("random:")) {
    return random_workloads(name);
  } else if (name.find('|') != std::string_view::npos) {
    out.push_back(named(std::string(name), cli::parse_workload(name)));
  } else {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format(
            "workload: expected a notation such as 1,64|8192,256 or one of fasttree, pat, chat, beam, losing, codec, "
            "flashinfer, unshared, random:SEED:COUNT, got \"{}\"",
            name));
  }
  return out;
}

std::string describe_workload_names() {
  return "  1,64|8192,256      levels: nodes per level | tokens per node; the last level's nodes are requests\n"
         "  fasttree, pat      the kernel sets of FastTree (15 trees) and PAT (16 trees, pages of 32, shuffled)\n"
         "  chat               a system prompt: batch 4, 8, 64 x prefix 2048, 4096, 8192 x suffix 128, 256\n"
         "  beam               128 beams, suffix 3, prefix 128 .. 4096, heads 16/8\n"
         "  losing             cells where cascade attention is known to lose elsewhere\n"
         "  codec, flashinfer  two-level and binary trees; multi-head attention with 32 KV heads\n"
         "  unshared           nothing shared\n"
         "  random:SEED:COUNT  seeded random forests with various heads\n";
}

}  // namespace headwater::bench
