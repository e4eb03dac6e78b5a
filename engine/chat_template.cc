#include "engine/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/gguf.h"
#include "headwater/error.h"

namespace headwater::engine {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";
constexpr std::string_view kBegin = "<|begin_of_text|>";
constexpr std::string_view kHeader = "<|start_header_id|>";
constexpr std::string_view kHeaderEnd = "<|end_header_id|>";
constexpr std::string_view kTurnEnd = "<|eot_id|>";

std::vector<std::string_view> markers_of(ChatFormat format) {
  if (format == ChatFormat::chatml) return {kStart, kEnd};
  return {kBegin, kHeader, kHeaderEnd, kTurnEnd};
}

/// Of formats that share ChatML's markers but put this one, not a line break, after the role.
constexpr std::string_view kSeparator = "<|im_sep|>";

bool mentions_all_markers(std::string_view text, ChatFormat format) {
  if (text.find(kSeparator) != std::string_view::npos) return false;
  // The begin-of-text marker is often written as a variable.
  return std::ranges::all_of(markers_of(format), [&](std::string_view marker) {
    return marker == kBegin || text.find(marker) != std::string_view::npos;
  });
}

ChatFormat format_by_name(std::string_view name) {
  for (const ChatFormat format : {ChatFormat::chatml, ChatFormat::llama3}) {
    if (name == name_of(format)) return format;
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("chat template '{}' is unknown, expected chatml or llama3", name));
}

/// Templates that put a system message of their own first write it out: "<|im_start|>system\n" some text "<|im_end|>".
/// The text ends at the marker; if template code comes before it, the place is that of a given system message, and the
/// search goes on.
std::string find_default_system(std::string_view text) {
  for (std::size_t at = text.find(kStart); at != std::string_view::npos; at = text.find(kStart, at + 1)) {
    std::string_view rest = text.substr(at + kStart.size());
    if (!rest.starts_with("system")) continue;
    rest.remove_prefix(6);
    if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with("\n")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    const std::string_view message = rest.substr(0, rest.find(kEnd));
    if (!message.empty() && message.size() < rest.size() &&
        message.find_first_of("'\"{}\\") == std::string_view::npos) {
      return std::string(message);
    }
  }
  return {};
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n\r\f\v";
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

void check_role(std::string_view role, std::size_t index) {
  const auto allowed = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-'; };
  if (role.empty() || !std::ranges::all_of(role, allowed)) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("messages[{}].role is '{}', expected lower-case letters, digits, '_' and '-'", index, role));
  }
}

}  // namespace

std::string_view name_of(ChatFormat format) noexcept {
  return format == ChatFormat::chatml ? "chatml" : "llama3";
}

ChatTemplate::ChatTemplate(const Gguf& gguf, const Tokenizer& tokenizer, std::optional<std::string_view> forced) {
  constexpr std::string_view kKey = "tokenizer.chat_template";
  const std::string_view text = gguf.string(kKey, "");
  if (forced) {
    format_ = format_by_name(*forced);
  } else if (mentions_all_markers(text, ChatFormat::chatml)) {
    format_ = ChatFormat::chatml;
  } else if (mentions_all_markers(text, ChatFormat::llama3)) {
    format_ = ChatFormat::llama3;
  } else {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: {} {}, expected the markers of chatml or llama3; name one of them to force it",
                            gguf.name(), kKey, text.empty() ? "is missing" : "is in no known format"));
  }
  for (const std::string_view marker : markers_of(format_)) {
    if (!tokenizer.special(marker)) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: the vocabulary has no special token {}, which chat template {} needs", gguf.name(),
                              marker, name_of(format_)));
    }
  }
  if (format_ == ChatFormat::chatml) default_system_ = find_default_system(text);
}

std::vector<ChatTemplate::Segment> ChatTemplate::segments(std::span<const ChatMessage> messages,
                                                          bool add_generation_prompt) const {
  if (messages.empty()) throw Error(ErrorCode::invalid_argument, "messages is empty, expected at least one");
  std::vector<Segment> out;
  const auto marker = [&](std::string_view text) { out.push_back({true, std::string(text)}); };
  // Text between two markers is one segment: it is encoded as a whole, as a reader of the rendered text would.
  const auto plain = [&](std::string_view text) {
    if (out.empty() || out.back().marker) out.push_back({});
    out.back().text += text;
  };
  const auto open = [&](std::string_view role) {
    if (format_ == ChatFormat::chatml) {
      marker(kStart);
      plain(role);
      plain("\n");
    } else {
      marker(kHeader);
      plain(role);
      marker(kHeaderEnd);
      plain("\n\n");
    }
  };
  const auto close = [&] {
    marker(format_ == ChatFormat::chatml ? kEnd : kTurnEnd);
    if (format_ == ChatFormat::chatml) plain("\n");
  };

  if (format_ == ChatFormat::llama3) marker(kBegin);
  if (!default_system_.empty() && messages[0].role != "system") {
    open("system");
    plain(default_system_);
    close();
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    check_role(messages[i].role, i);
    open(messages[i].role);
    plain(format_ == ChatFormat::llama3 ? trimmed(messages[i].content) : std::string_view(messages[i].content));
    close();
  }
  if (add_generation_prompt) open("assistant");
  return out;
}

std::vector<TokenId> ChatTemplate::render(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                          bool add_generation_prompt) const {
  std::vector<TokenId> out;
  for (const Segment& segment : segments(messages, add_generation_prompt)) {
    if (!segment.marker) {
      tokenizer.encode_to(segment.text, Specials::as_text, out);
      continue;
    }
    const std::optional<TokenId> token = tokenizer.special(segment.text);
    if (!token) {
      throw Error(ErrorCode::invalid_argument,
                  "tokenizer has no special token " + segment.text + ", expected the constructor's");
    }
    out.push_back(*token);
  }
  return out;
}

std::string ChatTemplate::render_text(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  std::string out;
  for (const Segment& segment : segments(messages, add_generation_prompt)) out += segment.text;
  return out;
}

}  // namespace headwater::engine
