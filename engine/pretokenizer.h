// Cuts text into words before byte-pair merging: no token ever crosses a word's border. The rules are regular
// expressions that belong to a model's training, named in its file; a wrong one gives other tokens without any error,
// so unknown names are refused.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct pcre2_real_code_8;

namespace headwater::engine {

class PreTokenizer {
 public:
  /// "smollm", "gpt-2", "llama-bpe" or "qwen2"; throws Error (unsupported) for others.
  explicit PreTokenizer(std::string_view name);

  /// Appends the words of `text`, in order; together they are the text. Bytes that are not valid UTF-8 are words of
  /// their own.
  void split(std::string_view text, std::vector<std::string_view>& words) const;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// A word that is a token as a whole is taken as such, without merging.
  [[nodiscard]] bool whole_words_first() const noexcept { return whole_words_first_; }

 private:
  struct FreeCode {
    void operator()(pcre2_real_code_8* code) const noexcept;
  };
  void split_valid(std::string_view text, std::vector<std::string_view>& words) const;

  std::string name_;
  bool whole_words_first_ = false;
  std::unique_ptr<pcre2_real_code_8, FreeCode> code_;
};

}  // namespace headwater::engine
