// A server started by this process: a shell's command in a process group of its own, its output kept for messages,
// ended when the object dies.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

namespace headwater::serving {

/// A TCP port that nobody on this machine listens on.
[[nodiscard]] int free_port();
/// Path of the running program.
[[nodiscard]] std::string own_program();

class Child {
 public:
  /// Runs `sh -c "exec COMMAND"`.
  explicit Child(const std::string& command);
  /// SIGTERM, ten seconds, SIGKILL.
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// False once it has ended.
  [[nodiscard]] bool running();
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// The last lines that it wrote to standard output and error.
  [[nodiscard]] std::string last_output() const;

 private:
  pid_t pid_ = -1;
  int log_ = -1;
  bool ended_ = false;
  std::string command_;
};

}  // namespace headwater::serving
