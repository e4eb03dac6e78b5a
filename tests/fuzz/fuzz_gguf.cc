// GGUF files: whatever the bytes are, reading them, dequantising the start of every tensor and building the tokenizer
// either works or is refused; views never leave the file.
#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "engine/dequant.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"
#include "fuzz/bytes.h"
#include "fuzz/refuse.h"

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
    const engine::Tokenizer tokenizer(gguf);
    (void)tokenizer.decode(tokenizer.encode("Hello, world 123\n", engine::Specials::recognise));
  });
  return 0;
}
