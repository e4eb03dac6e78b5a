// `headwater serve` as a process: what it does to signals, limits and streams that it inherits. A pipe that nobody
// writes to is a model that never ends to load.
#include <sys/stat.h>

#include "cli/command_fixture.h"

namespace headwater::test {
namespace {

class Serve : public Command {
 protected:
  Serve() { mkfifo(path("endless.gguf").c_str(), 0600); }
  [[nodiscard]] std::string endless() const { return "serve --port 0 --model '" + path("endless.gguf") + "' "; }
  /// What a shell prints; $H is the command, $M the endless model.
  std::string shell(const std::string& script) const {
    const std::string file = write("script.sh", "H='" HEADWATER_CLI "'\nM='" + path("endless.gguf") + "'\n" + script);
    const std::string out = path("shell.out");
    EXPECT_EQ(std::system(("sh '" + file + "' >'" + out + "' 2>'" + path("shell.err") + "'").c_str()), 0)
        << slurp(path("shell.err"));
    return slurp(out);
  }
};

// While the model is loaded nothing can be stopped; nor does a third signal end it in its own way.
TEST_F(Serve, WhatCannotBeStoppedIsLeftWithTheDocumentedCode) {
  const std::string out = shell(
      "\"$H\" serve --port 0 --model \"$M\" 2>err.$$ & pid=$!\n"
      "i=0; until grep -q listening err.$$ || [ $i -gt 200 ]; do sleep 0.05; i=$((i+1)); done\n"
      "kill -TERM $pid; sleep 0.2; kill -TERM $pid; sleep 0.2; kill -INT $pid\n"
      "wait $pid; echo code $?; grep -o ' stuck' err.$$; rm err.$$\n");
  EXPECT_EQ(out, "code 130\n stuck\n");
}

TEST_F(Serve, ClosedStandardStreamsAreNotTakenByOthers) {
  const std::string out = shell(
      "\"$H\" serve --port 0 --model \"$M\" <&- >&- 2>&- & pid=$!\n"
      "i=0; until readlink /proc/$pid/fd/* | grep -q socket || [ $i -gt 200 ]; do sleep 0.05; i=$((i+1)); done\n"
      "readlink /proc/$pid/fd/0 /proc/$pid/fd/1 /proc/$pid/fd/2; kill -KILL $pid\n");
  EXPECT_EQ(out, "/dev/null\n/dev/null\n/dev/null\n");
}

TEST_F(Serve, OpenFilesBoundConnections) {
  const std::string few = shell("ulimit -n 100; \"$H\" serve --port 0 --model /nothing 2>&1 >/dev/null; true\n");
  EXPECT_NE(few.find("warn max_connections_lowered asked=1024 now=36"), std::string::npos) << few;
  const std::string fits =
      shell("ulimit -n 100; \"$H\" serve --port 0 --model /nothing --max-connections 36 2>&1 >/dev/null; true\n");
  EXPECT_NE(fits.find("listening"), std::string::npos) << fits;
  EXPECT_EQ(fits.find("max_connections_lowered"), std::string::npos) << fits;
  const std::string raised = shell(
      "ulimit -Sn 100; \"$H\" serve --port 0 --model \"$M\" 2>err.$$ & pid=$!\n"
      "i=0; until grep -q listening err.$$ || [ $i -gt 200 ]; do sleep 0.05; i=$((i+1)); done\n"
      "awk '/open files/ {print ($4 == $5) ? \"raised\" : \"soft \" $4}' /proc/$pid/limits; kill -KILL $pid; rm "
      "err.$$\n");
  EXPECT_EQ(raised, "raised\n");
}

TEST_F(Serve, ALogThatMayNotGrowEndsNothing) {
  EXPECT_EQ(shell("(ulimit -f 0; exec \"$H\" serve --port 0 --model /nothing --log-file '" + path("log") +
                  "' 2>/dev/null); echo code $?\n"),
            "code 3\n");
}

TEST_F(Serve, RefusesWhatCannotBeMeant) {
  for (const std::string flag : {"--read-timeout", "--write-timeout", "--idle-timeout", "--drain-timeout"}) {
    for (const std::string value : {"nan", "inf", "0", "-1", "x"}) {
      const Result result = run(endless() + flag + " " + value, "", "timeout 20");
      EXPECT_EQ(result.code, 2) << flag << " " << value << ": " << result.err;
      EXPECT_NE(result.err.find(flag), std::string::npos) << result.err;
    }
  }
  const Result host = run(endless() + "--host ''", "", "timeout 20");
  EXPECT_EQ(host.code, 3);
  EXPECT_NE(host.err.find("host is empty"), std::string::npos) << host.err;
  const Result key = run(endless(), "", "HEADWATER_API_KEY='secret\n' timeout 20");
  EXPECT_EQ(key.code, 3);
  EXPECT_NE(key.err.find("the API key has byte 0x0a at 6"), std::string::npos) << key.err;
}

}  // namespace
}  // namespace headwater::test
