// See answer.h.
#include "server/answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/utf8.h"
#include "headwater/version.h"
#include "server/json_text.h"
#include "server/sse.h"

namespace headwater::server {
namespace {

using engine::TokenLogprob;

/// JSON knows no infinity; OpenAI writes this for what cannot happen.
std::string logprob_text(float logprob) {
  return std::isfinite(logprob) ? fmt::format("{}", logprob) : "-9999.0";
}

/// The token's text; bytes that are no text by themselves are spelled, so that two tokens never look alike.
std::string token_name(std::string_view bytes) {
  if (engine::valid_utf8_prefix(bytes) == bytes.size()) return std::string(bytes);
  std::string name = "bytes:";
  for (const char byte : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return name;
}

std::int64_t num_characters(std::string_view text) {
  return std::ranges::count_if(text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; });
}

/// {"token", "logprob", "bytes"} without the closing brace.
void append_chat_token(std::string& out, std::string_view bytes, float logprob) {
  out += "{\"token\":";
  append_json_string(out, token_name(bytes));
  out += ",\"logprob\":" + logprob_text(logprob) + ",\"bytes\":[";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(static_cast<unsigned char>(bytes[i]));
  }
  out += ']';
}

void append_separated(std::string& list, std::string_view entry) {
  if (!list.empty()) list += ',';
  list += entry;
}

std::string usage_json(const Usage& usage) {
  return fmt::format(
      "{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{},\"prompt_tokens_details\":{{"
      "\"cached_tokens\":{}}}}}",
      usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens, usage.cached_tokens);
}

std::string_view object_of(const AnswerSettings& settings) {
  if (settings.endpoint == Endpoint::completions) return "text_completion";
  return settings.stream ? "chat.completion.chunk" : "chat.completion";
}

}  // namespace

Answer::Answer(AnswerSettings settings, std::vector<std::vector<std::int32_t>> prompts,
               const engine::Tokenizer& tokenizer)
    : settings_(std::move(settings)),
      prompts_(std::move(prompts)),
      prompt_places_(prompts_.size()),
      tokenizer_(&tokenizer),
      choices_(prompts_.size() * static_cast<std::size_t>(settings_.num_samples), Choice(tokenizer)),
      num_open_(choices_.size()) {
  for (const auto& prompt : prompts_) usage_.prompt_tokens += static_cast<std::int64_t>(prompt.size());
  head_ = "{\"id\":" + json_string(settings_.id) + ",\"object\":" + json_string(object_of(settings_)) +
          ",\"created\":" + std::to_string(settings_.created) + ",\"model\":" + json_string(settings_.model) +
          ",\"system_fingerprint\":" + json_string(std::string("headwater-") + version()) + ",\"choices\":[";
}

void Answer::add(std::size_t prompt, engine::Event&& event, std::string& out) {
  const std::size_t index =
      prompt * static_cast<std::size_t>(settings_.num_samples) + static_cast<std::size_t>(event.sample);
  Choice& choice = choices_.at(index);
  if (!choice.finish.empty()) return;
  const bool first = !choice.begun;
  std::string text = settings_.prompt_only ? std::string() : std::move(event.text);
  if (first) {
    begin(prompt, choice, event);
    if (settings_.echo) text.insert(0, tokenizer_->decode(prompts_[prompt]));
  }
  if (event.token >= 0 && !settings_.prompt_only) ++usage_.completion_tokens;
  // The token that ends an answer is not part of it.
  const bool end_token = event.finish && event.token >= 0 && tokenizer_->is_special(event.token);
  if (event.logprobs && settings_.logprobs && !settings_.prompt_only && !end_token) {
    hold(choice, std::move(*event.logprobs));
  }
  if (event.finish) choice.spelled += choice.detokenizer.finish().size();
  release(choice, event.held_bytes);
  if (event.finish) {
    choice.held.clear();
    choice.finish = event.finish == engine::FinishReason::length || settings_.prompt_only ? "\"length\"" : "\"stop\"";
    --num_open_;
  }
  if (settings_.stream) {
    stream_choice(index, choice, text, first, out);
  } else {
    choice.text += text;
  }
}

std::string_view Answer::outcome() const noexcept {
  const bool cut = std::ranges::any_of(choices_, [](const Choice& choice) { return choice.finish == "\"length\""; });
  return cut ? "length" : "stop";
}

void Answer::begin(std::size_t prompt, Choice& choice, engine::Event& event) {
  choice.begun = true;
  if (event.sample == 0) usage_.cached_tokens += event.cached_tokens;
  if (!settings_.echo || !settings_.logprobs) return;
  // They come with the first sample's first token, which is the first event of its prompt.
  if (event.sample == 0) prompt_places_[prompt] = std::move(event.prompt_logprobs);
  const std::vector<std::int32_t>& tokens = prompts_[prompt];
  Told none;
  none.first = true;
  none.logprobs.chosen.token = tokens.front();
  tell(choice, none);
  for (const engine::PlaceLogprobs& place : prompt_places_[prompt]) tell(choice, {place});
}

void Answer::hold(Choice& choice, engine::PlaceLogprobs&& logprobs) const {
  const std::int32_t token = logprobs.chosen.token;
  choice.spelled += choice.detokenizer.push(token).size();
  const std::size_t end = choice.spelled + choice.detokenizer.held();
  choice.held.push_back({std::move(logprobs), false, tokenizer_->is_special(token), end});
}

/// Tells of all tokens but those that spell the last `keep_bytes` bytes.
void Answer::release(Choice& choice, std::size_t keep_bytes) const {
  const std::size_t all = choice.spelled + choice.detokenizer.held();
  while (!choice.held.empty() && choice.held.front().end + keep_bytes <= all) {
    tell(choice, choice.held.front());
    choice.held.pop_front();
  }
}

void Answer::tell(Choice& choice, const Told& told) const {
  const TokenLogprob& chosen = told.logprobs.chosen;
  const std::string_view bytes = tokenizer_->bytes_of(chosen.token);
  if (settings_.endpoint == Endpoint::chat) {
    std::string entry;
    append_chat_token(entry, bytes, chosen.logprob);
    entry += ",\"top_logprobs\":[";
    for (std::size_t i = 0; i < told.logprobs.top.size(); ++i) {
      if (i > 0) entry += ',';
      append_chat_token(entry, tokenizer_->bytes_of(told.logprobs.top[i].token), told.logprobs.top[i].logprob);
      entry += '}';
    }
    append_separated(choice.logprobs, entry + "]}");
    return;
  }
  append_separated(choice.logprobs, json_string(token_name(bytes)));
  append_separated(choice.token_logprobs, told.first ? "null" : logprob_text(chosen.logprob));
  std::string top;
  bool chosen_told = false;
  for (const TokenLogprob& other : told.logprobs.top) {
    append_separated(top,
                     json_string(token_name(tokenizer_->bytes_of(other.token))) + ":" + logprob_text(other.logprob));
    chosen_told = chosen_told || other.token == chosen.token;
  }
  if (!chosen_told) append_separated(top, json_string(token_name(bytes)) + ":" + logprob_text(chosen.logprob));
  append_separated(choice.top_logprobs, told.first ? "null" : "{" + top + "}");
  append_separated(choice.text_offset, std::to_string(choice.offset));
  if (!told.special) choice.offset += num_characters(bytes);
}

/// The value of a choice's "logprobs".
void Answer::append_logprobs(const Choice& choice, std::string& out) const {
  if (!settings_.logprobs) {
    out += "null";
    return;
  }
  if (settings_.endpoint == Endpoint::chat) {
    out += "{\"content\":[" + choice.logprobs + "],\"refusal\":null}";
  } else {
    out += "{\"tokens\":[" + choice.logprobs + "],\"token_logprobs\":[" + choice.token_logprobs +
           "],\"top_logprobs\":[" + choice.top_logprobs + "],\"text_offset\":[" + choice.text_offset + "]}";
  }
}

void Answer::stream_choice(std::size_t index, Choice& choice, std::string_view text, bool first,
                           std::string& out) const {
  const bool chat = settings_.endpoint == Endpoint::chat;
  const std::string number = std::to_string(index);
  const auto chunk = [&](std::string_view middle, bool tell, std::string_view finish) {
    std::string data = head_ + "{\"index\":" + number + ",";
    data += middle;
    data += ",\"logprobs\":";
    if (tell && !choice.logprobs.empty()) {
      append_logprobs(choice, data);
      for (std::string* list : {&choice.logprobs, &choice.token_logprobs, &choice.top_logprobs, &choice.text_offset}) {
        list->clear();
      }
    } else {
      data += "null";
    }
    data += ",\"finish_reason\":";
    data += finish;
    data += settings_.include_usage ? "}],\"usage\":null}" : "}]}";
    append_event(out, data);
  };
  if (chat && first) chunk("\"delta\":{\"role\":\"assistant\",\"content\":\"\"}", false, "null");
  const bool has_end = !choice.finish.empty();
  if (!text.empty() || !choice.logprobs.empty()) {
    const std::string content = json_string(text);
    if (chat) {
      chunk("\"delta\":{\"content\":" + content + "}", true, "null");
    } else {
      chunk("\"text\":" + content, true, has_end ? std::string_view(choice.finish) : "null");
      return;
    }
  }
  if (has_end) chunk(chat ? "\"delta\":{}" : "\"text\":\"\"", false, choice.finish);
}

void Answer::end_stream(std::string& out) const {
  if (settings_.include_usage) {
    append_event(out, head_ + "],\"usage\":" + usage_json(usage_) + "}");
  }
  append_event(out, kDone);
}

std::string Answer::body() const {
  std::string out = head_;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    if (i > 0) out += ',';
    out += "{\"index\":" + std::to_string(i);
    if (settings_.endpoint == Endpoint::chat) {
      out += ",\"message\":{\"role\":\"assistant\",\"content\":" + json_string(choice.text) + ",\"refusal\":null}";
    } else {
      out += ",\"text\":" + json_string(choice.text);
    }
    out += ",\"logprobs\":";
    append_logprobs(choice, out);
    out += ",\"finish_reason\":" + choice.finish + "}";
  }
  return out + "],\"usage\":" + usage_json(usage_) + "}";
}

}  // namespace headwater::server
