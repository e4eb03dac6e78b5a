// Readers of tree files, traces, page tables and device models; see formats.h. The workload notation is in
// workload_notation.cc.
#include "cli/formats.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <unordered_map>

#include "cli/json_reader.h"
#include "headwater/error.h"

namespace headwater::cli {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxCsvTokens = std::int64_t{1} << 24;  ///< of a request that is cut into blocks here
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;     ///< of a node or a request: positions are 32-bit
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 31;
constexpr std::int64_t kMaxNodes = std::int64_t{1} << 20;

/// Calls visit(line text, line number) for every line that is not blank.
template <typename Visit>
void for_each_line(std::string_view text, const Visit& visit) {
  int number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.find_first_not_of(" \t") != std::string_view::npos) visit(line, number);
  }
}

template <typename Names>
std::string joined(const Names& names) {
  std::string out;
  for (const auto& name : names) out.append(out.empty() ? "" : ", ").append(name);
  return out;
}

}  // namespace

std::string read_file(const std::string& path) {
  if (path == "-") return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
  std::ifstream in(path, std::ios::binary);
  std::string text;
  try {
    if (in) text.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  } catch (const std::ios_base::failure&) {  // a directory, for instance
    in.setstate(std::ios::badbit);
  }
  if (!in || in.bad()) {
    throw Error(ErrorCode::io, fmt::format("{}: cannot be read: {}", path, std::strerror(errno != 0 ? errno : EIO)));
  }
  return text;
}

// --- Trees
// ----------------------------------------------------------------------------------------------------------------

std::int64_t Tree::last_step() const noexcept {
  std::int64_t last = 0;
  for (const TreeNode& node : nodes) last = std::max(last, node.last_step);
  return last;
}

bench::Forest Tree::at_step(std::int64_t step) const {
  bench::Forest forest;
  std::vector<std::int32_t> index(nodes.size(), -1);  // node -> node of `forest`
  // Ancestors of live leaves, in file order, so that parents come first.
  std::vector<char> needed(nodes.size(), 0);
  const auto live = [&](std::size_t i) {
    return nodes[i].parent >= 0 && nodes[i].first_step <= step && step <= nodes[i].last_step;
  };
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!live(i)) continue;
    needed[i] = 1;
    for (std::int64_t up = nodes[i].parent; up >= 0; up = nodes[static_cast<std::size_t>(up)].parent) {
      needed[static_cast<std::size_t>(up)] = 1;
    }
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (needed[i] == 0) continue;
    const TreeNode& node = nodes[i];
    index[i] = static_cast<std::int32_t>(forest.nodes.size());
    const std::int32_t parent = node.parent < 0 ? -1 : index[static_cast<std::size_t>(node.parent)];
    forest.nodes.push_back({parent, live(i) ? step - node.first_step + 1 : node.num_tokens});
    if (live(i)) forest.requests.push_back({index[i], 1});
  }
  return forest;
}

namespace {

Tree parse_tree(const Place& place) {
  const json value = parse_json(place);
  ObjectReader reader(value, place);
  const json& nodes = reader.array("nodes");
  reader.finish();
  if (nodes.empty()) reader.fail("nodes", "expected at least one node, got none");
  if (static_cast<std::int64_t>(nodes.size()) > kMaxNodes) {
    reader.fail("nodes", fmt::format("expected at most {} nodes, got {}", kMaxNodes, nodes.size()));
  }
  Tree tree;
  std::unordered_map<std::int64_t, std::int64_t> index_of_id;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    ObjectReader node(nodes[i], place, fmt::format("nodes[{}].", i));
    const std::int64_t id = node.integer("id", 0, INT32_MAX);
    const std::int64_t parent = node.integer("parent", -1, INT32_MAX);
    TreeNode out;
    out.num_tokens = node.integer("num_tokens", 0, kMaxTokens);
    out.first_step = node.integer("first_step", -kMaxSteps, kMaxSteps);
    out.last_step = node.integer("last_step", -kMaxSteps, kMaxSteps);
    node.finish();
    if ((parent < 0) != (i == 0)) {
      node.fail("parent", i == 0 ? fmt::format("expected -1 (the first node is the root), got {}", parent)
                                 : "expected the id of an earlier node, got -1 (there is one root)");
    }
    if (parent >= 0) {
      const auto it = index_of_id.find(parent);
      if (it == index_of_id.end())
        node.fail("parent", fmt::format("expected the id of an earlier node, got {}", parent));
      out.parent = it->second;
    }
    if (!index_of_id.emplace(id, static_cast<std::int64_t>(i)).second) {
      node.fail("id", fmt::format("expected an id not used before, got {}", id));
    }
    if (out.first_step > out.last_step + 1) {  // equal to last_step + 1: a node without tokens
      node.fail("first_step",
                fmt::format("expected at most last_step + 1 = {}, got {}", out.last_step + 1, out.first_step));
    }
    tree.nodes.push_back(out);
  }
  return tree;
}

}  // namespace

std::vector<Tree> parse_trees(std::string_view text, std::string_view name) {
  std::vector<Tree> trees;
  for_each_line(text, [&](std::string_view line, int number) { trees.push_back(parse_tree({name, line, number})); });
  if (trees.empty()) throw Error(ErrorCode::io, fmt::format("{}:1: expected a tree, got an empty file", name));
  return trees;
}

// --- Traces
// ---------------------------------------------------------------------------------------------------------------

double Trace::duration(double rate) const noexcept {
  if (requests.empty()) return 0;
  return static_cast<double>(requests.back().timestamp_ms - requests.front().timestamp_ms) / 1000.0 / rate;
}

bench::Forest Trace::at_time(double seconds, double rate) const {
  constexpr double kPrefillSeconds = 1.0;
  constexpr double kTokensPerSecond = 30.0;
  bench::Forest forest;
  // Trie of blocks: (node above, hash id, tokens of the block in this request) -> node.
  std::map<std::array<std::int64_t, 3>, std::int32_t> blocks;
  const auto add_node = [&](std::int32_t parent, std::int64_t tokens) {
    forest.nodes.push_back({parent, tokens});
    return static_cast<std::int32_t>(forest.nodes.size() - 1);
  };
  const std::int64_t origin = requests.empty() ? 0 : requests.front().timestamp_ms;
  for (const TraceRequest& request : requests) {
    const double start = static_cast<double>(request.timestamp_ms - origin) / 1000.0 / rate + kPrefillSeconds;
    const double lifetime = static_cast<double>(request.output_length) / kTokensPerSecond;
    if (seconds < start || seconds >= start + lifetime) continue;
    std::int32_t node = -1;
    std::int64_t left = request.input_length;
    for (const std::int64_t id : request.hash_ids) {
      const std::int64_t tokens = std::min(left, block_tokens);
      left -= tokens;
      const auto [it, fresh] = blocks.try_emplace({node, id, tokens}, 0);
      if (fresh) it->second = add_node(node, tokens);
      node = it->second;
    }
    const auto generated = static_cast<std::int64_t>((seconds - start) * kTokensPerSecond);
    forest.requests.push_back({add_node(node, left + std::min(generated, request.output_length)), 1});
  }
  return forest;
}

Trace parse_trace_jsonl(std::string_view text, std::string_view name) {
  Trace trace;
  for_each_line(text, [&](std::string_view line, int number) {
    const Place place{name, line, number};
    const json value = parse_json(place);
    ObjectReader reader(value, place);
    TraceRequest request;
    request.timestamp_ms = reader.integer("timestamp", 0, std::int64_t{1} << 50);
    request.input_length = reader.integer("input_length", 1, kMaxTokens);
    request.output_length = reader.integer("output_length", 0, kMaxTokens);
    request.hash_ids = reader.int64_array("hash_ids", 0, INT64_MAX);
    reader.finish();
    const std::int64_t blocks = (request.input_length + trace.block_tokens - 1) / trace.block_tokens;
    if (static_cast<std::int64_t>(request.hash_ids.size()) != blocks) {
      reader.fail("hash_ids", fmt::format("expected {} ids (one per {} tokens of input_length = {}), got {}", blocks,
                                          trace.block_tokens, request.input_length, request.hash_ids.size()));
    }
    if (!trace.requests.empty() && request.timestamp_ms < trace.requests.back().timestamp_ms) {
      reader.fail("timestamp", fmt::format("expected at least that of the line before ({}), got {}",
                                           trace.requests.back().timestamp_ms, request.timestamp_ms));
    }
    trace.requests.push_back(std::move(request));
  });
  if (trace.requests.empty())
    throw Error(ErrorCode::io, fmt::format("{}:1: expected a request, got an empty file", name));
  return trace;
}

Trace parse_trace_csv(std::string_view text, std::string_view name) {
  static constexpr std::array<std::string_view, 3> kFields = {"label", "input_tokens", "output_tokens"};
  Trace trace;
  trace.block_tokens = 1;
  std::vector<std::string> labels;
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> shortest;  // label -> (shortest input, number)
  for_each_line(text, [&](std::string_view line, int number) {
    std::array<std::string_view, 3> cells;
    const auto commas = std::ranges::count(line, ',');
    if (commas != 2) {
      throw Error(ErrorCode::io, fmt::format("{}:{}: expected 3 fields (label,input_tokens,output_tokens), got {}",
                                             name, number, commas + 1));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t end = std::min(line.find(','), line.size());
      cells[i] = line.substr(0, end);
      line.remove_prefix(std::min(end + 1, line.size()));
    }
    const auto fail = [&](std::size_t field, std::string_view expected) {
      throw Error(ErrorCode::io, fmt::format("{}:{}: {}: expected {}, got \"{}\"", name, number, kFields[field],
                                             expected, cells[field]));
    };
    if (cells[0].empty()) fail(0, "a label");
    std::array<std::int64_t, 3> numbers{};
    for (std::size_t i = 1; i < 3; ++i) {
      const std::int64_t min = i == 1 ? 1 : 0;
      const auto [end, error] = std::from_chars(cells[i].data(), cells[i].data() + cells[i].size(), numbers[i]);
      if (error != std::errc() || end != cells[i].data() + cells[i].size() || numbers[i] < min ||
          numbers[i] > kMaxCsvTokens) {
        fail(i, fmt::format("an integer in [{}, {}]", min, kMaxCsvTokens));
      }
    }
    labels.emplace_back(cells[0]);
    trace.requests.push_back({0, numbers[1], numbers[2], {}});
    const auto [it, fresh] = shortest.try_emplace(labels.back(), numbers[1], std::ssize(shortest));
    it->second.first = std::min(it->second.first, numbers[1]);
  });
  if (trace.requests.empty())
    throw Error(ErrorCode::io, fmt::format("{}:1: expected a request, got an empty file", name));
  // A root prompt becomes one block; all of a trace's blocks have one length, so the shared part is cut to a common
  // unit.
  std::int64_t unit = std::numeric_limits<std::int64_t>::max();
  for (const auto& [label, root] : shortest) unit = std::min(unit, std::max<std::int64_t>(root.first - 1, 1));
  unit = std::min<std::int64_t>(unit, 64);
  trace.block_tokens = unit;
  std::int64_t own = std::ssize(shortest) << 32;  // ids of the parts that nobody shares
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    TraceRequest& request = trace.requests[i];
    const auto& [root_tokens, root_number] = shortest.at(labels[i]);
    const std::int64_t shared = (root_tokens - 1) / unit;
    const std::int64_t blocks = (request.input_length + unit - 1) / unit;
    for (std::int64_t b = 0; b < blocks; ++b) request.hash_ids.push_back(b < shared ? (root_number << 32) + b : own++);
  }
  return trace;
}

Trace parse_trace(std::string_view text, std::string_view name) {
  return name.ends_with(".csv") ? parse_trace_csv(text, name) : parse_trace_jsonl(text, name);
}

// --- Page tables
// ------------------------------------------------------------------------------------------------------------

Batch PageTableFile::batch() const {
  Batch out;
  out.qo_indptr = qo_indptr;
  out.kv = {kv_indptr, kv_indices, kv_last_page_len, page_size, num_pages, null_page};
  out.kv_start_page = kv_start_page;
  out.first_page_offset = first_page_offset;
  return out;
}

PageTableFile parse_page_table(std::string_view text, std::string_view name, const PlanOptions& base) {
  const Place place{name, text, 1};
  const json value = parse_json(place);
  ObjectReader reader(value, place);
  PageTableFile table;
  const auto int32 = [&](std::string_view key, std::int64_t min, std::int64_t fallback) {
    return static_cast<int>(reader.integer_or(key, min, INT32_MAX, fallback));
  };
  table.page_size = static_cast<int>(reader.integer("page_size", 1, 1 << 20));
  table.qo_indptr = reader.int32_array("qo_indptr");
  table.kv_indptr = reader.int32_array("kv_indptr");
  table.kv_indices = reader.int32_array("kv_indices");
  table.kv_last_page_len = reader.int32_array("kv_last_page_len");
  if (reader.has("kv_start_page")) table.kv_start_page = reader.int32_array("kv_start_page");
  if (reader.has("first_page_offset")) table.first_page_offset = reader.int32_array("first_page_offset");
  std::int64_t largest = 0;
  for (const std::int32_t id : table.kv_indices) largest = std::max<std::int64_t>(largest, id);
  table.num_pages = reader.integer_or("num_pages", 1, INT32_MAX, largest + 1);
  table.null_page = int32("null_page", -1, -1);

  AttentionShape& shape = table.shape;
  shape.num_qo_heads = int32("num_qo_heads", 1, shape.num_qo_heads);
  shape.num_kv_heads = int32("num_kv_heads", 1, shape.num_kv_heads);
  shape.head_dim_qk = shape.head_dim_vo = int32("head_dim", 1, shape.head_dim_qk);
  shape.head_dim_qk = int32("head_dim_qk", 1, shape.head_dim_qk);
  shape.head_dim_vo = int32("head_dim_vo", 1, shape.head_dim_vo);
  const auto dtype = [&](std::string_view key, DType fallback) {
    const std::string text_value = reader.string_or(key, name_of(fallback));
    try {
      return parse_dtype(text_value, key);
    } catch (const Error& e) {
      place.fail("", e.what());
    }
  };
  shape.q_dtype = dtype("q_dtype", shape.q_dtype);
  shape.kv_dtype = dtype("kv_dtype", shape.kv_dtype);
  shape.out_dtype = dtype("out_dtype", shape.q_dtype);

  PlanOptions& options = table.options;
  options = base;
  try {
    if (reader.has("policy")) {
      options.policy = parse_policy(reader.string_or("policy", ""), "policy");
      options.cascade = CascadeSwitch::automatic;
    }
    if (reader.has("cascade")) options.cascade = parse_cascade(reader.string_or("cascade", ""), "cascade");
  } catch (const Error& e) {
    place.fail("", e.what());
  }
  options.causal = reader.boolean_or("causal", options.causal);
  options.window_left = reader.integer_or("window_left", -1, INT32_MAX, options.window_left);
  options.local_chunk = reader.integer_or("local_chunk", 0, INT32_MAX, options.local_chunk);
  options.num_sink_tokens = reader.integer_or("num_sink_tokens", 0, INT32_MAX, options.num_sink_tokens);
  options.logits_soft_cap = static_cast<float>(reader.number_or("logits_soft_cap", 0, 1e30, options.logits_soft_cap));
  options.alibi = reader.boolean_or("alibi", options.alibi);
  options.sinks = reader.boolean_or("sinks", options.sinks);
  options.min_shared_pages = int32("min_shared_pages", 0, options.min_shared_pages);
  options.min_members = int32("min_members", 0, options.min_members);
  options.batch_invariant = reader.boolean_or("batch_invariant", options.batch_invariant);
  options.invariant_chunk = int32("invariant_chunk", 1, options.invariant_chunk);
  reader.finish();
  return table;
}

// --- Device models
// ----------------------------------------------------------------------------------------------------------

namespace {

/// Calls visit(name, member) for every field of a device model or of its compute part.
template <typename Model, typename Visit>
void for_each_field(Model& model, const Visit& visit) {
  visit("num_workers", model.num_workers);
  visit("memory_ps_per_kib", model.memory_ps_per_kib);
  visit("worker_ps_per_kib", model.worker_ps_per_kib);
  visit("cache_ps_per_kib", model.cache_ps_per_kib);
  visit("cache_bytes", model.cache_bytes);
  visit("item_ps", model.item_ps);
  visit("item_row_ps", model.item_row_ps);
  visit("partial_ps_per_kib", model.partial_ps_per_kib);
  visit("many_start_ps", model.many_start_ps);
  visit("launch_ps", model.launch_ps);
  visit("max_tile_rows", model.max_tile_rows);
  visit("chunk_tokens", model.chunk_tokens);
  visit("part_tokens", model.part_tokens);
}

template <typename Compute, typename Visit>
void for_each_compute_field(Compute& compute, const Visit& visit) {
  visit("few_row_ps", compute.few_row_ps);
  visit("many_base_ps", compute.many_base_ps);
  visit("many_row_ps", compute.many_row_ps);
  visit("many_row_pad", compute.many_row_pad);
  visit("few_row_max", compute.few_row_max);
}

}  // namespace

DeviceModel parse_device_model(std::string_view text, std::string_view name) {
  const Place place{name, text, 1};
  const json value = parse_json(place);
  ObjectReader reader(value, place);
  DeviceModel model = DeviceModel::default_cpu();
  const auto read_into = [](ObjectReader& from) {
    return [&from](const char* key, auto& field) {
      using Field = std::remove_reference_t<decltype(field)>;
      const std::int64_t max = sizeof(Field) == 4 ? INT32_MAX : std::int64_t{1} << 50;
      // few_row_max = 0: no kernel for few rows.
      const std::int64_t min = sizeof(Field) == 4 && std::string_view(key) != "few_row_max" ? 1 : 0;
      field = static_cast<Field>(from.integer_or(key, min, max, field));
    };
  };
  for_each_field(model, read_into(reader));
  model.has_dot16 = reader.boolean_or("has_dot16", model.has_dot16);
  model.teams = reader.boolean_or("teams", model.teams);
  (void)reader.string_or("machine", "");
  for (const auto& [key, compute] :
       {std::pair<const char*, ComputeModel*>{"dot16", &model.dot16}, {"fma32", &model.fma32}}) {
    if (!reader.has(key)) continue;
    ObjectReader part(reader.object(key), place, std::string(key) + ".");
    for_each_compute_field(*compute, read_into(part));
    part.finish();
  }
  reader.finish();
  return model;
}

std::string device_model_to_json(const DeviceModel& model, std::string_view machine) {
  nlohmann::ordered_json out;
  out["machine"] = machine;
  out["has_dot16"] = model.has_dot16;
  out["teams"] = model.teams;
  for_each_field(model, [&](const char* key, const auto& field) { out[key] = field; });
  for_each_compute_field(model.dot16, [&](const char* key, const auto& field) { out["dot16"][key] = field; });
  for_each_compute_field(model.fma32, [&](const char* key, const auto& field) { out["fma32"][key] = field; });
  return out.dump(2) + "\n";
}

// --- Names
// --------------------------------------------------------------------------------------------------------------------

namespace {

template <typename Enum, std::size_t N>
Enum parse_name(const std::array<Enum, N>& values, std::string_view text, std::string_view what) {
  std::array<std::string_view, N> names;
  for (std::size_t i = 0; i < N; ++i) {
    names[i] = name_of(values[i]);
    if (names[i] == text) return values[i];
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: expected one of {}, got \"{}\"", what, joined(names), text));
}

}  // namespace

DType parse_dtype(std::string_view text, std::string_view what) {
  if (text == "fp32") text = "f32";
  if (text == "fp16") text = "f16";
  if (text == "fp8" || text == "f8") text = "f8e4m3";
  return parse_name(std::array{DType::f32, DType::f16, DType::bf16, DType::f8e4m3}, text, what);
}

Policy parse_policy(std::string_view text, std::string_view what) {
  return parse_name(std::array{Policy::automatic, Policy::flat, Policy::two_level, Policy::vllm, Policy::forest}, text,
                    what);
}

CascadeSwitch parse_cascade(std::string_view text, std::string_view what) {
  if (text == "auto") return CascadeSwitch::automatic;
  if (text == "on") return CascadeSwitch::on;
  if (text == "off") return CascadeSwitch::off;
  throw Error(ErrorCode::invalid_argument, fmt::format("{}: expected one of auto, on, off, got \"{}\"", what, text));
}

Isa parse_isa(std::string_view text, std::string_view what) {
  return parse_name(std::array{Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}, text, what);
}

}  // namespace headwater::cli
