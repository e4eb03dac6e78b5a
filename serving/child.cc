// See child.h.
#include "serving/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "headwater/error.h"

namespace headwater::serving {
namespace {

constexpr off_t kTail = 2000;

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::io, fmt::format("{}: {}", what, std::strerror(errno)));
}

}  // namespace

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) fail("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const bool ok = bind(fd, generic, size) == 0 && getsockname(fd, generic, &size) == 0;
  close(fd);
  if (!ok) fail("a free port");
  return ntohs(address.sin_port);
}

std::string own_program() {
  std::error_code error;
  std::string path = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (error)
    throw Error(ErrorCode::unsupported, "--pair: name a command (this system does not say where the program is)");
  return path;
}

Child::Child(const std::string& command) : command_(command) {
  std::string name = (std::filesystem::temp_directory_path() / "headwater-server-XXXXXX").string();
  log_ = mkostemp(name.data(), O_CLOEXEC | O_APPEND);
  if (log_ < 0) fail(name);
  unlink(name.c_str());
  const std::string line = "exec " + command;
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) {
    close(log_);
    fail("fork");
  }
  if (pid_ == 0) {
    setpgid(0, 0);  // Ctrl-C is ours; we end it
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(127);
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(log_, STDOUT_FILENO);
    dup2(log_, STDERR_FILENO);
    execl("/bin/sh", "sh", "-c", line.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
}

Child::~Child() {
  if (running()) {
    kill(pid_, SIGTERM);
    for (int i = 0; i < 200 && running(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (running()) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  close(log_);
}

bool Child::running() {
  if (!ended_ && waitpid(pid_, nullptr, WNOHANG) == pid_) ended_ = true;
  return !ended_;
}

std::string Child::last_output() const {
  struct stat about {};
  if (fstat(log_, &about) != 0) return "";
  const off_t from = std::max<off_t>(about.st_size - kTail, 0);
  std::string text(static_cast<std::size_t>(about.st_size - from), '\0');
  const ssize_t got = pread(log_, text.data(), text.size(), from);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace headwater::serving
