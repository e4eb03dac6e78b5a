// See load.h.
#include "serving/load.h"

#include <deque>

#include "bench/probe.h"

namespace headwater::serving {
namespace {

class Run {
 public:
  Run(HttpClient& client, const std::vector<PlannedRequest>& requests, const LoadOptions& options)
      : client_(client), requests_(requests), options_(options), readers_(requests.size()) {
    progress_.total = std::ssize(requests);
  }

  [[nodiscard]] std::string body(std::size_t i) const {
    return completion_body(options_.request, requests_[i].prompt(), requests_[i].max_tokens);
  }

  void start(std::size_t i, std::string body) {
    ++progress_.running;
    CompletionReader& reader = readers_[i];
    reader.record.start = bench::now();
    client_.post(completion_path(options_.request), std::move(body), options_.patience_s,
                 {[&reader](int status) { reader.on_status(status); },
                  [this, &reader](std::string_view bytes) {
                    const std::size_t before = reader.record.arrivals.size();
                    reader.on_body(bytes, bench::now());
                    progress_.events += static_cast<std::int64_t>(reader.record.arrivals.size() - before);
                  },
                  [this, &reader](const std::string& error) {
                    reader.on_end(error, bench::now());
                    --progress_.running;
                    ++progress_.finished;
                    start_waiting();
                  }});
  }

  /// At its time, or as soon as fewer than most_running are under way.
  void start_at(std::size_t i, double time) {
    readers_[i].record.due = time;
    client_.at(time, [this, i] {
      waiting_.push_back(i);
      start_waiting();
    });
  }

  std::vector<Record> finish(const ProgressFunction& progress) {
    client_.run([&] {
      if (progress) progress(progress_);
    });
    if (progress) progress(progress_);
    std::vector<Record> records;
    records.reserve(readers_.size());
    for (CompletionReader& reader : readers_) records.push_back(std::move(reader.record));
    return records;
  }

 private:
  void start_waiting() {
    while (!waiting_.empty() && progress_.running < options_.most_running) {
      const std::size_t i = waiting_.front();
      waiting_.pop_front();
      start(i, body(i));
    }
  }

  HttpClient& client_;
  const std::vector<PlannedRequest>& requests_;
  const LoadOptions& options_;
  std::vector<CompletionReader> readers_;
  std::deque<std::size_t> waiting_;
  Progress progress_;
};

}  // namespace

std::vector<Record> run_round(HttpClient& client, const std::vector<PlannedRequest>& requests,
                              const LoadOptions& options, const ProgressFunction& progress) {
  Run run(client, requests, options);
  std::vector<std::string> bodies;  // written before the clock starts
  for (std::size_t i = 0; i < requests.size(); ++i) bodies.push_back(run.body(i));
  for (std::size_t i = 0; i < requests.size(); ++i) run.start(i, std::move(bodies[i]));
  return run.finish(progress);
}

std::vector<Record> run_replay(HttpClient& client, const std::vector<PlannedRequest>& requests,
                               const LoadOptions& options, const ProgressFunction& progress) {
  Run run(client, requests, options);
  const double begin = bench::now() + 0.05;
  for (std::size_t i = 0; i < requests.size(); ++i) run.start_at(i, begin + requests[i].at_s);
  return run.finish(progress);
}

}  // namespace headwater::serving
