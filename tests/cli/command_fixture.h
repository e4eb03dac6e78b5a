// The command as a program: run with a shell's words in a folder of its own.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "support/tiny_gguf.h"

namespace headwater::test {

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

/// A folder of its own for every test.
class Command : public ::testing::Test {
 protected:
  struct Result {
    int code = -1;
    std::string out;
    std::string err;
  };

  Command() {
    std::string name = (std::filesystem::temp_directory_path() / "headwater-cli-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Command() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }

  /// Runs the command with `arguments` (a shell's words) and, before it, `variables` ("A=1 B=2"); an empty cache
  /// folder, so that no earlier calibration matters.
  Result run(const std::string& arguments, const std::string& input = "", const std::string& variables = "") const {
    const std::string line = "HEADWATER_CACHE='" + path("cache") + "' " + variables + " '" HEADWATER_CLI "' " +
                             arguments + " <'" + write("stdin", input) + "' >'" + path("stdout") + "' 2>'" +
                             path("stderr") + "'";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(path("stdout")),
            slurp(path("stderr"))};
  }

  [[nodiscard]] std::string tiny_model() const {
    const auto bytes = tiny_gguf(TinyModel{});
    return write("tiny.gguf", std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace headwater::test
