// The log: one line an event, whatever is in the values.
#include "server/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "headwater/error.h"

namespace headwater::server {
namespace {

std::vector<std::string> lines_of(LogFormat format) {
  const std::string path = testing::TempDir() + "headwater_log_test.txt";
  std::remove(path.c_str());
  {
    Log log(path, format);
    log.info("request", {{"id", std::string("chatcmpl-1")}, {"tokens", std::int64_t{7}}, {"seconds", 0.25}});
    log.warn("odd", {{"text", std::string("two words\nand a \"line\" break")}, {"none", std::string()}});
    EXPECT_EQ(log.num_lost(), 0U);
  }
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

TEST(Log, TextIsOneLineAnEvent) {
  const std::vector<std::string> lines = lines_of(LogFormat::text);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].substr(24), " info request id=chatcmpl-1 tokens=7 seconds=0.25");
  EXPECT_EQ(lines[1].substr(24), R"( warn odd text="two words\nand a \"line\" break" none="")");
}

TEST(Log, JsonIsOneObjectAnEvent) {
  const std::vector<std::string> lines = lines_of(LogFormat::json);
  ASSERT_EQ(lines.size(), 2U);
  const nlohmann::json first = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(first.at("level"), "info");
  EXPECT_EQ(first.at("event"), "request");
  EXPECT_EQ(first.at("tokens"), 7);
  EXPECT_EQ(first.at("seconds"), 0.25);
  EXPECT_EQ(nlohmann::json::parse(lines[1]).at("text"), "two words\nand a \"line\" break");
}

TEST(Log, AFileThatCannotBeOpenedIsRefused) {
  try {
    const Log log("/no/such/folder/log");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_TRUE(std::string(error.what()).starts_with("/no/such/folder/log: "));
  }
}

TEST(Log, APipeThatNobodyReadsIsRefusedAtOnce) {
  const std::string path = testing::TempDir() + "headwater_log_test.fifo";
  std::remove(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  try {
    const Log log(path);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_TRUE(std::string(error.what()).ends_with("nobody reads this pipe")) << error.what();
  }
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  {
    Log log(path);
    log.info("heard");
  }
  char line[64] = {};
  EXPECT_GT(read(reader, line, sizeof line - 1), 0);
  EXPECT_NE(std::string(line).find("info heard\n"), std::string::npos) << line;
  close(reader);
  std::remove(path.c_str());
}

}  // namespace
}  // namespace headwater::server
