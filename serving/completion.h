// One streamed completion: the body of the request, and the reader of the events that answer it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serving/record.h"
#include "serving/sse.h"

namespace headwater::serving {

/// A prompt in the form that it is sent in.
struct Prompt {
  std::vector<std::int32_t> tokens;  ///< where the server takes these; else empty, and:
  std::string shared;                ///< text that several requests have in common; chat: the system message
  std::string own;                   ///< text of this request alone; chat: the user message
};

struct RequestOptions {
  std::string model;
  bool chat = false;       ///< /v1/chat/completions, else /v1/completions
  bool ignore_eos = true;  ///< ask for all of max_tokens (vLLM's extension; others ignore the field)
  double temperature = 0;
};

[[nodiscard]] std::string completion_path(const RequestOptions& options);
/// The JSON body of a streamed request, usage included.
[[nodiscard]] std::string completion_body(const RequestOptions& options, const Prompt& prompt, std::int64_t max_tokens);

/// Takes the answer's status and bytes as they come and fills a Record. A request is ok if its status was 200, it
/// carried text or tokens, it ended with [DONE], and no event was an error.
class CompletionReader {
 public:
  void on_status(int status) { status_ = status; }
  /// `now`: when these bytes came.
  void on_body(std::string_view bytes, double now);
  /// `transport_error`: empty if the answer is complete. The record is final.
  void on_end(const std::string& transport_error, double now);

  Record record;

 private:
  void on_event(std::string_view data, double now);

  SseParser parser_;
  int status_ = 0;
  bool done_ = false;
  std::string refusal_;  ///< the beginning of a body that is no stream
};

}  // namespace headwater::serving
