// Readers of everything that the command takes as input: workload notation, tree files, traces, page tables, device
// models.
//
// All of them read from memory (`text`), so that they can be fuzzed; `name` only appears in messages. They are strict:
// an unknown key, a wrong type or an inconsistent number is refused with Error(io) "name:line: field: expected ..., got
// ...".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/forest.h"
#include "bench/workloads.h"
#include "headwater/batch.h"
#include "headwater/device_model.h"
#include "headwater/options.h"

namespace headwater::cli {

/// Whole file as a string; "-" is standard input. Error(io) names the file and the system's reason.
[[nodiscard]] std::string read_file(const std::string& path);

/// "1,64|8192,256": level i has N_i nodes of C_i tokens; child j hangs under node floor(j * N_{i-1} / N_i). The nodes
/// of the last level are requests with one query row. Refused: levels that shrink, more than 2^20 nodes or 2^40 tokens.
[[nodiscard]] bench::Forest parse_workload(std::string_view text);

/// Cells, one a line: name, query heads, KV heads, head size, number of nodes, then parent (an earlier node, -1: a
/// root) and tokens of each node. Leaves are requests. Empty lines and lines that start with # say nothing.
[[nodiscard]] std::vector<bench::Workload> parse_cells(std::string_view text, std::string_view name);

// --- Tree files: one JSON object a line
// --------------------------------------------------------------------------------

struct TreeNode {
  std::int64_t parent = -1;  ///< index into Tree::nodes (ids are resolved); -1: the root, which is the prompt
  std::int64_t num_tokens = 0;
  std::int64_t first_step = 0;  ///< decode steps in which the node is being generated
  std::int64_t last_step = 0;
};

struct Tree {
  std::vector<TreeNode> nodes;  ///< parents before children; node 0 is the root

  /// Last decode step of any node.
  [[nodiscard]] std::int64_t last_step() const noexcept;
  /// The live leaves at `step` with their ancestors: non-root nodes with first_step <= step <= last_step, of which
  /// step - first_step + 1 tokens exist; ancestors count in full. No requests where nothing is live.
  [[nodiscard]] bench::Forest at_step(std::int64_t step) const;
};

[[nodiscard]] std::vector<Tree> parse_trees(std::string_view text, std::string_view name);

// --- Traces
// ------------------------------------------------------------------------------------------------------------

struct TraceRequest {
  std::int64_t timestamp_ms = 0;
  std::int64_t input_length = 0;       ///< tokens, >= 1
  std::int64_t output_length = 0;      ///< tokens, >= 0
  std::vector<std::int64_t> hash_ids;  ///< one per block of the input; equal leading ids: that prefix in common
};

struct Trace {
  std::vector<TraceRequest> requests;  ///< ordered by time
  std::int64_t block_tokens = 512;     ///< tokens that one hash id stands for

  /// The requests alive at `seconds`: a request lives output_length / 30 s after a fixed prefill of 1 s, with arrivals
  /// `rate` times as fast; it has generated 30 tokens for each second since its prefill.
  [[nodiscard]] bench::Forest at_time(double seconds, double rate) const;
  /// Seconds (at that rate) from the first arrival to the last.
  [[nodiscard]] double duration(double rate) const noexcept;
};

/// JSON Lines: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens of input).
[[nodiscard]] Trace parse_trace_jsonl(std::string_view text, std::string_view name);
/// CSV: root prompt label, input tokens, output tokens; no times, so all arrive together. The requests of a label share
/// a root prompt whose length the file does not give: the shortest input of the label less one token is taken.
[[nodiscard]] Trace parse_trace_csv(std::string_view text, std::string_view name);
/// By the name's ending: .csv or JSON Lines.
[[nodiscard]] Trace parse_trace(std::string_view text, std::string_view name);

// --- Page tables
// ---------------------------------------------------------------------------------------------------------

/// A batch as a JSON object. Required: page_size, qo_indptr, kv_indptr, kv_indices, kv_last_page_len. Optional:
/// num_pages (default: largest id + 1), null_page, kv_start_page, first_page_offset; shape: num_qo_heads, num_kv_heads,
/// head_dim (or head_dim_qk and head_dim_vo), q_dtype, kv_dtype, out_dtype; options: policy, causal, window_left,
/// local_chunk, num_sink_tokens, logits_soft_cap, alibi, sinks, cascade, min_shared_pages, min_members,
/// batch_invariant, invariant_chunk. Consistency of the tables is the planner's to check.
struct PageTableFile {
  std::vector<std::int32_t> qo_indptr, kv_indptr, kv_indices, kv_last_page_len, kv_start_page, first_page_offset;
  int page_size = 16;
  std::int64_t num_pages = 0;
  std::int32_t null_page = -1;
  AttentionShape shape;
  PlanOptions options;

  [[nodiscard]] Batch batch() const;  ///< views into this object
};

/// Options that the file does not give are those of `base`; a `policy` without `cascade` resets the switch.
[[nodiscard]] PageTableFile parse_page_table(std::string_view text, std::string_view name,
                                             const PlanOptions& base = {});

// --- Device models
// -------------------------------------------------------------------------------------------------------

/// The fields of DeviceModel by name; absent ones keep their default. "machine" (a note) is allowed.
[[nodiscard]] DeviceModel parse_device_model(std::string_view text, std::string_view name);
[[nodiscard]] std::string device_model_to_json(const DeviceModel& model, std::string_view machine);

// --- Names
// ---------------------------------------------------------------------------------------------------------------

/// Each throws Error(invalid_argument) "`what`: expected one of ..., got ...".
[[nodiscard]] DType parse_dtype(std::string_view text, std::string_view what);
[[nodiscard]] Policy parse_policy(std::string_view text, std::string_view what);
[[nodiscard]] CascadeSwitch parse_cascade(std::string_view text, std::string_view what);
[[nodiscard]] Isa parse_isa(std::string_view text, std::string_view what);

}  // namespace headwater::cli
