// A server of OpenAI's shape that follows a script: delays, failures, how bytes are cut. One thread a connection.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace headwater::test {

struct FakeOptions {
  int port = 0;             ///< 0: any
  double first_s = 0;       ///< before the first token
  double gap_s = 0;         ///< before every later one
  bool tokenizer = true;    ///< POST /tokenize: a token a word, two for words of seven letters and more
  bool token_lists = true;  ///< else a list as prompt is 400
  bool usage = true;
  bool done = true;           ///< ends with [DONE]
  bool byte_by_byte = false;  ///< cuts the stream anywhere
  bool empty_first = false;   ///< the first event has no text, as a role has not
  int fail_every = 0;         ///< every n-th completion is 503
  int drop_after = -1;        ///< closes the connection after so many tokens
  int error_after = -1;       ///< an error event after so many tokens
  bool cascade = true;        ///< completions that run together are counted as cascade launches
  bool metrics = true;        ///< has GET /metrics
  std::string api_key;        ///< required as bearer token unless empty
  int not_ready = 0;          ///< so many GET /ready are 503
};

class FakeServer {
 public:
  explicit FakeServer(FakeOptions options);
  ~FakeServer();
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;

  [[nodiscard]] int port() const;
  [[nodiscard]] std::string url() const;
  /// Bodies of all completions so far, in order of arrival.
  [[nodiscard]] std::vector<nlohmann::json> completions() const;
  /// The most completions that were answered at once.
  [[nodiscard]] int most_at_once() const;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

/// Number of tokens that the fake tokenizer makes of a text.
[[nodiscard]] std::vector<std::int32_t> fake_tokens(const std::string& text);

}  // namespace headwater::test
