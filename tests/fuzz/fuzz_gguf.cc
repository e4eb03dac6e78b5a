// GGUF files: whatever the bytes are, reading them, dequantising the start of every tensor, reading the model's sizes
// and the chat format, and building the tokenizer either works or is refused; views never leave the file.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "engine/chat_template.h"
#include "engine/dequant.h"
#include "engine/gguf.h"
#include "engine/model_config.h"
#include "engine/tokenizer.h"
#include "fuzz/bytes.h"
#include "fuzz/refuse.h"

namespace {

/// What read_model_config promises of every file that it accepts: sizes that the file really has.
void check_config(const headwater::engine::Gguf& gguf, const headwater::engine::ModelConfig& c) {
  const auto needed = static_cast<std::uint64_t>(c.num_layers) * 9 + 2;
  const auto width = static_cast<std::uint64_t>(c.qkv_width()) + 2 * static_cast<std::uint64_t>(c.ffn);
  std::uint64_t elements = 0;
  for (const headwater::engine::GgufTensor& tensor : gguf.tensors()) elements += tensor.num_elements;
  const bool positive = c.hidden > 0 && c.ffn > 0 && c.vocab > 0 && c.context > 0 && c.rope_dim > 0;
  const bool heads = c.kv_width() > 0 && c.num_qo_heads % c.num_kv_heads == 0 && c.head_dim % 16 == 0;
  if (!positive || !heads || gguf.tensors().size() < needed || elements < width) std::abort();
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headwater;
  // A copy of exactly the size: AddressSanitizer sees the first byte read beyond it.
  const std::unique_ptr<std::byte[]> copy(new std::byte[size]);
  if (size > 0) std::memcpy(copy.get(), data, size);
  fuzz::accepts([&] {
    const engine::Gguf gguf = engine::Gguf::from_bytes({copy.get(), size});
    for (const engine::GgufTensor& tensor : gguf.tensors()) {
      if (tensor.num_elements == 0 || tensor.shape[0] > (1U << 16)) continue;
      std::vector<float> row(tensor.shape[0]);
      fuzz::accepts([&] { engine::dequantize_rows(tensor, 0, 1, row); });
      const std::uint64_t rows = tensor.num_elements / tensor.shape[0];
      fuzz::accepts([&] { engine::dequantize_rows(tensor, rows - 1, 1, row); });
    }
    fuzz::accepts([&] { check_config(gguf, engine::read_model_config(gguf)); });
    const engine::Tokenizer tokenizer(gguf);
    fuzz::accepts([&] {
      const engine::ChatTemplate chat(gguf, tokenizer);
      (void)chat.render(tokenizer, std::vector<engine::ChatMessage>{{"user", "Hello"}}, true);
    });
    (void)tokenizer.decode(tokenizer.encode("Hello, world 123\n", engine::Specials::recognise));
  });
  return 0;
}
