// Chat formats: how a conversation becomes tokens. Two are known, recognised by their markers in the file's template;
// the template itself (a program in another language) is not run. Markers are placed as token ids and everything a
// message says is encoded as plain text, so a message cannot forge a marker.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer.h"

namespace headwater::engine {

struct ChatMessage {
  std::string role;  ///< "system", "user", "assistant", "tool", ...: lower-case letters, digits, '_' and '-'
  std::string content;
};

enum class ChatFormat : std::uint8_t {
  chatml,  ///< <|im_start|>role\ncontent<|im_end|>\n
  llama3,  ///< <|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>
};

/// "chatml", "llama3".
[[nodiscard]] std::string_view name_of(ChatFormat format) noexcept;

class ChatTemplate {
 public:
  /// Reads tokenizer.chat_template; `forced` ("chatml", "llama3") overrides what it says. Throws Error (unsupported)
  /// when the template is missing or not recognised and none is forced, or when the vocabulary lacks a marker;
  /// (invalid_argument) for a forced name that is unknown. The tokenizer is only read here.
  ChatTemplate(const Gguf& gguf, const Tokenizer& tokenizer, std::optional<std::string_view> forced = {});

  [[nodiscard]] ChatFormat format() const noexcept { return format_; }
  /// The system message that is put first when a conversation does not begin with one, as the file's template does;
  /// empty: none.
  [[nodiscard]] const std::string& default_system() const noexcept { return default_system_; }

  /// Tokens of a conversation; with `add_generation_prompt`, ready for the assistant's answer. `tokenizer` is the one
  /// given to the constructor.
  [[nodiscard]] std::vector<TokenId> render(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                            bool add_generation_prompt) const;
  /// The same as text, for people to read; only render() keeps markers apart from text that looks like them.
  [[nodiscard]] std::string render_text(std::span<const ChatMessage> messages, bool add_generation_prompt) const;

 private:
  /// Either a marker (a special token's text) or plain text.
  struct Segment {
    bool marker = false;
    std::string text;
  };
  [[nodiscard]] std::vector<Segment> segments(std::span<const ChatMessage> messages, bool add_generation_prompt) const;

  ChatFormat format_ = ChatFormat::chatml;
  std::string default_system_;
};

}  // namespace headwater::engine
