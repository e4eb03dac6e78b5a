// Readers of command inputs: what is accepted means what it says, and every message names file, line, field, expected,
// got.
#include "cli/formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "headwater/error.h"

namespace headwater::cli {
namespace {

/// The message of the Error that `task` throws; fails when it throws none or one of another code.
template <typename Task>
std::string message_of(ErrorCode code, const Task& task) {
  try {
    task();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

std::string file_text(const std::string& name) {
  return read_file(std::string(HEADWATER_TEST_DATA) + "/" + name);
}

// --- Workload notation
// ------------------------------------------------------------------------------------------------

TEST(Workload, ParentsFollowTheNotation) {
  const bench::Forest forest = parse_workload("1,2,6|8,16,4");
  ASSERT_EQ(forest.nodes.size(), 9U);
  ASSERT_EQ(forest.requests.size(), 6U);
  const std::vector<std::int32_t> parents = {-1, 0, 0, 1, 1, 1, 2, 2, 2};
  for (std::size_t i = 0; i < parents.size(); ++i) EXPECT_EQ(forest.nodes[i].parent, parents[i]) << i;
  const bench::ForestTokens tokens = bench::count_tokens(forest);
  EXPECT_EQ(tokens.unique, 8 + 2 * 16 + 6 * 4);
  EXPECT_EQ(tokens.flat, 6 * 28);
  EXPECT_EQ(tokens.longest, 28);
}

TEST(Workload, ChildrenOfUnevenLevels) {
  const bench::Forest forest = parse_workload("2,3|1,1");  // floor(j * 2 / 3) = 0, 0, 1
  EXPECT_EQ(forest.nodes[2].parent, 0);
  EXPECT_EQ(forest.nodes[3].parent, 0);
  EXPECT_EQ(forest.nodes[4].parent, 1);
}

TEST(Workload, Messages) {
  const auto message = [](const char* text) {
    return message_of(ErrorCode::invalid_argument, [&] { (void)parse_workload(text); });
  };
  EXPECT_EQ(message("1,64"),
            "workload \"1,64\": expected \"nodes per level|tokens per node per level\", such as 1,64|8192,256");
  EXPECT_EQ(message("1|2|3"),
            "workload \"1|2|3\": expected \"nodes per level|tokens per node per level\", such as 1,64|8192,256");
  EXPECT_EQ(message("1,x|2,3"), "workload \"1,x|2,3\": nodes[1]: expected an integer in [1, 1048576], got \"x\"");
  EXPECT_EQ(message("1,2|2,0"), "workload \"1,2|2,0\": tokens[1]: expected an integer in [1, 1073741824], got \"0\"");
  EXPECT_EQ(message("1,2|"), "workload \"1,2|\": tokens[0]: expected an integer in [1, 1073741824], got \"\"");
  EXPECT_EQ(message("1,2|8"), "workload \"1,2|8\": expected as many token counts as node counts (2), got 1");
  EXPECT_EQ(message("4,2|8,8"), "workload \"4,2|8,8\": nodes[1]: expected at least nodes[0] = 4, got 2");
  EXPECT_EQ(message("1048576,1048576|1,1"),
            "workload \"1048576,1048576|1,1\": expected at most 1048576 nodes, got 2097152");
  EXPECT_EQ(message("1,1|1073741824,1"),
            "workload \"1,1|1073741824,1\": expected at most 1073741824 tokens on a path, got 1073741825");
}

TEST(Cells, ForestsWithShapes) {
  const auto cells = parse_cells("# comment\n\na_tree 32 8 128 4 -1 100 0 20 0 30 1 5\r\n  b 2 1 64 2 -1 7 -1 9", "f");
  ASSERT_EQ(cells.size(), 2U);
  EXPECT_EQ(cells[0].name, "a_tree");
  EXPECT_EQ(cells[0].num_qo_heads, 32);
  EXPECT_EQ(cells[0].num_kv_heads, 8);
  EXPECT_EQ(cells[0].head_dim, 128);
  ASSERT_EQ(cells[0].forest.nodes.size(), 4U);
  EXPECT_EQ(cells[0].forest.nodes[3].parent, 1);
  EXPECT_EQ(cells[0].forest.nodes[3].num_tokens, 5);
  ASSERT_EQ(cells[0].forest.requests.size(), 2U) << "the leaves";
  EXPECT_EQ(cells[0].forest.requests[0].node, 2);
  EXPECT_EQ(cells[0].forest.requests[1].node, 3);
  EXPECT_EQ(cells[1].forest.requests.size(), 2U);
}

TEST(Cells, Refusals) {
  const auto refused = [](const std::string& text) {
    try {
      (void)parse_cells(text, "f");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused("# nothing\n"), "f: expected at least one cell, got none");
  EXPECT_EQ(refused("a 4"), "f:1: KV heads: expected an integer in [1, 4], got \"\"");
  EXPECT_EQ(refused("\na 4 8 64 1 -1 5"), "f:2: KV heads: expected an integer in [1, 4], got \"8\"");
  EXPECT_EQ(refused("a 4 2 64 0"), "f:1: nodes: expected an integer in [1, 1048576], got \"0\"");
  EXPECT_EQ(refused("a 4 2 64 2 -1 5 1 5"), "f:1: node 1, parent: expected an integer in [-1, 0], got \"1\"");
  EXPECT_EQ(refused("a 4 2 64 2 -1 1073741800 0 100"),
            "f:1: node 1, tokens: expected an integer in [0, 24], got \"100\"");
  EXPECT_EQ(refused("a 4 2 64 1 -1 5 0 7"), "f:1: expected the end of the line after 1 nodes, got \"0\"");
  EXPECT_EQ(refused("a 4 2 64 2 -1 0 0 0"), "f:1: node 1: a request without tokens");
  EXPECT_EQ(refused("a 4 2 64 1 -1 5x"), "f:1: node 0, tokens: expected an integer in [0, 1073741824], got \"5x\"");
}

// --- Trees
// ---------------------------------------------------------------------------------------------------------------

constexpr const char* kTree = R"({"nodes":[{"id":0,"parent":-1,"num_tokens":100,"first_step":-99,"last_step":0},)"
                              R"({"id":7,"parent":0,"num_tokens":20,"first_step":1,"last_step":20},)"
                              R"({"id":8,"parent":0,"num_tokens":30,"first_step":1,"last_step":30},)"
                              R"({"id":9,"parent":7,"num_tokens":10,"first_step":21,"last_step":30}]})";

TEST(Trees, LiveLeavesAtAStep) {
  const std::vector<Tree> trees = parse_trees(kTree, "t.jsonl");
  ASSERT_EQ(trees.size(), 1U);
  EXPECT_EQ(trees[0].last_step(), 30);
  const bench::Forest early = trees[0].at_step(5);  // 7 and 8, five tokens each, under the root
  EXPECT_EQ(early.requests.size(), 2U);
  EXPECT_EQ(bench::count_tokens(early).unique, 100 + 5 + 5);
  EXPECT_EQ(bench::count_tokens(early).flat, 105 + 105);
  const bench::Forest late = trees[0].at_step(25);  // 8 with 25 tokens; 9 with five, under 7 in full
  EXPECT_EQ(late.requests.size(), 2U);
  EXPECT_EQ(bench::count_tokens(late).unique, 100 + 25 + 20 + 5);
  EXPECT_TRUE(trees[0].at_step(31).requests.empty());
  EXPECT_TRUE(trees[0].at_step(0).requests.empty()) << "the root is the prompt, not a leaf";
}

TEST(Trees, NodesWithoutTokensAreNeverLive) {
  const std::vector<Tree> trees =
      parse_trees(R"({"nodes":[{"id":0,"parent":-1,"num_tokens":4,"first_step":-3,"last_step":0},)"
                  R"({"id":1,"parent":0,"num_tokens":0,"first_step":1,"last_step":0}]})",
                  "t.jsonl");
  for (int step = -1; step <= 2; ++step) EXPECT_TRUE(trees[0].at_step(step).requests.empty()) << step;
}

TEST(Trees, SampleFilesAreReadable) {
  for (const char* name : {"tot_docmerge", "tot_keyword", "tot_set128", "tot_sorting128"}) {
    const std::string file = std::string("trees/") + name + ".jsonl";
    const std::vector<Tree> trees = parse_trees(file_text(file), file);
    EXPECT_EQ(trees.size(), 3U) << name;
    EXPECT_GT(trees[0].at_step(1).requests.size(), 1U) << name;
  }
}

TEST(Trees, Messages) {
  const auto message = [](const std::string& text) {
    return message_of(ErrorCode::io, [&] { (void)parse_trees(text, "t.jsonl"); });
  };
  const auto tree = [](const std::string& nodes) { return "{\"nodes\":[" + nodes + "]}"; };
  const std::string root = R"({"id":0,"parent":-1,"num_tokens":4,"first_step":-3,"last_step":0})";
  EXPECT_EQ(message(""), "t.jsonl:1: expected a tree, got an empty file");
  EXPECT_EQ(message("\n\n[1]\n"), "t.jsonl:3: expected an object, got [1]");
  EXPECT_NE(message("{\"nodes\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}")
                .find("expected at most 64 levels of nesting"),
            std::string::npos);
  EXPECT_EQ(message("{\"nodes\":[}"), "t.jsonl:1: column 11: expected JSON, got \"}\"");
  EXPECT_EQ(message("{\"nodes\":["), "t.jsonl:1: column 11: expected JSON, got the end of the input");
  EXPECT_EQ(message("{}"), "t.jsonl:1: nodes: expected an array, but the key is missing");
  EXPECT_EQ(message("{\"nodes\":3}"), "t.jsonl:1: nodes: expected an array, got 3");
  EXPECT_EQ(message(tree("")), "t.jsonl:1: nodes: expected at least one node, got none");
  EXPECT_EQ(message("{\"nodes\":[],\"extra\":1}"), "t.jsonl:1: extra: unknown key");
  EXPECT_EQ(message("{\"nodes\":[],\"nodes\":[]}"), "t.jsonl:1: nodes: the key occurs twice in one object");
  EXPECT_EQ(message(tree("5")), "t.jsonl:1: nodes[0]: expected an object, got 5");
  EXPECT_EQ(message(tree(R"({"id":-1,"parent":-1,"num_tokens":4,"first_step":0,"last_step":0})")),
            "t.jsonl:1: nodes[0].id: expected an integer in [0, 2147483647], got -1");
  EXPECT_EQ(message(tree(R"({"id":0,"parent":-1,"num_tokens":4.5,"first_step":0,"last_step":0})")),
            "t.jsonl:1: nodes[0].num_tokens: expected an integer in [0, 2147483648], got 4.5");
  EXPECT_EQ(message(tree(R"({"id":0,"parent":-1,"num_tokens":4,"first_step":0})")),
            "t.jsonl:1: nodes[0].last_step: expected an integer, but the key is missing");
  EXPECT_EQ(message(tree(R"({"id":0,"parent":3,"num_tokens":4,"first_step":0,"last_step":0})")),
            "t.jsonl:1: nodes[0].parent: expected -1 (the first node is the root), got 3");
  EXPECT_EQ(message(tree(root + R"(,{"id":1,"parent":-1,"num_tokens":4,"first_step":0,"last_step":0})")),
            "t.jsonl:1: nodes[1].parent: expected the id of an earlier node, got -1 (there is one root)");
  EXPECT_EQ(
      message(root.substr(0, 0) + tree(root + R"(,{"id":1,"parent":2,"num_tokens":4,"first_step":0,"last_step":0})")),
      "t.jsonl:1: nodes[1].parent: expected the id of an earlier node, got 2");
  EXPECT_EQ(message(tree(root + R"(,{"id":0,"parent":0,"num_tokens":4,"first_step":0,"last_step":0})")),
            "t.jsonl:1: nodes[1].id: expected an id not used before, got 0");
  EXPECT_EQ(message(tree(root + R"(,{"id":1,"parent":0,"num_tokens":4,"first_step":10,"last_step":8})")),
            "t.jsonl:1: nodes[1].first_step: expected at most last_step + 1 = 9, got 10");
  EXPECT_EQ(message(std::string(kTree) + "\n{\"nodes\":null}\n"), "t.jsonl:2: nodes: expected an array, got null");
}

// --- Traces
// ----------------------------------------------------------------------------------------------------------------

TEST(Traces, RequestsAliveAtATime) {
  const Trace trace =
      parse_trace(R"({"timestamp": 1000, "input_length": 1000, "output_length": 60, "hash_ids": [1, 2]})"
                  "\n"
                  R"({"timestamp": 1500, "input_length": 1100, "output_length": 300, "hash_ids": [1, 3, 4]})",
                  "trace.jsonl");
  ASSERT_EQ(trace.requests.size(), 2U);
  EXPECT_DOUBLE_EQ(trace.duration(1), 0.5);
  EXPECT_TRUE(trace.at_time(0.5, 1).requests.empty()) << "one second of prefill";
  const bench::Forest both = trace.at_time(2.0, 1);  // 30 tokens of the first, 15 of the second
  ASSERT_EQ(both.requests.size(), 2U);
  EXPECT_EQ(bench::count_tokens(both).flat, 1030 + 1115);
  EXPECT_EQ(bench::count_tokens(both).unique, 1030 + 1115 - 512);
  EXPECT_EQ(trace.at_time(3.1, 1).requests.size(), 1U) << "60 tokens last two seconds";
  EXPECT_EQ(trace.at_time(1.1, 16).requests.size(), 2U) << "arrivals 16 times as fast";
}

TEST(Traces, BlocksOfDifferentLengthAreNotShared) {
  const Trace trace = parse_trace(R"({"timestamp": 0, "input_length": 600, "output_length": 60, "hash_ids": [1, 2]})"
                                  "\n"
                                  R"({"timestamp": 0, "input_length": 700, "output_length": 60, "hash_ids": [1, 2]})",
                                  "trace.jsonl");
  const bench::ForestTokens tokens = bench::count_tokens(trace.at_time(1.0, 1));
  EXPECT_EQ(tokens.unique, 512 + 88 + 188);
}

TEST(Traces, CsvSharesRootPrompts) {
  const Trace trace = parse_trace("A,1000,10\nB,500,20\nA,1200,30\n", "trace.csv");
  ASSERT_EQ(trace.requests.size(), 3U);
  const bench::ForestTokens tokens = bench::count_tokens(trace.at_time(1.0, 1));
  EXPECT_EQ(tokens.flat, 1000 + 500 + 1200);
  EXPECT_EQ(tokens.unique, 1000 + 500 + 1200 - 999 / 64 * 64);
}

TEST(Traces, SampleFilesAreReadable) {
  EXPECT_EQ(parse_trace(file_text("traces/mooncake_conversation.jsonl"), "m.jsonl").requests.size(), 300U);
  EXPECT_EQ(parse_trace(file_text("traces/toolagent_tail_sample.csv"), "t.csv").requests.size(), 92U);
}

TEST(Traces, Messages) {
  const auto jsonl = [](const std::string& text) {
    return message_of(ErrorCode::io, [&] { (void)parse_trace(text, "a.jsonl"); });
  };
  EXPECT_EQ(jsonl("\n"), "a.jsonl:1: expected a request, got an empty file");
  EXPECT_EQ(jsonl(R"({"timestamp": "0", "input_length": 5, "output_length": 6, "hash_ids": [1]})"),
            "a.jsonl:1: timestamp: expected an integer in [0, 1125899906842624], got \"0\"");
  EXPECT_EQ(jsonl(R"({"timestamp": 0, "input_length": 0, "output_length": 6, "hash_ids": []})"),
            "a.jsonl:1: input_length: expected an integer in [1, 2147483648], got 0");
  EXPECT_EQ(jsonl(R"({"timestamp": 0, "input_length": 5, "output_length": -6, "hash_ids": [1]})"),
            "a.jsonl:1: output_length: expected an integer in [0, 2147483648], got -6");
  EXPECT_EQ(jsonl(R"({"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [1.5]})"),
            "a.jsonl:1: hash_ids[0]: expected an integer in [0, 9223372036854775807], got 1.5");
  EXPECT_EQ(jsonl(R"({"timestamp": 0, "input_length": 513, "output_length": 6, "hash_ids": [1]})"),
            "a.jsonl:1: hash_ids: expected 2 ids (one per 512 tokens of input_length = 513), got 1");
  EXPECT_EQ(jsonl("{\"timestamp\": 5, \"input_length\": 1, \"output_length\": 6, \"hash_ids\": [1]}\n{\"timestamp\": "
                  "4, \"input_length\": 1, \"output_length\": 6, \"hash_ids\": [1]}"),
            "a.jsonl:2: timestamp: expected at least that of the line before (5), got 4");
  const auto csv = [](const std::string& text) {
    return message_of(ErrorCode::io, [&] { (void)parse_trace(text, "a.csv"); });
  };
  EXPECT_EQ(csv(""), "a.csv:1: expected a request, got an empty file");
  EXPECT_EQ(csv("A,1\n"), "a.csv:1: expected 3 fields (label,input_tokens,output_tokens), got 2");
  EXPECT_EQ(csv("A,1,1\n,1,1\n"), "a.csv:2: label: expected a label, got \"\"");
  EXPECT_EQ(csv("A,0,1\n"), "a.csv:1: input_tokens: expected an integer in [1, 16777216], got \"0\"");
  EXPECT_EQ(csv("A,1,1x\n"), "a.csv:1: output_tokens: expected an integer in [0, 16777216], got \"1x\"");
}

// --- Page tables
// -------------------------------------------------------------------------------------------------------------

TEST(PageTables, OptionsOfThePlan) {
  const auto options_of = [](const std::string& fields, const PlanOptions& base = {}) {
    return parse_page_table(
               R"({"page_size": 4, "qo_indptr": [0, 1], "kv_indptr": [0, 1], "kv_indices": [5], "kv_last_page_len": [4])" +
                   fields + "}",
               "b.json", base)
        .options;
  };
  EXPECT_FALSE(options_of("").alibi || options_of("").sinks);
  EXPECT_EQ(options_of("").cascade, CascadeSwitch::automatic);
  const PlanOptions given = options_of(R"(, "cascade": "off", "alibi": true, "sinks": true)");
  EXPECT_TRUE(given.alibi && given.sinks);
  EXPECT_EQ(given.cascade, CascadeSwitch::off);
  EXPECT_EQ(message_of(ErrorCode::io, [&] { (void)options_of(R"(, "cascade": "maybe")"); }),
            "b.json:1: cascade: expected one of auto, on, off, got \"maybe\"");

  // What the file does not say is the base's; a policy without a switch resets the switch.
  PlanOptions base;
  base.cascade = CascadeSwitch::on;
  base.min_members = 7;
  EXPECT_EQ(options_of("", base).cascade, CascadeSwitch::on);
  EXPECT_EQ(options_of("", base).min_members, 7);
  EXPECT_EQ(options_of(R"(, "min_members": 3)", base).min_members, 3);
  EXPECT_EQ(options_of(R"(, "policy": "flat")", base).cascade, CascadeSwitch::automatic);
}

TEST(PageTables, FieldsAndDefaults) {
  const PageTableFile table = parse_page_table(
      R"({"page_size": 4, "qo_indptr": [0, 1, 2], "kv_indptr": [0, 2, 4], "kv_indices": [5, 6, 5, 9], "kv_last_page_len": [4, 1],)"
      R"("num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "q_dtype": "f32", "kv_dtype": "f16", "policy": "forest", "window_left": 7})",
      "b.json");
  const Batch batch = table.batch();
  EXPECT_EQ(batch.kv.page_size, 4);
  EXPECT_EQ(batch.kv.num_pages, 10) << "the largest id and one";
  EXPECT_EQ(batch.kv.indices[3], 9);
  EXPECT_EQ(table.shape.head_dim_vo, 64);
  EXPECT_EQ(table.shape.kv_dtype, DType::f16);
  EXPECT_EQ(table.shape.out_dtype, DType::f32) << "as q";
  EXPECT_EQ(table.options.policy, Policy::forest);
  EXPECT_EQ(table.options.window_left, 7);
  EXPECT_TRUE(table.options.causal);
}

TEST(PageTables, Messages) {
  const auto with = [](const std::string& rest) {
    return message_of(ErrorCode::io, [&] {
      (void)parse_page_table(
          "{\"page_size\": 4,\n\"qo_indptr\": [0, 1],\n\"kv_indptr\": [0, 1],\n\"kv_last_page_len\": [1],\n" + rest +
              "}",
          "b.json");
    });
  };
  EXPECT_EQ(with("\"kv_indices\": [1, \"x\"]"),
            "b.json:5: kv_indices[1]: expected an integer in [-2147483648, 2147483647], got \"x\"");
  EXPECT_EQ(with("\"kv_indices\": {}"), "b.json:5: kv_indices: expected an array, got {}");
  EXPECT_EQ(with("\"null_page\": 1"), "b.json:1: kv_indices: expected an array, but the key is missing");
  EXPECT_EQ(with("\"kv_indices\": [1], \"policy\": \"best\""),
            "b.json:1: policy: expected one of auto, flat, two_level, vllm, forest, got \"best\"");
  EXPECT_EQ(with("\"kv_indices\": [1], \"kv_dtype\": \"int8\""),
            "b.json:1: kv_dtype: expected one of f32, f16, bf16, f8e4m3, got \"int8\"");
  EXPECT_EQ(with("\"kv_indices\": [1],\n\"causal\": 1"), "b.json:6: causal: expected true or false, got 1");
  EXPECT_EQ(with("\"kv_indices\": [1], \"logits_soft_cap\": -1"),
            "b.json:5: logits_soft_cap: expected a number in [0, 1e+30], got -1");
  EXPECT_EQ(with("\"kv_indices\": [1], \"q_dtype\": 3"), "b.json:5: q_dtype: expected a string, got 3");
  EXPECT_EQ(with("\"kv_indices\": [1],\n\n\"pages\": 3"), "b.json:7: pages: unknown key");
  EXPECT_EQ(with("\"kv_indices\": [1], \"page_size\": 3"), "b.json:1: page_size: the key occurs twice in one object");
  EXPECT_EQ(message_of(ErrorCode::io, [] { (void)parse_page_table("{\"page_size\": 0}", "b.json"); }),
            "b.json:1: page_size: expected an integer in [1, 1048576], got 0");
  EXPECT_EQ(
      message_of(ErrorCode::io, [] { (void)parse_page_table("{\"page_size\": 18446744073709551615}", "b.json"); }),
      "b.json:1: page_size: expected an integer in [1, 1048576], got 18446744073709551615");
}

// --- Device models
// -----------------------------------------------------------------------------------------------------------

TEST(DeviceModels, RoundTrip) {
  DeviceModel model = DeviceModel::default_cpu();
  model.memory_ps_per_kib = 12'345;
  model.has_dot16 = !model.has_dot16;
  model.fma32.many_row_ps = 777;
  const DeviceModel read = parse_device_model(device_model_to_json(model, "a machine"), "d.json");
  EXPECT_EQ(read.memory_ps_per_kib, 12'345);
  EXPECT_EQ(read.has_dot16, model.has_dot16);
  EXPECT_EQ(read.fma32.many_row_ps, 777);
  EXPECT_EQ(read.dot16.few_row_ps, model.dot16.few_row_ps);
  EXPECT_EQ(read.chunk_tokens, model.chunk_tokens);
  EXPECT_EQ(parse_device_model("{}", "d.json").launch_ps, DeviceModel::default_cpu().launch_ps);
}

TEST(DeviceModels, Messages) {
  const auto message = [](const std::string& text) {
    return message_of(ErrorCode::io, [&] { (void)parse_device_model(text, "d.json"); });
  };
  EXPECT_EQ(message("{\"item_ps\": -1}"), "d.json:1: item_ps: expected an integer in [0, 1125899906842624], got -1");
  EXPECT_EQ(message("{\"num_workers\": 0}"), "d.json:1: num_workers: expected an integer in [1, 2147483647], got 0");
  EXPECT_EQ(message("{\"dot16\": {\"few_row\": 1}}"), "d.json:1: dot16.few_row: unknown key");
  EXPECT_EQ(message("{\"dot16\": 4}"), "d.json:1: dot16: expected an object, got 4");
  EXPECT_EQ(message("{\"has_dot16\": 1}"), "d.json:1: has_dot16: expected true or false, got 1");
  EXPECT_EQ(message("{\"speed\": 4}"), "d.json:1: speed: unknown key");
}

// --- Names and files
// -----------------------------------------------------------------------------------------------------------

TEST(Names, Messages) {
  const auto message = [](const auto& task) { return message_of(ErrorCode::invalid_argument, task); };
  EXPECT_EQ(message([] { (void)parse_dtype("int4", "--dtype"); }),
            "--dtype: expected one of f32, f16, bf16, f8e4m3, got \"int4\"");
  EXPECT_EQ(message([] { (void)parse_policy("x", "--policy"); }),
            "--policy: expected one of auto, flat, two_level, vllm, forest, got \"x\"");
  EXPECT_EQ(message([] { (void)parse_isa("neon", "--isa"); }),
            "--isa: expected one of scalar, avx2, avx512, avx512_bf16, got \"neon\"");
  EXPECT_EQ(parse_dtype("fp16", "--dtype"), DType::f16);
}

TEST(Files, MissingFile) {
  EXPECT_EQ(message_of(ErrorCode::io, [] { (void)read_file("/nonexistent/x.json"); }),
            "/nonexistent/x.json: cannot be read: No such file or directory");
}

}  // namespace
}  // namespace headwater::cli
