// From records to numbers, tables, JSON and pictures; ratios of pairs; requests of a trace.
#include "serving/summary.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "serving/measure.h"
#include "serving/plot.h"
#include "serving/report.h"

namespace headwater::serving {
namespace {

Record record(double start, std::vector<double> arrivals, double end, std::int64_t tokens) {
  Record r;
  r.start = start;
  r.arrivals = std::move(arrivals);
  r.end = end;
  r.completion_tokens = tokens;
  return r;
}

TEST(Percentile, SmallestValueThatEnoughDoNotExceed) {
  EXPECT_EQ(percentile({}, 0.95), 0);
  EXPECT_EQ(percentile({7}, 0.95), 7);
  EXPECT_EQ(percentile({4, 3, 2, 1}, 0.5), 2);
  std::vector<double> hundred;
  for (int i = 1; i <= 100; ++i) hundred.push_back(i);
  EXPECT_EQ(percentile(hundred, 0.95), 95);
  EXPECT_EQ(percentile({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}, 0.95), 19);
}

TEST(Summary, RatesLeaveFailuresAndPauseBetweenRoundsOut) {
  Record failed = record(0, {1}, 9, 1);
  failed.error = "broken";
  // Round one: 0 .. 10 s, round two: 100 .. 104 s.
  const LevelResult level =
      summarize({{record(0, {1, 2, 3}, 3, 3), record(1, {3, 5}, 10, 5), failed}, {record(100, {101}, 104, 1)}});
  EXPECT_EQ(level.rounds, 2);
  EXPECT_EQ(level.ok, 3);
  EXPECT_EQ(level.fail, 1);
  EXPECT_EQ(level.errors, (std::map<std::string, std::int64_t>{{"broken", 1}}));
  EXPECT_DOUBLE_EQ(level.wall_s, 14);
  EXPECT_DOUBLE_EQ(level.ttft_mean_s, (1.0 + 2 + 1) / 3);
  EXPECT_DOUBLE_EQ(level.ttft_p95_s, 2);
  EXPECT_DOUBLE_EQ(level.decode_tps, (2.0 / 2 + 4.0 / 2) / 2);  // a stream of one token has no rate
  EXPECT_DOUBLE_EQ(level.aggregate_tps, 9.0 / 14);
  EXPECT_DOUBLE_EQ(level.gap_p50_s, 1);
  EXPECT_DOUBLE_EQ(level.gap_p95_s, 2);
  EXPECT_EQ(level.prompt_tokens, std::nullopt);
}

TEST(Summary, NothingAtAll) {
  const LevelResult level = summarize({{}});
  EXPECT_EQ(level.ok, 0);
  EXPECT_EQ(level.aggregate_tps, 0);
  EXPECT_EQ(to_json(level).at("launches"), nullptr);
}

TEST(Summary, MostAtOnce) {
  EXPECT_EQ(most_at_once({record(0, {}, 2, 0), record(2, {}, 3, 0)}), 1);
  EXPECT_EQ(most_at_once({record(0, {}, 5, 0), record(1, {}, 3, 0), record(2, {}, 4, 0), record(4, {}, 6, 0)}), 3);
}

LevelResult with_launches(std::map<std::string, double> launches, const std::string& arm = "") {
  LevelResult level = summarize({{record(0, {1, 2}, 2, 2)}});
  level.concurrency = 4;
  level.arm = arm;
  level.counters = Counters{};
  level.counters->launches = std::move(launches);
  return level;
}

std::string all_remarks(const LevelResult& level) {
  std::string out;
  for (const std::string& line : remarks(level)) out += line + "\n";
  return out;
}

TEST(Report, SaysWhichPathRan) {
  EXPECT_EQ(all_remarks(with_launches({{"flat", 90}, {"cascade", 0}})),
            "concurrency 4: DID NOT RUN CASCADE (launches: cascade 0, flat 90)\n");
  EXPECT_EQ(all_remarks(with_launches({{"flat", 30}, {"cascade", 90}})),
            "concurrency 4: launches: cascade 90, flat 30\n");
  EXPECT_NE(all_remarks(with_launches({{"flat", 30}, {"cascade", 90}}, "off")).find("UNEXPECTED"), std::string::npos);
  EXPECT_NE(all_remarks(with_launches({})).find("not known"), std::string::npos);
  EXPECT_NE(all_remarks(with_launches({{"flat", 0}})).find("no decode launch"), std::string::npos);
  EXPECT_NE(table_row(with_launches({{"flat", 30}, {"cascade", 90}}), false, true).find("75 %"), std::string::npos);
  LevelResult level = with_launches({{"cascade", 10}});
  level.counters->totals = {
      {"cascade_spans", 10},     {"cascade_shared_tokens", 20480}, {"cascade_member_sequences", 40},
      {"kv_bytes_read", 1e9},    {"kv_bytes_saved", 3e9},          {"steps", 100},
      {"step_seconds", 1.8},     {"product_seconds", 0.9},         {"attention_seconds", 0.72},
      {"append_seconds", 0.018}, {"plan_seconds", 0.036}};
  EXPECT_EQ(
      all_remarks(level),
      "concurrency 4: launches: cascade 10; mean shared span 2048 tokens, read once for 4.0 sequences\n"
      "concurrency 4: KV read 1.00 GB, flat would read 4.00x as much\n"
      "concurrency 4: 100 steps of 18.0 ms: products 50.0 %, attention 40.0 %, appends 1.0 %, the rest 9.0 % (planning "
      "2.0 %)\n"
      "concurrency 4: between steps 10.0 % of the time\n");
  level.counters->totals["forward_seconds"] = 1.71;
  EXPECT_NE(
      all_remarks(level).find("appends 1.0 %, the model's small operations 4.0 %, no model 5.0 % (planning 2.0 %)"),
      std::string::npos)
      << all_remarks(level);
}

TEST(Report, ExplainsAPair) {
  LevelResult on = with_launches({{"cascade", 90}}, "on");
  LevelResult off = with_launches({{"flat", 90}}, "off");
  EXPECT_EQ(explain_line(on, off), "");
  EXPECT_EQ(all_remarks(off), "concurrency 4, cascade off: as asked, no cascade (launches: flat 90)\n");
  on.counters->totals = {{"kv_bytes_read", 1e9}, {"attention_seconds", 3}, {"step_seconds", 9}};
  off.counters->totals = {{"kv_bytes_read", 4e9}, {"attention_seconds", 4}, {"step_seconds", 10}};
  EXPECT_EQ(explain_line(on, off),
            "  KV bytes on/off 0.250; attention time on/off 0.750, and it is 40 % of the steps with cascade off");
  off.counters.reset();
  EXPECT_EQ(explain_line(on, off), "");
}

TEST(Report, HeadAndRowsAlign) {
  for (const bool arms : {false, true}) {
    for (const bool metrics : {false, true}) {
      const std::string head = table_head(arms, metrics);
      const std::string row = table_row(with_launches({{"flat", 1}}, arms ? "on" : ""), arms, metrics);
      EXPECT_EQ(head.size(), row.size()) << head << row;
    }
  }
}

TEST(Report, Json) {
  const nlohmann::json level = to_json(with_launches({{"flat", 30}, {"cascade", 90}}, "on"));
  for (const char* key : {"concurrency", "ok", "fail", "ttft_mean_s", "ttft_p95_s", "decode_tps", "aggregate_tps"})
    EXPECT_TRUE(level.at(key).is_number()) << key;
  EXPECT_EQ(level.at("launches").at("cascade"), 90);
  EXPECT_EQ(level.at("cascade"), "on");
}

/// A pair whose rounds have these aggregate rates.
LevelMeasurement pair_of(const std::vector<std::pair<double, double>>& rates) {
  LevelMeasurement level;
  level.arms.resize(2);
  level.arms[0].concurrency = 8;
  for (const auto& [on, off] : rates) {
    level.rounds.emplace_back(2);
    for (std::size_t arm = 0; arm < 2; ++arm) {
      LevelResult& r = level.rounds.back()[arm];
      r.ok = 8;
      r.aggregate_tps = arm == 0 ? on : off;
      r.decode_tps = r.aggregate_tps / 8;
      r.ttft_mean_s = 1;
    }
  }
  return level;
}

TEST(Pair, RatioLeavesFailedRoundsOut) {
  LevelMeasurement level = pair_of({{110, 100}, {120, 100}, {130, 100}, {999, 1}});
  level.rounds[3][1].fail = 1;
  const PairRatio ratio = ratio_of(level);
  EXPECT_EQ(ratio.rounds, 3U);
  EXPECT_EQ(ratio.concurrency, 8);
  EXPECT_DOUBLE_EQ(ratio.aggregate.middle, 1.2);
  EXPECT_DOUBLE_EQ(ratio.aggregate.low, 1.1);
  EXPECT_DOUBLE_EQ(ratio.aggregate.high, 1.3);
  EXPECT_DOUBLE_EQ(ratio.ttft.middle, 1);
  EXPECT_EQ(
      ratio_line(ratio),
      "concurrency 8: on/off over 3 rounds: aggregate tok/s 1.200 [1.100, 1.300], decode tok/s 1.200 [1.100, 1.300], "
      "TTFT 1.000 [1.000, 1.000]");
  level.rounds[0][0].fail = level.rounds[1][0].fail = level.rounds[2][0].fail = 1;
  EXPECT_NE(ratio_line(ratio_of(level)).find("no round without failures"), std::string::npos);
}

TEST(Pair, GateNeedsThirtyRoundsAndDoubt) {
  EXPECT_EQ(judge(ratio_of(pair_of(std::vector<std::pair<double, double>>(29, {50, 100}))), 0.99),
            bench::Verdict::not_judged);
  EXPECT_EQ(judge(ratio_of(pair_of(std::vector<std::pair<double, double>>(30, {50, 100}))), 0.99),
            bench::Verdict::missed);
  EXPECT_EQ(judge(ratio_of(pair_of(std::vector<std::pair<double, double>>(30, {100, 100}))), 0.99),
            bench::Verdict::passed);
  // A median below the bound whose interval reaches it is no miss.
  std::vector<std::pair<double, double>> noisy;
  for (int i = 0; i < 30; ++i) noisy.emplace_back(i % 2 == 0 ? 97 : 100.5, 100);
  EXPECT_EQ(judge(ratio_of(pair_of(noisy)), 0.99), bench::Verdict::passed);
}

TEST(Plot, DrawsEveryLevelOfEveryArm) {
  std::vector<LevelResult> levels;
  for (const char* arm : {"on", "off"}) {
    for (const int concurrency : {16, 1, 4}) {
      LevelResult level = with_launches({{"flat", 1}}, arm);
      level.concurrency = concurrency;
      levels.push_back(level);
    }
  }
  levels.push_back({});  // no ok request
  const std::string svg = plot_svg(levels, "a <b> & \"c\"", "sub");
  const auto count = [&](const std::string& what) {
    std::size_t n = 0;
    for (std::size_t at = svg.find(what); at != std::string::npos; at = svg.find(what, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("<circle"), 2U * 2U * 6U);
  EXPECT_EQ(count("aria-label=\"a &lt;b&gt; &amp; &quot;c&quot;\""), 1U);
  EXPECT_EQ(count(">concurrency</text>"), 2U);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(plot_svg({}, "t", "s").find("<circle"), std::string::npos);
}

}  // namespace
}  // namespace headwater::serving
