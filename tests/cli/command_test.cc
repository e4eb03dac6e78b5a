// The command from outside: exit codes, help, where output goes, valid JSON and CSV, paths that are asserted.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "support/tiny_gguf.h"

namespace {

namespace fs = std::filesystem;

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

/// A folder of its own for every test.
class Command : public ::testing::Test {
 protected:
  Command() {
    std::string name = (fs::temp_directory_path() / "headwater-cli-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Command() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }

  /// Runs the command with `arguments` (a shell's words); an empty cache folder, so that no earlier calibration
  /// matters.
  Result run(const std::string& arguments, const std::string& input = "") const {
    const std::string line = "HEADWATER_CACHE='" + path("cache") + "' '" HEADWATER_CLI "' " + arguments + " <'" +
                             write("stdin", input) + "' >'" + path("stdout") + "' 2>'" + path("stderr") + "'";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(path("stdout")),
            slurp(path("stderr"))};
  }

  [[nodiscard]] std::string tiny_model() const {
    headwater::test::TinyModel model;
    const auto bytes = headwater::test::tiny_gguf(model);
    return write("tiny.gguf", std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }

  fs::path folder_;
};

constexpr const char* kTiny = " --heads 4/2 --head-dim 64 --threads 1 --steps 2 --reps 1 --warmup 1 --quiet ";

// --- Usage -----------------------------------------------------------------------------------------------------------

TEST_F(Command, Version) {
  const Result r = run("--version");
  EXPECT_EQ(r.code, 0);
  EXPECT_EQ(r.out, "headwater 0.1.0\n");
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
  EXPECT_EQ(err("bench --heads 32 --workload '1|16'"),
            "headwater: error: --heads: expected query heads/KV heads such as 32/8, got \"32\"\n");
  EXPECT_EQ(err("bench --policy best --workload '1|16'"),
            "headwater: error: --policy: expected one of auto, flat, two_level, vllm, forest, got \"best\"\n");
  EXPECT_EQ(err("bench --suite none"),
            "headwater: error: suite: expected one of cells, hnd, nhd, fp32, isa, avx2, fp16, mla, cascade, policies, "
            "got \"none\"\n");
  const std::string bad = write(
      "bad.json",
      R"({"page_size": 4, "qo_indptr": [0, 1], "kv_indptr": [0, 2], "kv_indices": [1, 2], "kv_last_page_len": [5]})");
  EXPECT_NE(err("explain " + bad).find("kv_last_page_len[0] = 5"), std::string::npos);
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
  EXPECT_LE(cells.back()["kv_bytes_read"], cells.back()["kv_bytes_flat"]);
  const Result trace = run("bench --trace " + data +
                           "/traces/toolagent_tail_sample.csv --rates 1 --snapshots 1 --json --heads 1/1 --head-dim 32 "
                           "--threads 1 --steps 1 --reps 1 --warmup 0 --quiet");
  ASSERT_TRUE(trace.code == 0 || trace.code == 1) << trace.err;
  EXPECT_TRUE(nlohmann::json::accept(trace.out));
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

TEST_F(Command, InterruptStopsCleanly) {
  const std::string model = tiny_model();
  const std::string out = path("stdout");
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int file = open(out.c_str(), O_CREAT | O_WRONLY, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    execl(HEADWATER_CLI, HEADWATER_CLI, "generate", "--model", model.c_str(), "--max-tokens", "900", "--parallel", "64",
          "--ignore-eos", "--threads", "1", "hello", nullptr);
    _exit(99);
  }
  // Interrupt once the run is under way: the launch has been announced.
  for (int i = 0; i < 600 && slurp(out).find("launch (batch") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  kill(child, SIGINT);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by a signal";
  EXPECT_EQ(WEXITSTATUS(status), 130) << slurp(out);
  EXPECT_NE(slurp(out).find("headwater: interrupted"), std::string::npos);
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
