// From a request's body to work for the engine: parse, tokenise, check against the model. Pure but for the model, which
// is only read; any thread may do it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/chat_template.h"
#include "engine/model.h"
#include "server/openai.h"

namespace headwater::server {

/// The model that is served.
struct ServedModel {
  std::string name;
  std::shared_ptr<const engine::Model> model;
  std::optional<engine::ChatTemplate> chat;  ///< empty: chat is refused
  std::string system;                        ///< put before conversations that do not begin with a system message
  std::int64_t kv_tokens = 0;                ///< that the whole KV cache holds; 0: as many as the context

  /// Tokens that a prompt and its answer may have together: the context's, or those of the cache and one more, since
  /// nobody looks back at the last.
  [[nodiscard]] std::int64_t max_tokens() const;
};

struct PreparedRequest {
  GenerationRequest request;  ///< its prompts and messages have been moved out of
  std::vector<std::vector<std::int32_t>> prompts;
  std::vector<engine::Request> work;  ///< one for each prompt, the prompt's tokens included
};

/// Throws ApiError.
[[nodiscard]] PreparedRequest prepare_generation(Endpoint endpoint, std::string_view body, const ParseLimits& limits,
                                                 const ServedModel& served);
/// Bodies of POST /tokenize and /detokenize; the answers' JSON. Throw ApiError.
[[nodiscard]] std::string tokenize(std::string_view body, const ParseLimits& limits, const ServedModel& served);
[[nodiscard]] std::string detokenize(std::string_view body, const ServedModel& served);

}  // namespace headwater::server
