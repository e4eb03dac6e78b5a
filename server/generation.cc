// The way of a generation request through the server; see api.h. Its prompts have one ticket each: the request's
// number, its endpoint and the prompt's index in one integer, so that an id can be told from a ticket alone.
#include <fmt/format.h>

#include <atomic>
#include <functional>
#include <utility>

#include "headwater/error.h"
#include "headwater/version.h"
#include "server/api.h"
#include "server/sse.h"

namespace headwater::server {
namespace {

constexpr unsigned kPromptBits = 16;
constexpr unsigned kEndpointBits = 1;

Ticket ticket_of(std::uint64_t number, Endpoint endpoint, std::size_t prompt) {
  return (number << kEndpointBits | static_cast<std::uint64_t>(endpoint)) << kPromptBits | prompt;
}
std::size_t prompt_of(Ticket ticket) {
  return ticket & ((1U << kPromptBits) - 1);
}
Endpoint endpoint_of(Ticket ticket) {
  return static_cast<Endpoint>(ticket >> kPromptBits & 1U);
}
std::uint64_t number_of(Ticket ticket) {
  return ticket >> (kPromptBits + kEndpointBits);
}

std::string_view name_of(Endpoint endpoint) {
  return endpoint == Endpoint::chat ? "chat" : "completions";
}

/// What a request that the engine refused or could not finish is told.
ApiError error_of(const Delivery& delivery) {
  ApiError error{500, "server_error", delivery.event.error};
  if (delivery.refused == ErrorCode::invalid_argument || delivery.refused == ErrorCode::out_of_pages) {
    error.status = 400;
    error.type = "invalid_request_error";
  } else if (!delivery.refused && delivery.event.error_code == ErrorCode::out_of_pages) {  // in the middle
    error.status = 503;
    error.retry_after_seconds = 1;
  }
  return error;
}

constexpr std::int64_t kMostAnswerBytes = std::int64_t{64} << 20;  ///< of an answer that is not streamed

/// What an answer may grow to before anything of it is sent, about: every token's text, and its log probabilities as
/// JSON. Of a stream that is the prompt's part.
std::int64_t answer_bytes(const PreparedRequest& prepared) {
  constexpr std::int64_t kTextBytes = 8;
  constexpr std::int64_t kPlaceBytes = 100;
  std::int64_t bytes = 0;
  for (const engine::Request& work : prepared.work) {
    std::int64_t tokens = prepared.request.stream ? 1 : work.max_tokens;
    if (work.prompt_logprobs) tokens += static_cast<std::int64_t>(work.prompt.size());
    const std::int64_t places = work.num_logprobs < 0 ? 0 : 1 + work.num_logprobs;
    bytes += work.num_samples * tokens * (kTextBytes + places * kPlaceBytes);
  }
  return bytes;
}

}  // namespace

std::string Api::id_of(Ticket ticket) const {
  return fmt::format("{}-{:08x}{:06x}", endpoint_of(ticket) == Endpoint::chat ? "chatcmpl" : "cmpl", id_key_,
                     number_of(ticket));
}

void Api::generate(Endpoint endpoint, HttpRequest request, const std::shared_ptr<Exchange>& exchange) {
  const std::uint64_t number = next_number_++;
  auto generation = std::make_unique<Generation>();
  generation->number = number;
  generation->endpoint = endpoint;
  generation->exchange = exchange;
  generation->begin = Clock::now();
  generations_.emplace(number, std::move(generation));
  const auto gone = std::make_shared<std::atomic<bool>>(false);
  exchange->on_gone([this, number, gone] {
    gone->store(true, std::memory_order_relaxed);
    give_up(number);
  });
  const std::size_t bytes = request.body.size();
  auto prepare = [this, number, endpoint, gone, served = served_, limits = options_.limits,
                  body = std::move(request.body)] {
    if (gone->load(std::memory_order_relaxed)) return;
    try {
      auto prepared = std::make_shared<PreparedRequest>(prepare_generation(endpoint, body, limits, *served));
      http_.post([this, number, prepared] { guarded(number, [&] { start(number, std::move(*prepared)); }); });
    } catch (const ApiError& error) {
      http_.post([this, number, error] { fail(number, error); });
    } catch (const Error& known) {
      const ApiError error{400, "invalid_request_error", known.what()};
      http_.post([this, number, error] { fail(number, error); });
    } catch (const std::exception& unknown) {
      const ApiError error{500, "server_error", unknown.what()};
      http_.post([this, number, error] { fail(number, error); });
    }
  };
  if (worker_.post(std::move(prepare), bytes)) return;
  fail(number, {429, "rate_limit_error", "too many requests are waiting", "", "queue_full", 1});
}

/// Leaves a prepared request with the engine.
void Api::start(std::uint64_t number, PreparedRequest prepared) {
  const auto found = generations_.find(number);
  if (found == generations_.end()) return;  // its client has gone
  Generation& generation = *found->second;
  const GenerationRequest& request = prepared.request;
  if (answer_bytes(prepared) > kMostAnswerBytes) {
    return fail(number, {400, "invalid_request_error",
                         request.stream ? "choices x prompt x log probabilities: more than 64 MiB in one piece"
                                        : "choices x max_tokens x log probabilities: the answer could be larger than "
                                          "64 MiB, expected less, or stream = true"});
  }
  if (prepared.work.size() > loop_.max_pending()) {
    return fail(number, {400, "invalid_request_error",
                         fmt::format("prompt: has {} entries, this server takes {} requests at once (--max-pending)",
                                     prepared.work.size(), loop_.max_pending()),
                         "prompt", "invalid_value"});
  }
  AnswerSettings settings;
  settings.id = id_of(ticket_of(number, generation.endpoint, 0));
  settings.model = request.model;
  settings.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  settings.endpoint = generation.endpoint;
  settings.num_samples = request.engine.num_samples;
  settings.stream = request.stream;
  settings.include_usage = request.include_usage;
  settings.echo = request.echo;
  settings.logprobs = request.engine.num_logprobs >= 0;
  settings.prompt_only = request.max_tokens == 0;
  generation.streaming = request.stream;
  generation.last_token.resize(prepared.prompts.size() * static_cast<std::size_t>(settings.num_samples));
  generation.answer =
      std::make_unique<Answer>(std::move(settings), std::move(prepared.prompts), served_->model->tokenizer());
  for (std::size_t i = 0; i < prepared.work.size(); ++i) {
    const Ticket ticket = ticket_of(number, generation.endpoint, i);
    prepared.work[i].tag = ticket;
    const EngineLoop::Submitted submitted = loop_.submit(ticket, std::move(prepared.work[i]));
    if (submitted == EngineLoop::Submitted::accepted) {
      generation.tickets.push_back(ticket);
      continue;
    }
    const bool full = submitted == EngineLoop::Submitted::full;
    return fail(number, full ? ApiError{429, "rate_limit_error", "too many requests are waiting", "", "queue_full", 1}
                             : ApiError{503, "server_error", "the server is shutting down", "", "shutting_down", 5});
  }
}

/// Ends a request with an error; what the engine has of it is cancelled.
void Api::fail(std::uint64_t number, const ApiError& error) {
  const auto found = generations_.find(number);
  if (found == generations_.end()) return;
  Generation& generation = *found->second;
  for (const Ticket ticket : generation.tickets) loop_.cancel(ticket);
  if (generation.begun) {  // the status has been sent: the stream says it
    std::string event;
    append_event(event, error_json(error));
    append_event(event, kDone);
    if (generation.exchange->write(event)) generation.exchange->end_stream();
  } else {
    respond(generation.exchange, error);
  }
  if (error.status < 500) return finish(generation, "rejected");
  log_.error("request_failed", {{"id", id_of(ticket_of(number, generation.endpoint, 0))},
                                {"status", std::int64_t{error.status}},
                                {"error", error.message}});
  finish(generation, "error");
}

/// The client has gone.
void Api::give_up(std::uint64_t number) {
  const auto found = generations_.find(number);
  if (found == generations_.end()) return;
  for (const Ticket ticket : found->second->tickets) loop_.cancel(ticket);
  finish(*found->second, "cancelled");
}

void Api::deliver(std::vector<Delivery> deliveries) {
  std::vector<std::uint64_t> touched;
  for (Delivery& delivery : deliveries) {
    const std::uint64_t number = number_of(delivery.ticket);
    const auto found = generations_.find(number);
    if (found == generations_.end()) continue;
    if (delivery.refused || (delivery.event.finish == engine::FinishReason::error)) {
      fail(number, error_of(delivery));
      continue;
    }
    guarded(number, [&] { take_event(*found->second, delivery); });
    if (touched.empty() || touched.back() != number) touched.push_back(number);
  }
  for (const std::uint64_t number : touched) {
    const auto found = generations_.find(number);
    if (found != generations_.end()) guarded(number, [&] { flush(*found->second); });
  }
}

/// What goes wrong for one request (no memory) ends that one.
void Api::guarded(std::uint64_t number, const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    fail(number, {500, "server_error", error.what()});
  }
}

void Api::take_event(Generation& generation, Delivery& delivery) {
  const std::size_t prompt = prompt_of(delivery.ticket);
  const auto samples = static_cast<std::size_t>(generation.answer->settings().num_samples);
  if (delivery.event.token >= 0) {
    observe(generation, prompt * samples + static_cast<std::size_t>(delivery.event.sample));
  }
  generation.answer->add(prompt, std::move(delivery.event), generation.out);
}

void Api::observe(Generation& generation, std::size_t choice) {
  const Clock::time_point now = Clock::now();
  Clock::time_point& last = generation.last_token.at(choice);
  const auto seconds = [](Clock::duration duration) { return std::chrono::duration<double>(duration).count(); };
  if (last == Clock::time_point{}) {
    metrics_.on_first_token(seconds(now - generation.begin));
  } else {
    metrics_.on_token_gap(seconds(now - last));
  }
  last = now;
}

/// Sends what a step has brought.
void Api::flush(Generation& generation) {
  const Answer& answer = *generation.answer;
  if (generation.streaming) {
    if (answer.complete()) answer.end_stream(generation.out);
    if (!generation.begun) {
      generation.begun = true;
      metrics_.on_response(200);
      generation.exchange->begin_stream("text/event-stream; charset=utf-8");
    }
    if (!generation.out.empty() && !generation.exchange->write(generation.out)) return give_up(generation.number);
    generation.out.clear();
    if (answer.complete()) generation.exchange->end_stream();
  } else if (answer.complete()) {
    respond(generation.exchange, HttpResponse{200, answer.body()});
  }
  if (answer.complete()) finish(generation, answer.outcome());
}

/// Forgets a generation, whose answer has been given or is not wanted any more.
void Api::finish(Generation& generation, std::string_view outcome) {
  const double seconds = std::chrono::duration<double>(Clock::now() - generation.begin).count();
  metrics_.on_request_end(name_of(generation.endpoint), outcome, seconds);
  const Usage usage = generation.answer ? generation.answer->usage() : Usage{};
  log_.info("request", {{"id", id_of(ticket_of(generation.number, generation.endpoint, 0))},
                        {"endpoint", std::string(name_of(generation.endpoint))},
                        {"outcome", std::string(outcome)},
                        {"prompt_tokens", usage.prompt_tokens},
                        {"cached_tokens", usage.cached_tokens},
                        {"completion_tokens", usage.completion_tokens},
                        {"seconds", seconds}});
  generations_.erase(generation.number);
}

}  // namespace headwater::server
