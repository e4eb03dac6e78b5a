// The command under a user's hands: Ctrl-C once and twice, SIGTERM, the progress bar on a terminal.
#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "command_fixture.h"

namespace headwater::test {
namespace {

class Terminal : public Command {
 protected:
  /// Starts the command with both outputs in the file `out`, input from `input` (a descriptor, or -1: /dev/null).
  [[nodiscard]] pid_t start(std::vector<std::string> words, int input = -1) const {
    words.insert(words.begin(), HEADWATER_CLI);
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      const int file = open(path("out").c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
      dup2(input < 0 ? open("/dev/null", O_RDONLY) : input, STDIN_FILENO);
      dup2(file, STDOUT_FILENO);
      dup2(file, STDERR_FILENO);
      execv(HEADWATER_CLI, arguments.data());
      _exit(99);
    }
    return child;
  }

  [[nodiscard]] std::vector<std::string> long_run() const {
    return {"generate",     "--model",   tiny_model(), "--max-tokens", "900", "--parallel", "64",
            "--ignore-eos", "--threads", "1",          "hello"};
  }

  static bool wait_until(const std::function<bool()>& condition) {
    for (int i = 0; i < 1200; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }

  /// A child's handlers stand (bit 1 of the caught signals: SIGINT), and it sleeps.
  static bool waits(pid_t child) {
    const std::string folder = "/proc/" + std::to_string(child);
    const std::string status = slurp(folder + "/status");
    const std::size_t at = status.find("SigCgt:\t");
    return at != std::string::npos && (std::stoull(status.substr(at + 8, 16), nullptr, 16) & 2U) != 0 &&
           status.find("State:\tS") != std::string::npos;
  }

  /// The exit code of a child; 1000 + signal if a signal ended it.
  static int code_of(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
};

TEST_F(Terminal, InterruptAndTerminationStopCleanly) {
  for (const int signal : {SIGINT, SIGTERM}) {
    std::filesystem::remove(path("out"));
    const pid_t child = start(long_run());
    ASSERT_GT(child, 0);
    // Once the run is under way: the launch has been announced.
    EXPECT_TRUE(wait_until([&] { return slurp(path("out")).find("launch (batch") != std::string::npos; }));
    kill(child, signal);
    EXPECT_EQ(code_of(child), 130) << slurp(path("out"));
    EXPECT_NE(slurp(path("out")).find("headwater: interrupted"), std::string::npos) << signal;
  }
}

TEST_F(Terminal, InterruptEndsTheWaitForAPrompt) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = start({"generate", "--model", tiny_model()}, ends[0]);
  ASSERT_GT(child, 0);
  EXPECT_TRUE(wait_until([&] { return waits(child); }));
  kill(child, SIGINT);
  EXPECT_EQ(code_of(child), 130);
  EXPECT_EQ(slurp(path("out")), "headwater: interrupted\n");
  close(ends[0]);
  close(ends[1]);
}

TEST_F(Terminal, SecondInterruptEndsAtOnce) {
  // A program that waits for a file looks at nothing else, so that only the second interrupt can end it.
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  const int held_open = open(path("fifo").c_str(), O_RDWR | O_CLOEXEC);
  const pid_t child = start({"generate", "--model", tiny_model(), "--shared-file", path("fifo"), "hello"});
  ASSERT_GT(child, 0);
  EXPECT_TRUE(wait_until([&] { return waits(child); }));
  kill(child, SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "one interrupt only asks";
  kill(child, SIGINT);
  EXPECT_EQ(code_of(child), 130);
  EXPECT_EQ(slurp(path("out")), "") << "ended without a word";
  close(held_open);
}

/// What the command writes to a terminal, and its exit code.
std::pair<std::string, int> on_terminal(std::vector<std::string> words) {
  words.insert(words.begin(), HEADWATER_CLI);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    execv(HEADWATER_CLI, arguments.data());
    _exit(99);
  }
  std::string text;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(terminal, buffer, sizeof(buffer))) > 0;) text.append(buffer, static_cast<size_t>(n));
  int status = 0;
  waitpid(child, &status, 0);
  close(terminal);
  return {text, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

TEST_F(Terminal, ProgressBarOnATerminalOnly) {
  const std::vector<std::string> words = {"generate", "--threads",    "1",       "--parallel", "2",    "--max-tokens",
                                          "20",       "--ignore-eos", "--model", tiny_model(), "hello"};
  const auto [text, code] = on_terminal(words);
  EXPECT_EQ(code, 0) << text;
  EXPECT_NE(text.find("% loading tiny.gguf"), std::string::npos) << text;
  EXPECT_NE(text.find("\r\x1b[K["), std::string::npos) << text;

  std::vector<std::string> quiet = words;
  quiet.emplace_back("--quiet");
  EXPECT_EQ(on_terminal(quiet).first.find("\r\x1b[K["), std::string::npos);

  const pid_t child = start(words);
  EXPECT_EQ(code_of(child), 0);
  EXPECT_EQ(slurp(path("out")).find('\r'), std::string::npos) << "no bar without a terminal";
}

}  // namespace
}  // namespace headwater::test
