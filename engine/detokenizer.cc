#include "engine/detokenizer.h"

#include "engine/utf8.h"

namespace headwater::engine {
namespace {
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  std::size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Step step = next_utf8(std::string_view(pending_).substr(at));
    if (step.kind == Utf8Step::incomplete) break;
    if (step.kind == Utf8Step::valid) {
      out.append(pending_, at, step.length);
    } else {
      out += kReplacement;
    }
    at += step.length;
  }
  pending_.erase(0, at);
  return out;
}

std::string Utf8Stream::finish() {
  const bool cut = !pending_.empty();
  pending_.clear();
  return cut ? std::string(kReplacement) : std::string();
}

std::string Detokenizer::push(TokenId token) {
  if (!show_specials_ && tokenizer_->is_special(token)) return {};
  return utf8_.push(tokenizer_->bytes_of(token));
}

}  // namespace headwater::engine
