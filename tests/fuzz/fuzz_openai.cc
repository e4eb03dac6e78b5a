// Bodies of the server's requests: what is accepted must be within its limits, and what is refused must be told in
// OpenAI's shape, as valid JSON whatever the bytes were.
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "fuzz/bytes.h"
#include "server/openai.h"

namespace {

using namespace headwater::server;

template <class Parse>
void accepts(Parse parse) {
  try {
    parse();
  } catch (const ApiError& error) {
    if (error.status != 400 || error.message.empty()) std::abort();
    const nlohmann::json shape = nlohmann::json::parse(error_json(error));
    if (!shape.at("error").at("message").is_string()) std::abort();
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  headwater::fuzz::Bytes in(data, size);
  const std::string_view body = in.rest();
  const ParseLimits limits;
  for (const Endpoint endpoint : {Endpoint::chat, Endpoint::completions}) {
    accepts([&] {
      const GenerationRequest request = parse_generation(endpoint, body, limits);
      const headwater::engine::Request& engine = request.engine;
      headwater::engine::check_settings(engine);
      const bool chat = endpoint == Endpoint::chat;
      if (chat == request.messages.empty() || chat != request.prompts.empty()) std::abort();
      if (engine.num_samples > limits.max_choices || engine.stop.size() > 4 || engine.num_logprobs > 20) std::abort();
    });
  }
  accepts([&] { (void)parse_tokenize(body, limits); });
  accepts([&] { (void)parse_detokenize(body); });
  return 0;
}
