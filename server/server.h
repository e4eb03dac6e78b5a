// The server as a whole: HTTP on the calling thread, the engine on its own, a worker for what takes long, metrics and
// log beside them. Starts to listen at once; what needs the model is answered 503 until it is there.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "server/engine_loop.h"
#include "server/http.h"
#include "server/log.h"
#include "server/openai.h"
#include "server/prepare.h"

namespace headwater::server {

struct ServerOptions {
  HttpOptions http;
  EngineLoopOptions loop;
  ParseLimits limits;
  std::string api_key;                              ///< empty: anybody may ask
  std::chrono::milliseconds drain_timeout{60'000};  ///< from the first signal; then what is left is ended
  std::chrono::milliseconds stop_timeout{5'000};    ///< then for the step or the task under way to end
  std::string cascade_off;  ///< why shared spans are not split, if so: told once in the log and in /metrics
};

/// What is loaded while the server already listens.
struct Loaded {
  ServedModel served;
  engine::EngineOptions engine;
};

class Server {
 public:
  using Load = std::function<Loaded()>;

  /// Binds and listens; throws Error(io), or (invalid_argument) where the host is empty or no header can carry the key.
  /// `load` runs on the engine's thread once run() is called.
  Server(ServerOptions options, Load load, std::shared_ptr<Log> log);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  [[nodiscard]] std::uint16_t port() const noexcept;
  [[nodiscard]] std::string address() const;

  enum class Ended : std::uint8_t {
    drained,  ///< nothing was cut off
    stopped,  ///< what was under way was
    stuck,    ///< so it was, and a thread has not ended within stop_timeout: this object's destructor waits for it
  };
  /// Serves until it is shut down. Rethrows what `load` threw. `handle_signals`: SIGINT, SIGTERM and SIGHUP call
  /// shut_down; from then on until this object dies they do not end the process themselves.
  Ended run(bool handle_signals);
  /// The first call: no new requests, those under way are finished, then run() returns. The second: at once. Any
  /// thread.
  void shut_down();
  /// Between two steps of the engine; any thread. For tests.
  [[nodiscard]] bool inspect(std::function<void(const engine::Engine&)> question);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headwater::server
