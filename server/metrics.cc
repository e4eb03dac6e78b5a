// See metrics.h. prometheus-cpp keeps the values and writes the text; its HTTP server is not used.
#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <chrono>
#include <sstream>

#include "engine/model.h"
#include "headwater/version.h"
#include "server/http.h"

namespace headwater::server {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

const Histogram::BucketBoundaries kFirstToken{0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1, 2, 5, 10, 30, 60};
const Histogram::BucketBoundaries kTokenGap{0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5};
const Histogram::BucketBoundaries kWhole{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300};

}  // namespace

struct Metrics::Impl {
  prometheus::Registry registry;

  Counter& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
  }
  Family<Counter>& counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  Gauge& gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
  }
  Family<Gauge>& gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }
  Histogram& histogram(const char* name, const char* help, const Histogram::BucketBoundaries& bounds) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, bounds);
  }

  // Attention.
  Family<Counter>& launches = counters(
      "headwater_decode_launches_total",
      "Attention launches (one per layer) of steps with decode rows, by path: cascade reads a shared span once");
  Counter& flat_launches = launches.Add({{"path", "flat"}});
  Counter& cascade_launches = launches.Add({{"path", "cascade"}});
  Counter& spans = counter("headwater_cascade_spans_total", "Shared spans read once, summed over cascade launches");
  Counter& shared_tokens =
      counter("headwater_cascade_shared_tokens_total", "Tokens of shared spans, summed over cascade launches");
  Counter& members = counter("headwater_cascade_member_sequences_total",
                             "Sequences that had a shared span read for them, summed over spans and launches");
  Counter& failures = counter("headwater_cascade_failures_total",
                              "Steps in which a cascade launch failed and flat attention took its place");
  Counter& kv_read = counter("headwater_kv_bytes_read_total", "Bytes of keys and values that attention read");
  Counter& kv_saved = counter("headwater_kv_bytes_saved_total",
                              "Bytes of keys and values that flat attention would have read in addition");
  Family<Gauge>& cascade_off = gauges(
      "headwater_cascade_off", "1 where no shared span will be split, the label says why; absent where some may be");

  // Time.
  Counter& steps = counter("headwater_steps_total", "Steps of the engine");
  Counter& step_seconds = counter("headwater_step_seconds_total", "Time in steps of the engine");
  Counter& plan_seconds = counter("headwater_plan_seconds_total", "Time in planning, part of the steps' time");
  Counter& attention_seconds = counter("headwater_attention_seconds_total", "Time in attention, appends excluded");
  Counter& append_seconds = counter("headwater_append_seconds_total", "Time in writing keys and values to the cache");
  Counter& product_seconds = counter("headwater_product_seconds_total", "Time in matrix products");
  Counter& forward_seconds = counter("headwater_forward_seconds_total",
                                     "Time in forward passes: products, attention, appends, what is between");
  Counter& sample_seconds = counter("headwater_sample_seconds_total", "Time in choosing tokens from logits");
  Counter& io_seconds =
      counter("headwater_io_cpu_seconds_total", "Processor time of the thread that serves the connections");

  // Work.
  Counter& prompt_tokens = counter("headwater_prompt_tokens_total", "Tokens of accepted prompts");
  Counter& cached_tokens =
      counter("headwater_prompt_tokens_cached_total", "Prompt tokens taken from the prefix cache instead of computed");
  Counter& computed_tokens = counter("headwater_prompt_tokens_computed_total", "Prompt tokens computed");
  Counter& generated_tokens = counter("headwater_generated_tokens_total", "Tokens generated");
  Counter& preemptions = counter("headwater_preemptions_total", "Samples sent back to the queue for want of pages");
  Gauge& running = gauge("headwater_samples_running", "Samples in progress; a request has n of them per prompt");
  Gauge& waiting = gauge("headwater_samples_waiting", "Samples that wait to be admitted");
  Gauge& queue = gauge("headwater_requests_pending", "Requests accepted and not finished");

  // KV cache.
  Family<Gauge>& pages =
      gauges("headwater_kv_pages", "Pages of the KV cache: used by samples, cached for later prompts only, free");
  Gauge& pages_used = pages.Add({{"state", "used"}});
  Gauge& pages_cached = pages.Add({{"state", "cached"}});
  Gauge& pages_free = pages.Add({{"state", "free"}});
  Counter& lookups = counter("headwater_prefix_cache_lookups_total", "Prompts looked up in the prefix cache");
  Counter& hits = counter("headwater_prefix_cache_hits_total", "Lookups that found at least one page");
  Counter& evictions = counter("headwater_prefix_cache_evicted_pages_total", "Pages evicted from the prefix cache");

  // Requests.
  Histogram& first_token =
      histogram("headwater_time_to_first_token_seconds", "From a request's last byte to its first token", kFirstToken);
  Histogram& token_gap = histogram("headwater_inter_token_seconds", "Between two tokens of a sample", kTokenGap);
  Histogram& whole = histogram("headwater_request_seconds", "From a request's last byte to its last token", kWhole);
  Family<Counter>& requests =
      counters("headwater_requests_total",
               "Generation requests that were read, by endpoint and outcome: stop, length, cancelled (the client "
               "went away), rejected (answered 400 to 499), error");
  Family<Counter>& responses = counters("headwater_http_responses_total", "HTTP answers by status");
  Gauge& connections = gauge("headwater_http_connections", "Open connections");
  Counter& turned_away =
      counter("headwater_http_connections_turned_away_total", "Connections closed at once: too many were open");
  Counter& timed_out = counter("headwater_http_timeouts_total", "Connections closed since a client was too slow");
  Counter& dropped_slow =
      counter("headwater_http_dropped_slow_total", "Streams dropped since their client left too much unread");
  Counter& lost_lines = counter("headwater_log_lines_lost_total", "Log lines that could not be written");

  engine::EngineStats before;
  PrefixCacheStats cache_before;
  std::chrono::steady_clock::time_point pages_counted;

  void count_pages(const engine::Engine& engine) {
    const std::int64_t free = engine.num_free_pages();
    const std::int64_t cached = engine.num_idle_cached_pages();
    pages_free.Set(static_cast<double>(free));
    pages_cached.Set(static_cast<double>(cached));
    pages_used.Set(static_cast<double>(engine.num_pages() - free - cached));
    const engine::Progress progress = engine.progress();
    running.Set(progress.samples_running);
    waiting.Set(progress.samples_waiting);
  }
};

namespace {

/// Adds what a sum has grown by. Prometheus counters take no negative steps.
template <class T>
void grow(Counter& counter, T now, T before) {
  if (now > before) counter.Increment(static_cast<double>(now - before));
}

}  // namespace

Metrics::Metrics(std::string_view cascade_off) : impl_(std::make_unique<Impl>()) {
  prometheus::BuildGauge()
      .Name("headwater_build_info")
      .Help("1; the label names the version")
      .Register(impl_->registry)
      .Add({{"version", version()}})
      .Set(1);
  if (!cascade_off.empty()) impl_->cascade_off.Add({{"reason", std::string(cascade_off)}}).Set(1);
}

Metrics::~Metrics() = default;

void Metrics::on_step(const engine::Engine& engine) {
  Impl& m = *impl_;
  const engine::StepStats& step = engine.last_step();
  const engine::EngineStats& sums = engine.stats();
  const PrefixCacheStats cache = engine.prefix_cache_stats();
  const auto layers = static_cast<double>(engine.model().config().num_layers);
  m.steps.Increment();
  m.step_seconds.Increment(step.step_seconds);
  m.plan_seconds.Increment(step.plan_seconds);
  m.attention_seconds.Increment(step.attention_seconds);
  m.append_seconds.Increment(step.append_seconds);
  m.product_seconds.Increment(step.product_seconds);
  m.forward_seconds.Increment(step.forward_seconds);
  m.sample_seconds.Increment(step.sample_seconds);
  m.kv_read.Increment(static_cast<double>(step.kv_bytes_read));
  grow(m.kv_saved, step.kv_bytes_flat, step.kv_bytes_read);
  if (step.decode_rows > 0) {
    (step.path == Path::cascade ? m.cascade_launches : m.flat_launches).Increment(layers);
    if (step.path == Path::cascade) {
      m.spans.Increment(layers * static_cast<double>(step.plan.num_spans));
      m.shared_tokens.Increment(layers * static_cast<double>(step.plan.shared_tokens));
      m.members.Increment(layers * static_cast<double>(step.plan.member_sequences));
    }
  }
  if (!step.cascade_error.empty()) m.failures.Increment();
  grow(m.prompt_tokens, sums.prompt_tokens, m.before.prompt_tokens);
  grow(m.cached_tokens, sums.cached_prompt_tokens, m.before.cached_prompt_tokens);
  grow(m.computed_tokens, sums.computed_tokens, m.before.computed_tokens);
  grow(m.generated_tokens, sums.generated_tokens, m.before.generated_tokens);
  grow(m.preemptions, sums.preemptions, m.before.preemptions);
  grow(m.lookups, cache.lookups, m.cache_before.lookups);
  grow(m.hits, cache.hits, m.cache_before.hits);
  grow(m.evictions, cache.pages_evicted, m.cache_before.pages_evicted);
  m.before = sums;
  m.cache_before = cache;
  // Counting pages looks at all of them.
  const auto now = std::chrono::steady_clock::now();
  if (now - m.pages_counted < std::chrono::milliseconds(100)) return;
  m.pages_counted = now;
  m.count_pages(engine);
}

void Metrics::on_idle(const engine::Engine& engine) {
  impl_->count_pages(engine);
}

void Metrics::on_first_token(double seconds) {
  impl_->first_token.Observe(seconds);
}
void Metrics::on_token_gap(double seconds) {
  impl_->token_gap.Observe(seconds);
}

void Metrics::on_request_end(std::string_view endpoint, std::string_view outcome, double seconds) {
  impl_->requests.Add({{"endpoint", std::string(endpoint)}, {"outcome", std::string(outcome)}}).Increment();
  if (outcome == "stop" || outcome == "length") impl_->whole.Observe(seconds);
}

void Metrics::on_response(int status) {
  impl_->responses.Add({{"status", std::to_string(status)}}).Increment();
}

std::string Metrics::text(const HttpStats& http, const Elsewhere& elsewhere) {
  Impl& m = *impl_;
  m.queue.Set(static_cast<double>(elsewhere.pending_requests));
  m.connections.Set(static_cast<double>(http.connections));
  grow(m.turned_away, static_cast<double>(http.turned_away), m.turned_away.Value());
  grow(m.timed_out, static_cast<double>(http.timed_out), m.timed_out.Value());
  grow(m.dropped_slow, static_cast<double>(http.dropped_slow), m.dropped_slow.Value());
  grow(m.io_seconds, elsewhere.io_cpu_seconds, m.io_seconds.Value());
  grow(m.lost_lines, static_cast<double>(elsewhere.lost_log_lines), m.lost_lines.Value());
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, m.registry.Collect());
  return out.str();
}

}  // namespace headwater::server
