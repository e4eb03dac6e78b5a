// What was seen of one request. Times are seconds of bench::now().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headwater::serving {

struct Record {
  double due = 0;                ///< when it should have started; 0: as soon as its turn came
  double start = 0;              ///< just before its connection is opened
  std::vector<double> arrivals;  ///< of every event that carries text
  double end = 0;
  std::int64_t prompt_tokens = -1;      ///< as the server counts; -1: it does not say
  std::int64_t cached_tokens = -1;      ///< of these, found in its prefix cache; -1: it does not say
  std::int64_t completion_tokens = -1;  ///< as the server counts, else the number of events with text
  bool counted_events = false;          ///< completion_tokens is that number
  std::string error;                    ///< empty: the whole answer came

  [[nodiscard]] bool ok() const noexcept { return error.empty(); }
  [[nodiscard]] double ttft() const noexcept { return arrivals.empty() ? 0 : arrivals.front() - start; }
};

}  // namespace headwater::serving
