// The command from outside: exit codes, help, where output goes, valid JSON and CSV, paths that are asserted.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "command_fixture.h"

namespace headwater::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTiny = " --heads 4/2 --head-dim 64 --threads 1 --steps 2 --reps 1 --warmup 1 --quiet ";

// --- Usage -----------------------------------------------------------------------------------------------------------

TEST_F(Command, Version) {
  const Result r = run("--version");
  EXPECT_EQ(r.code, 0);
  EXPECT_EQ(r.out, "headwater 0.1.0\n");
}

TEST_F(Command, FullDisksAndFoldersEndWithACode) {
  // The comment sign takes the fixture's own redirections away.
  EXPECT_EQ(run("explain --workload '1|16' >/dev/full 2>/dev/null #").code, 1);
  EXPECT_EQ(run("explain --workload '1|16' >/dev/null 2>/dev/null #").code, 0);
  EXPECT_EQ(run("explain /nonexistent >/dev/null 2>/dev/full #").code, 3);
  EXPECT_EQ(run("explain / >/dev/null 2>/dev/null #").code, 3);
}

TEST_F(Command, HelpOfEveryCommandHasExamplesAndExitCodes) {
  EXPECT_EQ(run("--help").code, 0);
  for (const std::string name : {"generate", "bench", "explain", "calibrate"}) {
    const Result r = run(name + " --help");
    EXPECT_EQ(r.code, 0) << name;
    EXPECT_NE(r.out.find("Examples:\n  headwater " + name), std::string::npos) << name;
    EXPECT_NE(r.out.find("Exit codes: 0 done"), std::string::npos) << name;
    EXPECT_EQ(r.err, "") << name;
  }
}

TEST_F(Command, WrongUsageIsTwoAndGoesToStandardError) {
  for (const std::string arguments :
       {"", "bogus", "bench --no-such-flag", "bench --shared 2048", "bench --steps 0", "bench --layout dhn", "explain",
        "explain --workload '1|2' --trees x", "generate --demo", "generate --cascade maybe x"}) {
    const Result r = run(arguments);
    EXPECT_EQ(r.code, 2) << arguments;
    EXPECT_EQ(r.out, "") << arguments;
    EXPECT_NE(r.err, "") << arguments;
  }
}

TEST_F(Command, WrongValuesAreNamed) {
  const auto err = [&](const std::string& flags) {
    const Result r = run("bench --workload '1|16' " + flags);
    EXPECT_EQ(r.code, 2) << flags << "\n" << r.err;
    return r.err.substr(0, r.err.find('\n'));
  };
  EXPECT_EQ(err("--heads 32"), "--heads: expected query heads/KV heads such as 32/8, got \"32\"");
  EXPECT_EQ(err("--heads 0/8"), "--heads: expected query heads/KV heads such as 32/8, got \"0/8\"");
  EXPECT_EQ(err("--head-dim 64:x"),
            "--head-dim: expected a head size such as 128, or QK:VO such as 192:128, got \"64:x\"");
  EXPECT_EQ(err("--policy flat,best"), "--policy: expected one of auto, flat, two_level, vllm, forest, got \"best\"");
  EXPECT_EQ(err("--dtype f8"), "--dtype: expected f32, f16 or bf16, got f8e4m3 (that is a type of KV: --kv-dtype)");
  EXPECT_EQ(err("--kv-dtype int8"), "--kv-dtype: expected one of f32, f16, bf16, f8e4m3, got \"int8\"");
  EXPECT_EQ(err("--isa sse"), "--isa: expected one of scalar, avx2, avx512, avx512_bf16, got \"sse\"");
  EXPECT_EQ(err("--trees x --policy flat"), "--policy: a replay compares with flat; name another policy");
}

TEST_F(Command, UnusableInputIsThree) {
  const auto err = [&](const std::string& arguments) {
    const Result r = run(arguments);
    EXPECT_EQ(r.code, 3) << arguments << "\n" << r.err;
    EXPECT_EQ(r.out, "") << arguments;
    return r.err;
  };
  EXPECT_EQ(err("explain --workload '1,2|x,3'"),
            "headwater: error: workload \"1,2|x,3\": tokens[0]: expected an integer in [1, 1073741824], got \"x\"\n");
  EXPECT_EQ(err("explain " + path("none.json")),
            "headwater: error: " + path("none.json") + ": cannot be read: No such file or directory\n");
  EXPECT_EQ(err("bench --workload nosuch"),
            "headwater: error: workload: expected a notation such as 1,64|8192,256 or one of fasttree, pat, chat, "
            "beam, losing, codec, flashinfer, unshared, random:SEED:COUNT, got \"nosuch\"\n");
  EXPECT_EQ(err("bench --suite none"),
            "headwater: error: suite: expected one of cells, hnd, nhd, fp32, isa, avx2, fp16, mla, cascade, policies, "
            "features, "
            "got \"none\"\n");
  const std::string bad = write(
      "bad.json",
      R"({"page_size": 4, "qo_indptr": [0, 1], "kv_indptr": [0, 2], "kv_indices": [1, 2], "kv_last_page_len": [5]})");
  EXPECT_NE(err("explain " + bad).find("headwater: error: " + bad + ": kv_last_page_len[0] = 5"), std::string::npos);
  EXPECT_NE(err("explain --workload '1|16' --head-dim 40").find("workload 1|16: "), std::string::npos);
  EXPECT_NE(err("generate --model " + bad + " hello").find(bad), std::string::npos);
  EXPECT_NE(err("generate hello").find("--model: not given"), std::string::npos);
}

// --- explain
// -----------------------------------------------------------------------------------------------------------

TEST_F(Command, ExplainPrintsTheByteModel) {
  const Result r = run("explain --workload '1,64|4096,128' --policy forest");
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("270,336"), std::string::npos) << "flat: N (P + S)\n" << r.out;
  EXPECT_NE(r.out.find("12,288"), std::string::npos) << "cascade: P + N S\n" << r.out;
  EXPECT_NE(
      r.out.find("logged as: cascade launch (batch 64, 64 of them sharing 256 pages / 4096 KV tokens read once; "),
      std::string::npos)
      << r.out;
}

TEST_F(Command, ExplainReadsEverySource) {
  const std::string table = write(
      "b.json",
      R"({"page_size": 4, "qo_indptr": [0, 1, 2], "kv_indptr": [0, 3, 6], "kv_indices": [1, 2, 3, 1, 2, 4], "kv_last_page_len": [1, 2]})");
  const std::string data = HEADWATER_TEST_DATA;
  for (const std::string& arguments :
       {table + " --policy forest", "--trees " + data + "/trees/tot_keyword.jsonl --tree 1 --step 40",
        "--trace " + data + "/traces/mooncake_conversation.jsonl --time 20",
        "--trace " + data + "/traces/toolagent_tail_sample.csv --time 1", std::string("--workload random:3")}) {
    const Result words = run("explain " + arguments);
    EXPECT_EQ(words.code, 0) << arguments << words.err;
    EXPECT_NE(words.out.find("path "), std::string::npos) << arguments;
    const Result json = run("explain --json " + arguments);
    ASSERT_EQ(json.code, 0) << arguments << json.err;
    EXPECT_TRUE(nlohmann::json::accept(json.out)) << arguments << json.out;
  }
  EXPECT_EQ(run("explain -", slurp(table)).code, 0);
}

/// The names in the first columns of the tables of a Markdown file, one set for each table.
std::vector<std::set<std::string>> documented_fields(const std::string& text) {
  std::vector<std::set<std::string>> tables;
  std::istringstream lines(text);
  bool inside = false;
  for (std::string line; std::getline(lines, line); inside = line.starts_with("|")) {
    if (!line.starts_with("|")) continue;
    if (!inside) tables.emplace_back();
    const std::string cell = line.substr(1, line.find('|', 1) - 1);
    for (std::size_t at = 0; (at = cell.find('`', at)) != std::string::npos;) {
      const std::size_t end = cell.find('`', at + 1);
      tables.back().insert(cell.substr(at + 1, end - at - 1));
      at = end + 1;
    }
  }
  return tables;
}

std::set<std::string> keys_of(const nlohmann::json& value) {
  std::set<std::string> keys;
  for (const auto& object : value.is_array() ? value : nlohmann::json::array({value})) {
    for (const auto& [key, ignored] : object.items()) keys.insert(key);
  }
  return keys;
}

TEST_F(Command, ExplainWritesTheDocumentedFields) {
  const auto tables = documented_fields(slurp(std::string(HEADWATER_TEST_DATA) + "/../../docs/plan_json.md"));
  ASSERT_EQ(tables.size(), 3U);
  const auto plan = nlohmann::json::parse(run("explain --json --workload '1,8|2048,64' --policy forest").out);
  EXPECT_EQ(keys_of(plan), tables[0]);
  EXPECT_EQ(keys_of(plan["forest"]), tables[1]);
  EXPECT_EQ(keys_of(plan["items"]), tables[2]);
  EXPECT_EQ(keys_of(plan["spans"]), (std::set<std::string>{"begin", "tokens", "pages", "members", "depth"}));
}

TEST_F(Command, ExplainNamesWhatIsMissing) {
  const std::string trees = std::string(HEADWATER_TEST_DATA) + "/trees/tot_keyword.jsonl";
  EXPECT_NE(run("explain --trees " + trees + " --tree 9").err.find("--tree: expected 0..2 (3 trees in "),
            std::string::npos);
  EXPECT_NE(run("explain --trees " + trees + " --step 999999").err.find("no leaf is live at step 999999"),
            std::string::npos);
}

// --- bench
// -------------------------------------------------------------------------------------------------------------

TEST_F(Command, BenchWritesJsonWithProofs) {
  const Result r =
      run(std::string("bench --workload '1,6|256,32' --policy flat,forest --no-overhead-gate --json") + kTiny);
  ASSERT_EQ(r.code, 0) << r.err;
  const auto cells = nlohmann::json::parse(r.out);
  ASSERT_EQ(cells.size(), 2U);
  const std::int64_t token_bytes = 2 * 2 * 64 * 2;  // K and V, heads, head size, bf16
  EXPECT_EQ(cells[0]["path"], "flat");
  EXPECT_EQ(cells[0]["policy"], "flat");
  EXPECT_EQ(cells[1]["policy"], "forest");
  EXPECT_EQ(cells[0]["kv_bytes_read"], 6 * 288 * token_bytes);
  EXPECT_EQ(cells[1]["path"], "cascade");
  EXPECT_EQ(cells[1]["kv_bytes_read"], (256 + 6 * 32) * token_bytes);
  for (const auto& cell : cells) {
    EXPECT_EQ(cell["workload"], "1,6|256,32");
    EXPECT_EQ(cell["batch"], 6);
    EXPECT_EQ(cell["dtype"], "bf16");
    EXPECT_EQ(cell["threads"], 1);
    EXPECT_EQ(cell["kv_bytes_unique"], (256 + 6 * 32) * token_bytes);
    EXPECT_EQ(cell["kv_bytes_flat"], 6 * 288 * token_bytes);
    EXPECT_EQ(cell["flops"], 4LL * 64 * 4 * 6 * 288);
    EXPECT_GT(cell["median_us"], 0);
    EXPECT_LE(cell["min_us"], cell["median_us"]);
    EXPECT_GT(cell["plan_us"], 0);
    EXPECT_GT(cell["limit_us"], 0);
    EXPECT_GT(cell["max_rel_error"], 0) << "compared with double precision";
    EXPECT_LT(cell["max_rel_error"], 2e-2);
  }
}

TEST_F(Command, BenchReadsCellsFromAFile) {
  const std::string cells = write("cells.txt",
                                  "# name q-heads kv-heads head nodes (parent tokens)...\n\ntree 4 2 64 3 -1 "
                                  "256 0 32 0 16\nalone 2 2 64 1 -1 64\n");
  const Result r =
      run("bench --cells " + cells + " --policy flat,forest --no-overhead-gate --steps 2 --reps 1 --threads 1 --json");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto json = nlohmann::json::parse(r.out);
  ASSERT_EQ(json.size(), 4U);
  EXPECT_EQ(json[1]["workload"], "tree");
  EXPECT_EQ(json[1]["path"], "cascade");
  EXPECT_EQ(json[1]["batch"], 2);
  EXPECT_EQ(json[1]["num_qo_heads"], 4);
  EXPECT_EQ(json[1]["kv_bytes_read"], (256 + 32 + 16) * 2 * 2 * 64 * 2);
  EXPECT_EQ(json[3]["workload"], "alone");
  EXPECT_EQ(json[3]["device"], "cpu");
  EXPECT_EQ(json[3].count("warm_us"), 0U) << "of CUDA devices only";
}

// Without a device, or in a build without CUDA: not supported here, and said before anything is measured.
TEST_F(Command, ADeviceThatIsNotThereIsFour) {
  for (const std::string arguments : {"bench --device cuda --workload '1|16'", "bench --device cuda --suite cascade",
                                      "calibrate --device cuda --dry-run", "bench --device cuda --suite fp32"}) {
    const Result r = run(arguments);
    if (r.code == 0) GTEST_SKIP() << "there is a device";
    EXPECT_EQ(r.code, 4) << arguments << "\n" << r.err;
    EXPECT_EQ(r.out.find("median"), std::string::npos) << arguments;
    EXPECT_TRUE(r.err.starts_with("headwater: error: ")) << r.err;
  }
  EXPECT_EQ(run("bench --device cuda --threads 2").code, 2);
  EXPECT_EQ(run("bench --device tpu").code, 2);
}

TEST_F(Command, AFailedWriteLeavesTheOldFile) {
  const std::string bench =
      "bench --workload '1|16' --no-overhead-gate --json '" + write("r.json", "old") + "'" + kTiny;
  ASSERT_TRUE(fs::create_directory(path("r.json.part")));  // cannot be opened
  EXPECT_EQ(run(bench).code, 3);
  EXPECT_EQ(slurp(path("r.json")), "old");
  fs::remove(path("r.json.part"));
  fs::create_symlink("/dev/full", path("r.json.part"));  // cannot be written to its end
  const Result full = run(bench);
  EXPECT_EQ(full.code, 3);
  EXPECT_NE(full.err.find(path("r.json") + ": cannot be written"), std::string::npos) << full.err;
  EXPECT_EQ(slurp(path("r.json")), "old");
  fs::remove(path("r.json.part"));
  EXPECT_EQ(run(bench).code, 0);
  EXPECT_TRUE(nlohmann::json::accept(slurp(path("r.json"))));
  EXPECT_FALSE(fs::exists(path("r.json.part")));
}

TEST_F(Command, BenchInvariantModeHasEqualBits) {
  const Result r = run(
      std::string("bench --workload '1,6|512,32' --policy flat,forest --invariant --no-overhead-gate --json") + kTiny);
  ASSERT_EQ(r.code, 0) << r.err;
  const auto cells = nlohmann::json::parse(r.out);
  EXPECT_EQ(cells[1]["path"], "cascade");
  EXPECT_EQ(cells[1]["bits_equal_first"], true);
}

TEST_F(Command, BenchSweepTablePlotAndCsv) {
  const Result r =
      run(std::string("bench --shared 64,128 --batches 2,3 --tail 16 --no-overhead-gate --layout nhd --plot ") +
          path("p.svg") + " --csv " + path("c.csv") + kTiny);
  ASSERT_EQ(r.code, 0) << r.err;
  for (const char* name : {"1,2|64,16", "1,3|64,16", "1,2|128,16", "1,3|128,16"})
    EXPECT_NE(r.out.find(name), std::string::npos) << r.out;
  const std::string svg = slurp(path("p.svg"));
  EXPECT_TRUE(svg.starts_with("<svg ")) << svg.substr(0, 40);
  EXPECT_NE(svg.find("prefers-color-scheme: dark"), std::string::npos);
  const std::string csv = slurp(path("c.csv"));
  EXPECT_TRUE(csv.starts_with("workload,policy,path,batch,")) << csv.substr(0, 80);
  EXPECT_EQ(std::ranges::count(csv, '\n'), 1 + 4 * 2);
}

TEST_F(Command, BenchTypesAndShapes) {
  for (const std::string flags : {"--dtype f32", "--dtype f16", "--dtype bf16 --kv-dtype f8e4m3",
                                  "--dtype f32 --kv-dtype f16", "--mla --heads 4/1", "--isa scalar", "--page-size 5"}) {
    const std::string heads = flags.starts_with("--mla") ? " --threads 1 --steps 1 --reps 1 --warmup 0 --quiet" : kTiny;
    const Result r =
        run("bench --workload '1,3|40,9' --policy flat,forest --no-overhead-gate --json " + flags + " " + heads);
    ASSERT_EQ(r.code, 0) << flags << r.err;
    EXPECT_EQ(nlohmann::json::parse(r.out)[1]["path"], "cascade") << flags;
  }
}

TEST_F(Command, BenchReplays) {
  const std::string data = HEADWATER_TEST_DATA;
  const Result trees =
      run("bench --trees " + data + "/trees/tot_keyword.jsonl --max-trees 1 --tree-steps 2 --json" + kTiny);
  ASSERT_TRUE(trees.code == 0 || trees.code == 1) << trees.err;  // 1: a gate on time, which a loaded machine may miss
  const auto cells = nlohmann::json::parse(trees.out);
  ASSERT_EQ(cells.size(), 2U * 2 + 1);
  EXPECT_EQ(cells.back()["gate"], "replay_never_slower");
  EXPECT_EQ(cells.back()["policy"], "auto");
  EXPECT_LE(cells.back()["kv_bytes_read"], cells.back()["kv_bytes_flat"]);
  const Result trace = run("bench --trace " + data +
                           "/traces/toolagent_tail_sample.csv --rates 1 --snapshots 1 --json --heads 1/1 --head-dim 32 "
                           "--threads 1 --steps 1 --reps 1 --warmup 0 --quiet");
  ASSERT_TRUE(trace.code == 0 || trace.code == 1) << trace.err;
  EXPECT_TRUE(nlohmann::json::accept(trace.out));
}

TEST_F(Command, BenchReplaysTheGivenPolicies) {
  const std::string replay = "bench --trees " + std::string(HEADWATER_TEST_DATA) +
                             "/trees/tot_keyword.jsonl --max-trees 1 --tree-steps 1 --json " + path("r.json") + kTiny;
  const auto policies_of = [&](const std::string& list) {
    const Result r = run(replay + "--policy " + list);
    EXPECT_TRUE(r.code == 0 || r.code == 1) << r.err;
    std::string cells;
    std::string gates;
    for (const auto& object : nlohmann::json::parse(slurp(path("r.json"))))
      (object.contains("gate") ? gates : cells) += object["policy"].get<std::string>() + " ";
    const std::size_t at = r.out.find("tot_keyword: flat is ");
    const std::string note = at == std::string::npos ? "" : r.out.substr(at, r.out.find('\n', at) - at);
    return cells + "| " + gates + "| " + note;
  };
  EXPECT_EQ(policies_of("flat,two_level,forest"), "flat two_level forest | two_level forest | ");
  EXPECT_EQ(policies_of("forest"), "flat forest | forest | tot_keyword: flat is added as the base");
  EXPECT_EQ(policies_of("forest,flat"), "flat forest | forest | tot_keyword: flat is put first as the base");
}

TEST_F(Command, BenchHoldsCellsAndReplaysToBounds) {
  const std::string bench = std::string("bench --workload '1,4|256,64' --no-overhead-gate --cell-seconds 0.1 --json ") +
                            path("b.json") + kTiny;
  const auto gates_of = [&](const std::string& arguments, int code) {
    const Result r = run(arguments);
    auto gates = nlohmann::json::array();
    for (const auto& object : nlohmann::json::parse(slurp(path("b.json"))))
      if (object.contains("bound")) gates.push_back(object);
    // Where samples at less than full speed had to be kept, a loaded machine leaves a bound unjudged.
    const bool judged = std::ranges::none_of(gates, [](const auto& g) { return g["verdict"] == "not judged"; });
    if (!judged) return gates;
    EXPECT_EQ(r.code, code) << r.out;
    for (const auto& gate : gates) {
      EXPECT_EQ(gate["passed"], code == 0) << gate;
      EXPECT_NE(r.out.find(code == 0 ? "ok " : "MISSED "), std::string::npos) << r.out;
    }
    return gates;
  };
  ASSERT_EQ(gates_of(bench + "--max-limit-ratio 100000 --max-cell-ratio 100000", 0).size(), 2U);
  const auto missed = gates_of(bench + "--max-cell-ratio 0.0001", 1);
  ASSERT_EQ(missed.size(), 1U);
  EXPECT_EQ(missed[0]["gate"], "limit_cell");
  EXPECT_EQ(missed[0]["bound"], 0.0001);
  EXPECT_EQ(gates_of(bench, 0).size(), 0U);
  const Result replay = run("bench --trees " + std::string(HEADWATER_TEST_DATA) +
                            "/trees/tot_keyword.jsonl --max-trees 1 --tree-steps 1 --max-limit-ratio 0.0001" + kTiny);
  EXPECT_NE(replay.out.find("tot_keyword, auto: geometric mean "), std::string::npos) << replay.out;
}

TEST_F(Command, BenchOverheadGateComparesPlans) {
  const Result r = run(std::string("bench --workload '1,4|256,64' --json") + kTiny);
  ASSERT_TRUE(r.code == 0 || r.code == 1) << r.err;
  const auto cells = nlohmann::json::parse(r.out);
  EXPECT_EQ(cells.back()["gate"], "no_sharing_overhead");
  EXPECT_EQ(cells.back()["same_plan"], true) << "nothing is shared, so the plan is flat's byte for byte";
  EXPECT_GE(cells.back()["pairs"], 30);
}

// --- generate
// ----------------------------------------------------------------------------------------------------------

TEST_F(Command, GenerateIsTheSameFlatAndCascade) {
  const std::string common = "generate --model " + tiny_model() + " --shared-file " +
                             write("doc.txt", std::string(600, 'a') + " end.") + " --questions " +
                             write("q.txt", "one?\ntwo?\nthree?\n") +
                             " --max-tokens 6 --ignore-eos --batch-invariant --threads 1 --quiet --json ";
  const Result flat = run(common + "--cascade off");
  const Result cascade = run(common + "--cascade on");
  ASSERT_EQ(flat.code, 0) << flat.err;
  ASSERT_EQ(cascade.code, 0) << cascade.err;
  const auto answers = nlohmann::json::parse(flat.out);
  ASSERT_EQ(answers.size(), 3U);
  EXPECT_EQ(answers[0]["tokens"].size(), 6U);
  EXPECT_EQ(answers, nlohmann::json::parse(cascade.out));
}

TEST_F(Command, GenerateSourcesOfPrompts) {
  const std::string model = "generate --threads 1 --max-tokens 3 --model " + tiny_model();
  EXPECT_EQ(run(model + " -q hello").code, 0);
  EXPECT_EQ(run(model + " -q", "from standard input\n").code, 0);
  EXPECT_EQ(run(model + " -q", "").code, 3);
  const Result file = run(model + " --json -q --parallel 2 --temperature 1 -f " + write("p.txt", "a\n\nb\n"));
  ASSERT_EQ(file.code, 0) << file.err;
  EXPECT_EQ(nlohmann::json::parse(file.out).size(), 4U);
  const Result table = run(model + " hello");
  EXPECT_NE(table.err.find("generated tokens"), std::string::npos) << "the table goes to standard error";
  EXPECT_EQ(table.out.find("generated tokens"), std::string::npos);
  EXPECT_EQ(run(model + " -q " + write("p", "") + " " + std::string(5000, 'x')).code, 1)
      << "a prompt longer than the context";
}

TEST_F(Command, DemoProvesItsPath) {
  const Result r = run("generate --demo --model " + tiny_model() + " --shared-file " +
                       write("doc.txt", std::string(800, 'b') + " end.") + " --questions " +
                       write("q.txt", "one?\ntwo?\nthree?\nfour?\n") +
                       " --max-tokens 8 --ignore-eos --threads 1 --quiet --policy forest");
  EXPECT_EQ(r.code, 0) << r.out << r.err;
  EXPECT_NE(r.out.find("ok     cascade: path = cascade in "), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("ok     batch-invariant mode: flat and cascade gave the same tokens for 4 of 4 questions"),
            std::string::npos)
      << r.out;
  EXPECT_NE(r.out.find("KV bytes read in a step"), std::string::npos) << r.out;
}

TEST_F(Command, DemoFailsWhenNothingIsShared) {  // negative control: the proof is able to fail
  const Result r =
      run("generate --demo --model " + tiny_model() + " --shared-file " + write("doc.txt", "x") + " --questions " +
          write("q.txt", "one?\ntwo?\n") + " --max-tokens 4 --ignore-eos --threads 1 --quiet --raw");
  EXPECT_EQ(r.code, 1) << r.out;
  EXPECT_NE(r.out.find("FAILED cascade: path = cascade in 0 of "), std::string::npos) << r.out;
}

TEST_F(Command, GenerateFlagsHaveTheirEffect) {
  const std::string model = "generate -q --threads 1 --max-tokens 12 --ignore-eos --json --model " + tiny_model() + " ";
  const auto answer = [&](const std::string& flags) {
    const Result r = run(model + flags + " hello");
    EXPECT_EQ(r.code, 0) << flags << r.err;
    return nlohmann::json::parse(r.out).at(0);
  };
  const auto tokens = [&](const std::string& flags) { return answer(flags)["tokens"]; };
  const auto plain = tokens("");
  EXPECT_EQ(plain.size(), 12U);
  EXPECT_EQ(tokens("--top-k 1 --temperature 1 --seed 5"), plain) << "the most likely token alone";
  EXPECT_EQ(tokens("--top-p 0.000001 --temperature 1 --seed 5"), plain);
  const auto sampled = tokens("--temperature 3 --seed 5");
  EXPECT_NE(sampled, plain);
  EXPECT_EQ(tokens("--temperature 3 --seed 5"), sampled);
  EXPECT_NE(tokens("--temperature 3 --seed 6"), sampled);
  EXPECT_NE(tokens("--system 'Be brief.'"), plain);
  EXPECT_NE(tokens("--raw"), plain) << "no chat format";
  EXPECT_EQ(tokens("--chat-template chatml"), plain) << "the file's own";
  EXPECT_EQ(run(model + "--chat-template nosuch hello").code, 3);
  EXPECT_EQ(tokens("--no-prefix-cache"), plain);

  // A text that occurs in the answer ends it there.
  const std::string text = answer("--raw")["text"];
  const auto letter = std::ranges::find_if(text, [](unsigned char c) { return std::isalnum(c) != 0; });
  ASSERT_NE(letter, text.end()) << text;
  const std::string stop(1, *letter);
  const auto stopped = answer("--raw --stop '" + stop + "'");
  EXPECT_EQ(stopped["finish"], "stop") << text << " stop " << stop;
  EXPECT_EQ(stopped["text"], text.substr(0, text.find(stop)));
}

TEST_F(Command, GenerateStreamsASingleAnswer) {
  const std::string model = "generate --threads 1 --max-tokens 8 --ignore-eos --model " + tiny_model();
  const std::string text = nlohmann::json::parse(run(model + " -q --json hello").out).at(0)["text"];
  EXPECT_EQ(run(model + " -q hello").out, text + "\n");
  const Result explained = run(model + " --explain hello");
  EXPECT_EQ(explained.out, text + "\n");
  EXPECT_NE(explained.err.find("KV read per layer"), std::string::npos) << explained.err;
  EXPECT_EQ(run(model + " hello").err.find("KV read per layer"), std::string::npos);
}

TEST_F(Command, GenerateRefusesSettingsBeforeTheModel) {
  for (const std::string flags : {"--top-p 0", "--stop ''", "--temperature nan", "--policy best", "--kv-dtype f8e4m3",
                                  "--min-members 0", "--isa sse"}) {
    const Result r = run("generate --model /nonexistent.gguf " + flags + " hello");
    EXPECT_EQ(r.code, 2) << flags << r.err;
    EXPECT_EQ(r.err.find("/nonexistent.gguf"), std::string::npos) << flags << r.err;
  }
}

TEST_F(Command, UnsupportedModelIsFour) {
  auto text = slurp(tiny_model());
  const std::size_t at = text.find("llama");
  ASSERT_NE(at, std::string::npos);
  const Result r = run("generate --model " + write("other.gguf", text.replace(at, 5, "gpt-2")) + " hello");
  EXPECT_EQ(r.code, 4) << r.err;
  EXPECT_NE(r.err.find("general.architecture = "), std::string::npos) << r.err;
  EXPECT_EQ(r.out, "");
}

// --- environment -----------------------------------------------------------------------------------------------------

TEST_F(Command, ExplainReadsTheEnvironmentAndFlagsWin) {
  const auto path_of = [&](const std::string& flags, const std::string& variables) {
    const Result r = run("explain --json " + flags, "", variables);
    EXPECT_EQ(r.code, 0) << r.err;
    return nlohmann::json::parse(r.out).at("path");
  };
  const std::string batch = "--workload '1,8|2048,64'";  // 128 shared pages
  EXPECT_EQ(path_of(batch, ""), "cascade");
  EXPECT_EQ(path_of(batch, "HEADWATER_CASCADE_ATTENTION=off"), "flat");
  EXPECT_EQ(path_of(batch + " --cascade auto", "HEADWATER_CASCADE_ATTENTION=off"), "cascade");
  EXPECT_EQ(path_of(batch + " --policy forest", "HEADWATER_CASCADE_ATTENTION=off"), "cascade");
  EXPECT_EQ(path_of(batch, "HEADWATER_CASCADE_MIN_SHARED_PAGES=129"), "flat");
  EXPECT_EQ(path_of(batch, "HEADWATER_CASCADE_MIN_SHARED_PAGES=128"), "cascade");
  EXPECT_EQ(path_of(batch + " --min-shared-pages 128", "HEADWATER_CASCADE_MIN_SHARED_PAGES=129"), "cascade");
  EXPECT_EQ(path_of(batch, "HEADWATER_CASCADE_MIN_MEMBERS=9"), "flat");
  EXPECT_EQ(path_of(batch + " --min-members 8", "HEADWATER_CASCADE_MIN_MEMBERS=9"), "cascade");

  // A page table's own options beat variables, flags beat both.
  const auto table = [&](const std::string& options) {
    return write(
        "t.json",
        R"({"page_size": 4, "qo_indptr": [0, 1, 2], "kv_indptr": [0, 3, 6], "kv_indices": [1, 2, 3, 1, 2, 4], "kv_last_page_len": [1, 2])" +
            options + "}");
  };
  EXPECT_EQ(path_of(table(R"(, "cascade": "on")"), ""), "cascade");
  EXPECT_EQ(path_of(table(R"(, "cascade": "on")"), "HEADWATER_CASCADE_ATTENTION=off"), "cascade");
  EXPECT_EQ(path_of(table(R"(, "cascade": "on")") + " --cascade off", ""), "flat");
  EXPECT_EQ(path_of(table(R"(, "policy": "forest", "min_members": 3)"), ""), "flat");
  EXPECT_EQ(path_of(table(R"(, "policy": "forest")"), "HEADWATER_CASCADE_ATTENTION=off"), "cascade");
  EXPECT_EQ(path_of(table(""), "HEADWATER_CASCADE_ATTENTION=on"), "cascade");
}

TEST_F(Command, BenchReadsTheEnvironment) {
  const std::string bench = std::string("bench --workload '1,6|256,32' --no-overhead-gate --json") + kTiny;
  const auto path_of = [&](const std::string& flags, const std::string& variables) {
    const Result r = run(bench + flags, "", variables);
    EXPECT_EQ(r.code, 0) << r.err;
    return nlohmann::json::parse(r.out).at(1).at("path");
  };
  EXPECT_EQ(path_of("--policy flat,forest", "HEADWATER_CASCADE_MIN_MEMBERS=7"), "flat");
  EXPECT_EQ(path_of("--policy flat,forest --min-members 6", "HEADWATER_CASCADE_MIN_MEMBERS=7"), "cascade");
  EXPECT_EQ(path_of("--policy flat,forest", "HEADWATER_CASCADE_ATTENTION=off"), "cascade") << "named policies";
  EXPECT_EQ(path_of("", "HEADWATER_CASCADE_ATTENTION=off"), "flat");
  EXPECT_EQ(path_of("", "HEADWATER_CASCADE_ATTENTION=on"), "cascade");
}

TEST_F(Command, GenerateReadsTheEnvironmentAndFlagsWin) {
  const std::string generate = "generate --threads 1 --max-tokens 3 --ignore-eos --parallel 4 --model " + tiny_model() +
                               " '" + std::string(200, 'a') + "' ";
  const auto launch = [&](const std::string& flags, const std::string& variables) {
    const Result r = run(generate + flags, "", variables);
    EXPECT_EQ(r.code, 0) << r.err;
    const std::size_t at = r.err.find("info: ");
    return at == std::string::npos ? r.err : r.err.substr(at + 6, r.err.find(' ', at + 6) - at - 6);
  };
  EXPECT_EQ(launch("", "HEADWATER_CASCADE_ATTENTION=off"), "flat");
  EXPECT_EQ(launch("", "HEADWATER_CASCADE_ATTENTION=on"), "cascade");
  EXPECT_EQ(launch("--cascade off", "HEADWATER_CASCADE_ATTENTION=on"), "flat");
  EXPECT_EQ(launch("", "HEADWATER_CASCADE_ATTENTION=on HEADWATER_CASCADE_MIN_MEMBERS=5"), "flat");
  EXPECT_EQ(launch("--min-members 4", "HEADWATER_CASCADE_ATTENTION=on HEADWATER_CASCADE_MIN_MEMBERS=5"), "cascade");
  EXPECT_EQ(launch("--min-shared-pages 1000", "HEADWATER_CASCADE_ATTENTION=on"), "flat");
}

// libgomp tells what it was loaded with, once for every start of the program.
TEST_F(Command, GenerateStartsAgainOnceToSpinBriefly) {
  const auto spin_counts = [&](const std::string& command, const std::string& variables) {
    const std::string err =
        run(command, "",
            "OMP_DISPLAY_ENV=verbose env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY " + variables + " timeout 10")
            .err;
    std::string counts;
    const std::string name = "GOMP_SPINCOUNT = '";
    for (std::size_t at = 0; (at = err.find(name, at)) != std::string::npos;) {
      at += name.size();
      counts += err.substr(at, err.find('\'', at) - at) + " ";
    }
    return counts;
  };
  const std::string own = spin_counts("explain --workload '1|16'", "");
  if (own.empty()) GTEST_SKIP() << "this build has no libgomp";
  const std::string generate = "generate --model /nonexistent hello";
  EXPECT_EQ(spin_counts(generate, ""), own + "1000 ");
  EXPECT_EQ(spin_counts(generate, "GOMP_SPINCOUNT=77"), "77 ");
  EXPECT_EQ(spin_counts(generate, "OMP_WAIT_POLICY=passive").find("1000 "), std::string::npos);
}

// --- calibrate
// ---------------------------------------------------------------------------------------------------------

TEST_F(Command, CalibrateWritesAModelThatOthersRead) {
  const Result r = run("calibrate --threads 1");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto model = nlohmann::json::parse(r.out);
  EXPECT_GT(model["memory_ps_per_kib"], 1000);
  EXPECT_GT(model["dot16"]["many_row_ps"], 1);
  EXPECT_TRUE(fs::exists(path("cache") + "/device_model.json"));
  const Result explained = run("explain --workload '1,8|2048,64'");
  EXPECT_NE(explained.out.find("cost model: " + path("cache") + "/device_model.json"), std::string::npos)
      << explained.out;
  EXPECT_NE(run("explain --workload '1|16' --device-model default").out.find("cost model: shipped defaults"),
            std::string::npos);
}

}  // namespace
}  // namespace headwater::test
