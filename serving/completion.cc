// See completion.h.
#include "serving/completion.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace headwater::serving {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxRefusal = 4096;

/// The message of an error body in OpenAI's shape, or of any body; short and on one line.
std::string message_of(const std::string& body) {
  const json value = json::parse(body, nullptr, false);
  std::string text = body;
  if (value.is_object() && value.contains("error")) {
    const json& error = value["error"];
    if (error.is_string()) text = error.get<std::string>();
    if (error.is_object() && error.contains("message") && error["message"].is_string()) text = error["message"];
  } else if (value.is_object() && value.contains("message") && value["message"].is_string()) {
    text = value["message"];
  }
  if (text.size() > 300) text = text.substr(0, 300) + "..";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  return text;
}

std::int64_t integer_at(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<std::int64_t>() : -1;
}

/// The text that an event adds, in either endpoint's shape.
bool has_text(const json& choice) {
  const auto non_empty = [](const json& object, const char* key) {
    const auto found = object.find(key);
    return found != object.end() && found->is_string() && !found->get_ref<const std::string&>().empty();
  };
  if (!choice.is_object()) return false;
  if (non_empty(choice, "text")) return true;
  const auto delta = choice.find("delta");
  return delta != choice.end() && delta->is_object() &&
         (non_empty(*delta, "content") || non_empty(*delta, "reasoning_content"));
}

void read_usage(const json& usage, Record& record) {
  record.prompt_tokens = integer_at(usage, "prompt_tokens");
  record.completion_tokens = integer_at(usage, "completion_tokens");
  const auto details = usage.find("prompt_tokens_details");
  if (details != usage.end() && details->is_object()) record.cached_tokens = integer_at(*details, "cached_tokens");
}

}  // namespace

std::string completion_path(const RequestOptions& options) {
  return options.chat ? "/v1/chat/completions" : "/v1/completions";
}

std::string completion_body(const RequestOptions& options, const Prompt& prompt, std::int64_t max_tokens) {
  json body = {{"model", options.model},
               {"max_tokens", max_tokens},
               {"temperature", options.temperature},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}}};
  if (options.ignore_eos) body["ignore_eos"] = true;
  if (options.chat) {
    json messages = json::array();
    if (!prompt.shared.empty()) messages.push_back({{"role", "system"}, {"content", prompt.shared}});
    messages.push_back({{"role", "user"}, {"content", prompt.own}});
    body["messages"] = std::move(messages);
  } else if (!prompt.tokens.empty()) {
    body["prompt"] = prompt.tokens;
  } else {
    body["prompt"] = prompt.shared + prompt.own;
  }
  return body.dump();
}

void CompletionReader::on_body(std::string_view bytes, double now) {
  if (status_ != 200) {
    if (refusal_.size() < kMaxRefusal) refusal_ += bytes.substr(0, kMaxRefusal - refusal_.size());
    return;
  }
  parser_.feed(bytes, [&](std::string_view data) { on_event(data, now); });
}

void CompletionReader::on_event(std::string_view data, double now) {
  if (done_) return;
  if (data == "[DONE]") {
    done_ = true;
    return;
  }
  const json event = json::parse(data, nullptr, false);
  if (!event.is_object()) {
    record.error = fmt::format("an event that is not a JSON object: {}", data.substr(0, 100));
    return;
  }
  if (event.contains("error")) {
    record.error = "error in the stream: " + message_of(std::string(data));
    return;
  }
  if (const auto choices = event.find("choices"); choices != event.end() && choices->is_array()) {
    for (const json& choice : *choices) {
      if (!has_text(choice)) continue;
      record.arrivals.push_back(now);
      break;
    }
  }
  if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) read_usage(*usage, record);
}

void CompletionReader::on_end(const std::string& transport_error, double now) {
  record.end = now;
  if (record.completion_tokens < 0) {
    record.completion_tokens = static_cast<std::int64_t>(record.arrivals.size());
    record.counted_events = true;
  }
  if (status_ != 0 && status_ != 200) {
    record.error = fmt::format("status {}: {}", status_, message_of(refusal_));
  } else if (!transport_error.empty()) {
    record.error = transport_error;
  } else if (record.error.empty() && !done_) {
    record.error = "the stream ended without [DONE]";
  } else if (record.error.empty() && record.arrivals.empty()) {
    record.error = "an answer without text";
  }
}

}  // namespace headwater::serving
