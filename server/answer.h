// The answer to one generation request: events of the engine in, OpenAI's JSON out, as one object or as chunks of a
// stream. Pure: no sockets, no clock. Text is written out as it arrives, not kept as a tree.
//
// Log probabilities spell the tokens, so they are held back exactly as the text is: what may still become part of a
// stop string is not told before it is decided, and a token that a stop string touches is never told.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "engine/detokenizer.h"
#include "engine/request.h"
#include "engine/tokenizer.h"
#include "server/openai.h"

namespace headwater::server {

struct AnswerSettings {
  std::string id;
  std::string model;
  std::int64_t created = 0;  ///< seconds since 1970
  Endpoint endpoint = Endpoint::chat;
  int num_samples = 1;  ///< of each prompt
  bool stream = false;
  bool include_usage = false;
  bool echo = false;
  bool logprobs = false;
  bool prompt_only = false;  ///< max_tokens = 0: what is generated is not told
};

struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t completion_tokens = 0;
  std::int64_t cached_tokens = 0;
};

class Answer {
 public:
  /// One list of tokens per prompt; with echo their text begins the choices. The tokenizer must outlive the answer.
  Answer(AnswerSettings settings, std::vector<std::vector<std::int32_t>> prompts, const engine::Tokenizer& tokenizer);

  /// An event of a prompt's request. A streamed answer appends chunks to `out`.
  void add(std::size_t prompt, engine::Event&& event, std::string& out);
  /// Every choice has ended.
  [[nodiscard]] bool complete() const noexcept { return num_open_ == 0; }
  /// "length" where a choice ended so, else "stop".
  [[nodiscard]] std::string_view outcome() const noexcept;
  [[nodiscard]] const Usage& usage() const noexcept { return usage_; }
  [[nodiscard]] const AnswerSettings& settings() const noexcept { return settings_; }
  /// Ends a stream: the usage, if wanted, and [DONE].
  void end_stream(std::string& out) const;
  /// The whole object.
  [[nodiscard]] std::string body() const;

 private:
  /// What is told of one token.
  struct Told {
    engine::PlaceLogprobs logprobs;
    bool first = false;    ///< the prompt's first token: nothing predicts it
    bool special = false;  ///< it spells nothing in the text
    std::size_t end = 0;   ///< bytes of the choice's text that the tokens so far spell
  };
  struct Choice {
    explicit Choice(const engine::Tokenizer& tokenizer) : detokenizer(tokenizer) {}
    std::string text;            ///< not streamed: everything; streamed: empty
    std::string logprobs;        ///< JSON entries; chat: content; completions: tokens
    std::string token_logprobs;  ///< completions: the other three arrays
    std::string top_logprobs;
    std::string text_offset;
    std::int64_t offset = 0;  ///< characters of tokens told
    std::deque<Told> held;    ///< told of tokens whose text may not be shown yet
    engine::Detokenizer detokenizer;
    std::size_t spelled = 0;  ///< bytes of text that it has given: U+FFFD is longer than the byte it stands for
    bool begun = false;
    std::string finish;  ///< JSON string; empty: open
  };

  void begin(std::size_t prompt, Choice& choice, engine::Event& event);
  void hold(Choice& choice, engine::PlaceLogprobs&& logprobs) const;
  void release(Choice& choice, std::size_t keep_bytes) const;
  void tell(Choice& choice, const Told& told) const;
  void append_logprobs(const Choice& choice, std::string& out) const;
  void stream_choice(std::size_t index, Choice& choice, std::string_view text, bool first, std::string& out) const;

  AnswerSettings settings_;
  std::vector<std::vector<std::int32_t>> prompts_;
  std::vector<std::vector<engine::PlaceLogprobs>> prompt_places_;  ///< of each prompt, from its first token on
  const engine::Tokenizer* tokenizer_;
  std::vector<Choice> choices_;
  std::size_t num_open_;
  Usage usage_;
  std::string head_;  ///< of every chunk and of the body: id, object, created, model
};

}  // namespace headwater::server
