// Text of any bytes through a byte-level tokenizer: ids stay inside the vocabulary, and decoding gives the text back.
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/gguf.h"
#include "engine/tokenizer.h"
#include "fuzz/bytes.h"
#include "fuzz/refuse.h"
#include "support/tiny_gguf.h"

namespace {

using namespace headwater;

/// One small tokenizer for each known way of cutting text.
const std::vector<engine::Tokenizer>& tokenizers() {
  static std::vector<std::vector<std::byte>> files;
  static const std::vector<engine::Tokenizer> all = [] {
    std::vector<engine::Tokenizer> made;
    for (const char* name : {"smollm", "gpt-2", "llama-bpe", "qwen2"}) {
      test::TinyModel model;
      model.pre_tokenizer = name;
      test::GgufWriter writer;
      writer.string("general.architecture", "llama");
      test::add_tokenizer(writer, model);
      files.push_back(writer.bytes());
      made.emplace_back(engine::Gguf::from_bytes(files.back()));
    }
    return made;
  }();
  return all;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes in(data, size);
  const std::string_view text = in.rest();
  for (const engine::Tokenizer& tokenizer : tokenizers()) {
    for (const auto specials : {engine::Specials::as_text, engine::Specials::recognise}) {
      const std::vector<engine::TokenId> ids = tokenizer.encode(text, specials);
      for (const engine::TokenId id : ids) {
        if (id < 0 || static_cast<std::size_t>(id) >= tokenizer.vocab_size()) std::abort();
        if (specials == engine::Specials::as_text && tokenizer.is_special(id)) std::abort();
      }
      if (tokenizer.decode(ids) != text) std::abort();
    }
  }
  return 0;
}
