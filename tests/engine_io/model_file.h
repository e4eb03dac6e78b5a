// Where the example model lies (tools/fetch_model.sh puts it there). Tests that need it are skipped, visibly, only when
// it is not there; a file that is there but cannot be used fails them.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

namespace headwater::test {

/// $HEADWATER_MODEL, which must then be there; else the file in $HEADWATER_CACHE or the default folder, or nothing.
inline std::optional<std::string> example_model() {
  if (const char* path = std::getenv("HEADWATER_MODEL")) return path;
  const char* cache = std::getenv("HEADWATER_CACHE");
  const char* home = std::getenv("HOME");
  const std::string folder = cache != nullptr ? cache : std::string(home != nullptr ? home : ".") + "/.cache/headwater";
  std::string path = folder + "/SmolLM2-135M-Instruct.Q4_1.gguf";
  // symlink_status: a link to nowhere is there, and is a fault.
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, ignored))) return std::nullopt;
  return path;
}

inline constexpr const char* kNoExampleModel = "the example model has not been fetched (tools/fetch_model.sh)";

}  // namespace headwater::test
