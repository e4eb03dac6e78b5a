// The engine end to end on the tiny model: text does not depend on caching, batching, cascade, chunking or preemption.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "engine/detokenizer.h"
#include "fixture.h"
#include "headwater/error.h"
#include "plain_model.h"

namespace headwater::test {
namespace {

using namespace headwater::engine;

std::vector<Completion> run(const EngineOptions& options, const std::vector<Request>& requests,
                            const RunHooks& hooks = {}) {
  Engine engine(shared_tiny_model(), options);
  std::vector<Completion> completions = run_to_completion(engine, requests, hooks);
  engine.audit();
  return completions;
}

TEST(Engine, GreedyTextAgreesWithPlainDoubleImplementation) {
  const auto model = shared_tiny_model();
  const PlainModel plain(model->gguf());
  const std::vector<Request> requests = questions(3, 30, 7, 6, *model);
  const std::vector<Completion> completions = run(tiny_options(), requests);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(completions[i].tokens, plain.generate(requests[i].prompt, 6)) << "request " << i;
    EXPECT_EQ(completions[i].finish, FinishReason::length);
    EXPECT_EQ(completions[i].error, "");
  }
}

TEST(Engine, SameTokensWithAndWithoutPrefixCacheAndCascade) {
  const auto model = shared_tiny_model();
  const std::vector<Request> requests = questions(6, 150, 9, 12, *model);
  EngineOptions options = tiny_options();
  options.kv_dtype = DType::bf16;
  options.plan.batch_invariant = true;
  options.plan.invariant_chunk = 32;
  std::vector<std::vector<std::vector<std::int32_t>>> results;
  for (const bool cache : {true, false}) {
    for (const bool cascade : {true, false}) {
      options.prefix_cache = cache;
      options.plan.cascade = cascade ? CascadeSwitch::on : CascadeSwitch::off;
      int cascade_steps = 0;
      RunHooks hooks;
      hooks.on_step = [&](const Engine& engine) {
        const StepStats& step = engine.last_step();
        cascade_steps += step.path == Path::cascade ? 1 : 0;
        EXPECT_EQ(step.path, step.plan.path);
        EXPECT_EQ(step.kv_bytes_read, step.plan.kv_bytes_read * model->config().num_layers);
        EXPECT_LE(step.kv_bytes_unique, step.kv_bytes_read);
        if (!cascade) {
          EXPECT_EQ(step.kv_bytes_read, step.kv_bytes_flat);
        }
      };
      results.push_back(tokens_of(run(options, requests, hooks)));
      if (cache && cascade) {
        EXPECT_GT(cascade_steps, 5) << "the cascade arm must take the cascade path";
      } else {
        EXPECT_EQ(cascade_steps, 0);
      }
    }
  }
  for (std::size_t arm = 1; arm < results.size(); ++arm) EXPECT_EQ(results[arm], results[0]) << "arm " << arm;
}

TEST(Engine, SameTokensWhateverTheBatchChunkAndPool) {
  const auto model = shared_tiny_model();
  const std::vector<Request> requests = questions(5, 40, 9, 12, *model);
  EngineOptions options = tiny_options();
  options.plan.batch_invariant = true;
  options.plan.invariant_chunk = 16;
  const auto expected = tokens_of(run(options, requests));
  std::vector<std::vector<std::int32_t>> alone;
  for (const Request& request : requests) alone.push_back(run(options, {request})[0].tokens);
  EXPECT_EQ(alone, expected);
  options.max_step_tokens = 3;
  options.max_batch = 2;
  EXPECT_EQ(tokens_of(run(options, requests)), expected);
  options.max_step_tokens = 1000;
  options.max_batch = 100;
  options.page_size = 16;
  EXPECT_EQ(tokens_of(run(options, requests)), expected);
}

TEST(Engine, PreemptionByRecomputeChangesNothing) {
  const auto model = shared_tiny_model();
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 4; ++i) requests.push_back(request_of(random_tokens(50 + i, 20, *model), 30));
  EngineOptions options = tiny_options();
  options.plan.batch_invariant = true;
  const auto expected = tokens_of(run(options, requests));
  for (const bool cache : {true, false}) {
    options.prefix_cache = cache;
    options.num_pages = 30;  // the four need 13 each
    Engine engine(model, options);
    const auto completions = run_to_completion(engine, requests);
    EXPECT_EQ(tokens_of(completions), expected);
    EXPECT_GT(engine.stats().preemptions, 0);
    engine.audit();
  }
}

TEST(Engine, OutOfPagesEndsThatRequestAndTheOthersGoOn) {
  const auto model = shared_tiny_model();
  EngineOptions options = tiny_options();
  options.num_pages = 12;  // 48 tokens
  const std::vector<Request> requests{
      request_of(random_tokens(1, 20, *model), 10),
      request_of(random_tokens(2, 40, *model), 30),  // fits at first, then grows beyond the pool
      request_of(random_tokens(3, 60, *model), 10),  // refused at once
      request_of(random_tokens(4, 20, *model), 10),
  };
  Engine engine(model, options);
  const std::vector<Completion> completions = run_to_completion(engine, requests);
  EXPECT_EQ(completions[0].finish, FinishReason::length);
  EXPECT_EQ(completions[1].finish, FinishReason::error);
  EXPECT_EQ(completions[1].error,
            "out of pages: token 49 of request 2 needs more than the pool's 12 pages of 4 tokens");
  EXPECT_EQ(completions[1].tokens.size(), 9U) << "what was generated before stays";
  EXPECT_EQ(completions[2].error, "prompt of 60 tokens needs 15 pages, the pool has 12");
  EXPECT_EQ(completions[3].finish, FinishReason::length);
  EXPECT_EQ(completions[3].tokens, run(tiny_options(), {requests[3]})[0].tokens);
  engine.audit();
}

TEST(Engine, SamplesOfOneRequestSharePagesAndDiffer) {
  const auto model = shared_tiny_model();
  Request request = request_of(random_tokens(9, 30, *model), 20);  // 7 full pages and a half
  request.num_samples = 6;
  request.sampling = {1.0F, 0, 1.0F, 42};
  EngineOptions options = tiny_options();
  options.plan.batch_invariant = true;
  Engine engine(model, options);
  std::int64_t least_free = engine.num_pages();
  int most_rows = 0;
  RunHooks hooks;
  hooks.on_step = [&](const Engine& e) {
    least_free = std::min(least_free, e.num_free_pages());
    most_rows = std::max(most_rows, e.last_step().decode_rows);
  };
  const std::vector<Completion> completions = run_to_completion(engine, {&request, 1}, hooks);
  EXPECT_EQ(most_rows, 6);
  EXPECT_EQ(engine.stats().computed_tokens, 30) << "the prompt is computed once";
  EXPECT_LE(engine.num_pages() - least_free, 7 + 6 * 6) << "the full prompt pages exist once";
  std::set<std::vector<std::int32_t>> distinct;
  for (const Completion& completion : completions) distinct.insert(completion.tokens);
  EXPECT_EQ(distinct.size(), 6U);
  engine.audit();

  // A sample depends on seed and index alone: the same in a smaller batch, where siblings wait and recompute.
  options.max_batch = 2;
  EXPECT_EQ(tokens_of(run(options, {request})), tokens_of(completions));
  options.prefix_cache = false;
  EXPECT_EQ(tokens_of(run(options, {request})), tokens_of(completions));
  request.sampling.seed = 43;
  EXPECT_NE(tokens_of(run(options, {request})), tokens_of(completions));
}

TEST(Engine, SharedPromptsAreComputedOnceAndAdopted) {
  const auto model = shared_tiny_model();
  const std::vector<Request> requests = questions(5, 80, 6, 4, *model);
  Engine engine(model, tiny_options());
  run_to_completion(engine, requests);
  EXPECT_EQ(engine.stats().computed_tokens, 80 + 5 * 6);
  EXPECT_EQ(engine.stats().cached_prompt_tokens, 4 * 80);
  // A second round finds everything but the last, partly filled page.
  run_to_completion(engine, requests);
  EXPECT_EQ(engine.stats().computed_tokens, 80 + 5 * 6 + 5 * (86 % 4));
  engine.audit();
}

TEST(Engine, AFollowUpAdoptsWhatAnEarlierAnswerComputed) {
  const auto model = shared_tiny_model();
  const Request first = request_of(random_tokens(31, 22, *model), 19);  // pages of 4: 5.5 of prompt
  Engine engine(model, tiny_options());
  const Completion answer = run_to_completion(engine, {&first, 1})[0];
  ASSERT_EQ(answer.tokens.size(), 19U);
  // The last generated token was never computed: 22 + 18 tokens are, ten full pages.
  Request next = first;
  next.prompt.insert(next.prompt.end(), answer.tokens.begin(), answer.tokens.end());
  const std::vector<std::int32_t> tail = random_tokens(32, 7, *model);
  next.prompt.insert(next.prompt.end(), tail.begin(), tail.end());
  const std::int64_t computed_before = engine.stats().computed_tokens;
  const Completion followed = run_to_completion(engine, {&next, 1})[0];
  EXPECT_EQ(engine.stats().cached_prompt_tokens, 40);
  EXPECT_EQ(engine.stats().computed_tokens - computed_before, 22 + 19 + 7 - 40);
  EXPECT_EQ(engine.prefix_cache_stats().lookups, 2);
  EXPECT_EQ(engine.prefix_cache_stats().hits, 1);
  EXPECT_EQ(followed.tokens, PlainModel(model->gguf()).generate(next.prompt, 19))
      << "adopted keys and values are right";
  engine.audit();
}

TEST(Engine, StopsAtTokensStringsAndLength) {
  const auto model = shared_tiny_model();
  const Request request = request_of(random_tokens(21, 12, *model), 24);
  const Completion whole = run(tiny_options(), {request})[0];
  ASSERT_EQ(whole.tokens.size(), 24U);
  EXPECT_EQ(whole.text, [&] {
    Detokenizer detokenizer(model->tokenizer());
    std::string text;
    for (const std::int32_t token : whole.tokens) text += detokenizer.push(token);
    return text + detokenizer.finish();
  }());

  Request at_token = request;
  at_token.stop_tokens = {whole.tokens[7]};
  const Completion stopped = run(tiny_options(), {at_token})[0];
  EXPECT_EQ(stopped.finish, FinishReason::stop);
  EXPECT_EQ(stopped.tokens.back(), whole.tokens[7]);
  EXPECT_LE(stopped.tokens.size(), 8U);

  ASSERT_GT(whole.text.size(), 12U);
  // Cut at a character border: the text before the stop string and nothing of it.
  std::size_t begin = whole.text.size() / 2;
  while (begin > 0 && (static_cast<unsigned char>(whole.text[begin]) & 0xC0U) == 0x80U) --begin;
  Request at_string = request;
  at_string.stop = {whole.text.substr(begin)};
  const Completion cut = run(tiny_options(), {at_string})[0];
  EXPECT_EQ(cut.finish, FinishReason::stop);
  EXPECT_EQ(cut.text, whole.text.substr(0, whole.text.find(at_string.stop[0])));
}

TEST(Engine, EventsJoinToTheCompletion) {
  const auto model = shared_tiny_model();
  Request request = request_of(random_tokens(22, 12, *model), 15);
  request.num_samples = 3;
  request.sampling.temperature = 1.0F;
  std::map<int, std::string> texts;
  std::map<int, int> ends;
  RunHooks hooks;
  hooks.on_event = [&](const Event& event) {
    texts[event.sample] += event.text;
    ends[event.sample] += event.finish ? 1 : 0;
  };
  for (const Completion& completion : run(tiny_options(), {request}, hooks)) {
    EXPECT_EQ(texts[completion.sample], completion.text);
    EXPECT_EQ(ends[completion.sample], 1);
  }
}

TEST(Engine, CancelFreesPagesAtOnceAndTellsSo) {
  const auto model = shared_tiny_model();
  EngineOptions options = tiny_options();
  options.prefix_cache = false;
  Engine engine(model, options);
  Request many = request_of(random_tokens(1, 50, *model), 100);
  many.num_samples = 3;
  const RequestId first = engine.submit(many);
  const RequestId second = engine.submit(request_of(random_tokens(2, 10, *model), 5));
  for (int i = 0; i < 5; ++i) (void)engine.step();
  EXPECT_TRUE(engine.cancel(first));
  EXPECT_FALSE(engine.cancel(first));
  EXPECT_FALSE(engine.cancel(999));
  int cancelled = 0;
  int finished = 0;
  while (engine.has_work()) {
    for (const Event& event : engine.step()) {
      cancelled += event.request == first && event.finish == FinishReason::cancelled ? 1 : 0;
      finished += event.request == second && event.finish == FinishReason::length ? 1 : 0;
    }
  }
  EXPECT_EQ(cancelled, 3);
  EXPECT_LE(finished, 1);
  EXPECT_EQ(engine.num_free_pages(), engine.num_pages());
  engine.audit();

  // Ctrl-C in run_to_completion: everything ends, nothing leaks.
  int asked = 0;
  RunHooks hooks;
  hooks.cancelled = [&] { return ++asked > 4; };
  for (const Completion& completion : run_to_completion(engine, std::vector<Request>{many, many}, hooks)) {
    EXPECT_EQ(completion.finish, FinishReason::cancelled);
  }
  EXPECT_EQ(engine.num_free_pages(), engine.num_pages());
}

TEST(Engine, ProgressAndStatisticsAddUp) {
  const auto model = shared_tiny_model();
  Engine engine(model, tiny_options());
  const std::vector<Request> requests = questions(3, 60, 5, 8, *model);
  for (const Request& request : requests) engine.submit(request);
  EXPECT_EQ(engine.progress().prompt_tokens_total, 3 * 65);
  EXPECT_EQ(engine.progress().samples_waiting, 3);
  std::int64_t done = 0;
  std::int64_t rows = 0;
  while (engine.has_work()) {
    (void)engine.step();
    const StepStats& step = engine.last_step();
    EXPECT_GT(step.step_seconds, 0);
    EXPECT_GE(step.step_seconds, step.attention_seconds + step.product_seconds);
    rows += step.decode_rows + step.prefill_rows;
    done = std::max(done, engine.progress().prompt_tokens_done);
    EXPECT_NE(engine.last_plan().describe(), "");
  }
  EXPECT_EQ(done, 3 * 65);
  EXPECT_EQ(engine.stats().generated_tokens, 3 * 8);
  EXPECT_EQ(rows, engine.stats().computed_tokens + 3 * 7);
  EXPECT_EQ(engine.stats().prompt_tokens, 3 * 65);
}

TEST(Engine, EndsAtTheModelsContext) {
  TinyModel shape;
  shape.context = 40;
  const auto model = tiny_model(shape);
  Engine engine(model, tiny_options());
  const std::vector<Request> requests{request_of(random_tokens(1, 30, *model), 100),
                                      request_of(random_tokens(1, 40, *model), 100)};
  const auto completions = run_to_completion(engine, requests);
  EXPECT_EQ(completions[0].tokens.size(), 10U);
  EXPECT_EQ(completions[0].finish, FinishReason::length);
  EXPECT_EQ(completions[1].error, "prompt = 40 tokens, expected fewer than the model's context of 40");
}

TEST(Engine, RefusesBadRequestsAndOptionsByName) {
  const auto model = shared_tiny_model();
  Engine engine(model, tiny_options());
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  const auto submit = [&](auto&& change) {
    Request request = request_of({5, 6}, 3);
    change(request);
    return message([&] { engine.submit(request); });
  };
  EXPECT_EQ(submit([](Request& r) { r.prompt.clear(); }), "prompt = no tokens, expected at least one");
  EXPECT_EQ(submit([](Request& r) { r.prompt[1] = -3; }),
            "prompt[1] = -3, expected a token id in [0, " + std::to_string(model->config().vocab) + ")");
  EXPECT_EQ(submit([](Request& r) { r.num_samples = 0; }), "num_samples = 0, expected at least 1");
  EXPECT_EQ(submit([](Request& r) { r.max_tokens = 0; }), "max_tokens = 0, expected at least 1");
  EXPECT_EQ(submit([](Request& r) { r.sampling.top_k = -1; }), "sampling.top_k = -1, expected at least 0");
  EXPECT_EQ(submit([](Request& r) { r.sampling.top_p = 0; }), "sampling.top_p = 0, expected more than 0 and at most 1");
  EXPECT_EQ(submit([](Request& r) { r.stop = {"a", ""}; }), "stop[1] is empty, expected at least one byte");
  EXPECT_FALSE(engine.has_work()) << "nothing refused may linger";

  const auto make = [&](auto&& change) {
    EngineOptions options = tiny_options();
    change(options);
    return message([&] { Engine bad(model, options); });
  };
  EXPECT_EQ(make([](EngineOptions& o) { o.page_size = 0; }), "page_size = 0, expected 1..65536");
  EXPECT_EQ(make([](EngineOptions& o) { o.max_batch = 0; }), "max_batch = 0, expected at least 1");
  EXPECT_EQ(make([](EngineOptions& o) { o.max_step_tokens = 0; }), "max_step_tokens = 0, expected at least 1");
  EXPECT_EQ(make([](EngineOptions& o) { o.kv_dtype = DType::f8e4m3; }), "kv_dtype = f8e4m3, expected f32, f16 or bf16");
  EXPECT_EQ(make([](EngineOptions& o) { o.plan.window_left = 5; }),
            "plan = a mask or score option, expected the defaults: the model decides what a row sees");
  const std::string page_bytes = std::to_string(2 * 2 * 64 * 4 * 4);  // K and V, layers, width, tokens, float
  EXPECT_EQ(make([](EngineOptions& o) {
              o.num_pages = 0;
              o.kv_bytes = 1;
            }),
            "kv_bytes = 1, expected room for 1..16777216 pages of " + page_bytes + " bytes");
  EXPECT_EQ(make([](EngineOptions& o) { o.num_pages = -1; }), "num_pages = -1, expected at least 0");
  EXPECT_EQ(make([](EngineOptions& o) { o.num_pages = (1 << 24) + 1; }),
            "num_pages = 16777217, expected at most 16777216 pages of " + page_bytes + " bytes");
  // Pages so large that this many bytes cannot even be counted: 65536 tokens of 1 KiB each, times 2^24.
  EXPECT_EQ(make([](EngineOptions& o) { o.page_size = 1 << 16, o.num_pages = 1 << 24; }),
            "num_pages = 16777216, expected at most 1048576 pages of 67108864 bytes");
}

TEST(Engine, SettingsAreCheckedWithoutAModel) {
  const auto message = [](auto&& change) -> std::string {
    Request request;  // no prompt yet
    change(request);
    try {
      check_settings(request);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([](Request&) {}), "no error");
  EXPECT_EQ(message([](Request& r) { r.num_samples = 0; }), "num_samples = 0, expected at least 1");
  EXPECT_EQ(message([](Request& r) { r.max_tokens = -2; }), "max_tokens = -2, expected at least 1");
  EXPECT_EQ(message([](Request& r) { r.sampling.top_p = 0; }),
            "sampling.top_p = 0, expected more than 0 and at most 1");
  EXPECT_EQ(message([](Request& r) { r.stop = {""}; }), "stop[0] is empty, expected at least one byte");
}

TEST(Engine, LogitsThatAreNotFiniteEndTheSampleWithAReason) {
  // The embedding of one token is made NaN.
  std::vector<std::byte> bytes = tiny_gguf();
  const std::int32_t poisoned = 100;
  {
    const Gguf gguf = Gguf::from_bytes(bytes, "tiny");
    const auto data = gguf.find_tensor("token_embd.weight")->data;
    const std::size_t row_bytes = 128 * sizeof(float);
    const std::size_t offset = static_cast<std::size_t>(data.data() - bytes.data()) + poisoned * row_bytes;
    std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), row_bytes, std::byte{0xFF});
  }
  ModelOptions model_options;
  model_options.num_threads = 2;
  model_options.weights = WeightType::f32;
  const auto model = std::make_shared<const Model>(Gguf::from_bytes(bytes, "tiny"), model_options);
  Engine engine(model, tiny_options());
  Request bad = request_of({5, poisoned, 7, 8}, 4);
  bad.num_samples = 2;
  const auto completions = run_to_completion(engine, {&bad, 1});
  for (const Completion& completion : completions) {
    EXPECT_EQ(completion.finish, FinishReason::error);
    EXPECT_EQ(completion.error, "logits at position 4 are not finite");
  }
  EXPECT_EQ(engine.prefix_cache_stats().pages_cached, 0) << "of the prompt's one full page";
  EXPECT_FALSE(engine.has_work());
  engine.audit();
  Engine sound(shared_tiny_model(), tiny_options());  // control: there it is cached
  (void)run_to_completion(sound, {&bad, 1});
  EXPECT_GT(sound.prefix_cache_stats().pages_cached, 0);
}

TEST(Engine, RefusesModelsThatItWouldGetWrong) {
  const auto message = [](const std::vector<std::byte>& bytes) -> std::string {
    try {
      const Model model(Gguf::from_bytes(bytes, "m"), {});
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  GgufWriter bias = tiny_gguf_writer();
  bias.tensor("blk.0.attn_q.bias", GgmlType::f32, {32}, encode_tensor(GgmlType::f32, std::vector<float>(32)));
  EXPECT_EQ(message(bias.bytes()), "m: tensor 'blk.0.attn_q.bias' has no place in the llama forward pass of 2 layers");

  // An embedding with a row fewer than the vocabulary: the number after the name, the dimensions and the width.
  std::vector<std::byte> shorter = tiny_gguf();
  const std::string name = "token_embd.weight";
  const auto bytes_of_name = std::as_bytes(std::span(name));
  const auto at = std::search(shorter.begin(), shorter.end(), bytes_of_name.begin(), bytes_of_name.end());
  ASSERT_NE(at, shorter.end());
  std::byte* rows = &*at + name.size() + 4 + 8;
  const std::size_t vocab = shared_tiny_model()->tokenizer().vocab_size();
  const std::uint64_t fewer = vocab - 1;
  std::memcpy(rows, &fewer, sizeof fewer);
  EXPECT_EQ(message(shorter), "m: token_embd.weight has " + std::to_string(fewer) + " rows, expected the tokenizer's " +
                                  std::to_string(vocab) + " tokens");

  ModelOptions options;
  options.num_threads = -1;
  try {
    (void)load_model("nowhere.gguf", options);
    ADD_FAILURE() << "a negative number of threads was accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "num_threads = -1, expected at least 0");
  }
}

TEST(Engine, AFailedCascadeLaunchFallsBackToFlat) {
  const std::vector<Request> requests = questions(4, 60, 5, 10, *shared_tiny_model());
  EngineOptions options = tiny_options();
  options.plan.batch_invariant = true;
  options.plan.invariant_chunk = 32;
  options.plan.cascade = CascadeSwitch::on;
  const auto expected = tokens_of(run(options, requests));
  std::set<std::int64_t> failed;
  options.inject_cascade_failure = [&](std::int64_t step, int layer) {
    // In the first layer and in the last one, so that a step is flat from the beginning, or from its middle on.
    if (layer != static_cast<int>(step % 2)) return false;
    failed.insert(step);
    return true;
  };
  EngineStats stats;
  RunHooks hooks;
  hooks.on_step = [&](const Engine& engine) {
    const StepStats& step = engine.last_step();
    EXPECT_EQ(step.cascade_error.empty(), !failed.contains(step.step));
    if (failed.contains(step.step)) {
      EXPECT_EQ(step.path, Path::flat);
      EXPECT_NE(step.cascade_error.find("injected failure of layer"), std::string::npos);
    }
    stats = engine.stats();
  };
  EXPECT_EQ(tokens_of(run(options, requests, hooks)), expected);
  EXPECT_GE(failed.size(), 8U);
  EXPECT_EQ(stats.cascade_failures, static_cast<std::int64_t>(failed.size()));
  EXPECT_EQ(stats.cascade_steps, 0);
}

/// Log-softmax of a row in double precision.
double log_probability(const std::vector<double>& logits, std::int32_t token) {
  double sum = 0;
  const double top = *std::max_element(logits.begin(), logits.end());
  for (const double logit : logits) sum += std::exp(logit - top);
  return logits[static_cast<std::size_t>(token)] - top - std::log(sum);
}

TEST(Engine, LogProbabilitiesAgreeWithPlainDoubleImplementation) {
  const auto model = shared_tiny_model();
  const PlainModel plain(model->gguf());
  Request request = request_of(random_tokens(3, 41, *model), 5);
  request.num_logprobs = 3;
  request.prompt_logprobs = true;
  request.num_samples = 2;
  Engine engine(model, tiny_options());  // a prompt in chunks of 24
  std::vector<Event> events;
  // The second run finds the prompt in the cache, and must compute it all the same.
  for (int run = 0; run < 2; ++run) {
    events.clear();
    engine.submit(request);
    while (engine.has_work()) {
      for (Event& event : engine.step()) events.push_back(std::move(event));
    }
    std::vector<std::int32_t> tokens = request.prompt;
    std::vector<PlaceLogprobs> places;
    int with_prompt = 0;
    for (const Event& event : events) {
      EXPECT_EQ(event.cached_tokens, 0);
      with_prompt += event.prompt_logprobs.empty() ? 0 : 1;
      if (event.sample != 0) continue;
      if (!event.prompt_logprobs.empty()) places = event.prompt_logprobs;
      ASSERT_TRUE(event.logprobs.has_value());
      EXPECT_EQ(event.logprobs->chosen.token, event.token);
      places.push_back(*event.logprobs);
      tokens.push_back(event.token);
    }
    EXPECT_EQ(with_prompt, 1);
    ASSERT_EQ(places.size(), tokens.size() - 1);
    const std::vector<std::vector<double>> logits = plain.logits(tokens);
    for (std::size_t i = 0; i < places.size(); ++i) {
      EXPECT_EQ(places[i].chosen.token, tokens[i + 1]);
      EXPECT_NEAR(places[i].chosen.logprob, log_probability(logits[i], tokens[i + 1]), 1e-4) << i;
      ASSERT_EQ(places[i].top.size(), 3U);
      for (std::size_t k = 0; k < 3; ++k) {
        EXPECT_NEAR(places[i].top[k].logprob, log_probability(logits[i], places[i].top[k].token), 1e-4);
        if (k == 0) continue;
        EXPECT_LE(places[i].top[k].logprob, places[i].top[k - 1].logprob);
      }
    }
  }
  EXPECT_EQ(engine.stats().cached_prompt_tokens, 0);
  engine.audit();
}

TEST(Engine, LogProbabilitiesOfAPromptSurvivePreemption) {
  const auto model = shared_tiny_model();
  EngineOptions options = tiny_options();
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 4; ++i) {
    Request request = request_of(random_tokens(i, 30, *model), 30);
    request.num_logprobs = 0;
    request.prompt_logprobs = true;
    requests.push_back(std::move(request));
  }
  requests[2].num_samples = 3;  // forks compute the prompt again, too
  const auto places = [&](std::int32_t num_pages, std::int64_t& preemptions) {
    options.num_pages = num_pages;
    Engine engine(model, options);
    for (const Request& request : requests) engine.submit(request);
    std::map<std::pair<RequestId, int>, std::vector<std::int32_t>> told;  // of each sample
    while (engine.has_work()) {
      for (const Event& event : engine.step()) {
        std::vector<std::int32_t>& tokens = told[{event.request, event.sample}];
        for (const PlaceLogprobs& place : event.prompt_logprobs) tokens.push_back(place.chosen.token);
        if (event.logprobs) tokens.push_back(event.logprobs->chosen.token);
      }
    }
    preemptions = engine.stats().preemptions;
    engine.audit();
    return told;
  };
  std::int64_t preemptions = 0;
  const auto expected = places(512, preemptions);
  EXPECT_EQ(preemptions, 0);
  EXPECT_EQ(expected.at({1, 0}).size(), 59U);
  EXPECT_EQ(places(40, preemptions), expected);
  EXPECT_GT(preemptions, 0);
}

TEST(Engine, TellsWhatWasCachedAndWhoTookPart) {
  const auto model = shared_tiny_model();
  Engine engine(model, tiny_options());
  Request request = request_of(random_tokens(8, 21, *model), 3);
  request.tag = 77;
  for (const std::int64_t cached : {0, 20}) {
    engine.submit(request);
    while (engine.has_work()) {
      for (const Event& event : engine.step()) EXPECT_EQ(event.cached_tokens, cached);
      ASSERT_EQ(engine.last_requests().size(), 1U);
      EXPECT_EQ(engine.last_requests()[0].tag, 77U);
      EXPECT_EQ(engine.last_requests()[0].prompt_tokens, 21);
    }
    EXPECT_EQ(engine.last_requests()[0].tokens, 23);
    EXPECT_EQ(engine.num_free_pages() + engine.num_idle_cached_pages(), engine.num_pages());
  }
}

TEST(Engine, EventsTellHowManyBytesAreHeldBack) {
  const auto model = shared_tiny_model();
  Request request = request_of(random_tokens(4, 9, *model), 40);
  const std::vector<Completion> full = run(tiny_options(), {request});
  const std::string text = full[0].text;
  std::size_t at = text.size() / 2;
  while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) ++at;
  request.stop = {text.substr(at)};  // everything from there on
  Engine engine(model, tiny_options());
  engine.submit(request);
  std::size_t spelled = 0;
  std::size_t shown = 0;
  std::size_t held = 0;
  while (engine.has_work()) {
    for (const Event& event : engine.step()) {
      if (!model->tokenizer().is_special(event.token)) spelled += model->tokenizer().bytes_of(event.token).size();
      shown += event.text.size();
      held = event.held_bytes;
      EXPECT_GE(shown + held, spelled);  // a byte that is no text is shown as three
    }
  }
  EXPECT_EQ(shown, text.find(request.stop[0]));
  EXPECT_GE(held, request.stop[0].size());
}

}  // namespace
}  // namespace headwater::test
