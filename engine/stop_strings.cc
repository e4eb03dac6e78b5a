#include "engine/stop_strings.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/utf8.h"
#include "headwater/error.h"

namespace headwater::engine {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)), states_(stops_.size(), 0) {
  for (std::size_t i = 0; i < stops_.size(); ++i) {
    const std::string& stop = stops_[i];
    if (stop.empty()) {
      throw Error(ErrorCode::invalid_argument, fmt::format("stop[{}] is empty, expected at least one byte", i));
    }
    if (const std::size_t valid = valid_utf8_prefix(stop); valid != stop.size()) {
      throw Error(ErrorCode::invalid_argument, fmt::format("stop[{}] has byte 0x{:02x} at {}, expected valid UTF-8", i,
                                                           static_cast<unsigned char>(stop[valid]), valid));
    }
    // border[k]: length of the longest proper prefix of the first k bytes that is also their suffix.
    std::vector<std::size_t> border(stop.size() + 1, 0);
    for (std::size_t k = 1, length = 0; k < stop.size(); ++k) {
      while (length > 0 && stop[k] != stop[length]) length = border[length];
      if (stop[k] == stop[length]) ++length;
      border[k + 1] = length;
    }
    borders_.push_back(std::move(border));
  }
}

std::string StopStrings::push(std::string_view text) {
  if (stopped()) {
    num_dropped_ += text.size();
    return {};
  }
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (std::size_t i = 0; i < stops_.size(); ++i) {
      const std::string& stop = stops_[i];
      std::size_t& state = states_[i];
      while (state > 0 && stop[state] != text[at]) state = borders_[i][state];
      if (stop[state] == text[at]) ++state;
      if (state == stop.size() && (!matched_ || stop.size() > stops_[*matched_].size())) matched_ = i;
    }
    if (matched_) {
      held_.append(text.substr(0, at + 1));
      num_dropped_ += text.size() - at - 1;
      return take(stops_[*matched_].size());
    }
  }
  held_ += text;
  // A state counts bytes that the text ends with, so the largest one covers every stop string that may have begun.
  return take(states_.empty() ? 0 : *std::max_element(states_.begin(), states_.end()));
}

std::string StopStrings::take(std::size_t keep) {
  std::string out = held_.substr(held_begin_, held_.size() - held_begin_ - keep);
  held_begin_ += out.size();
  if (held_begin_ > held_.size() / 2) {  // moving what is left costs no more than what was handed out since
    held_.erase(0, held_begin_);
    held_begin_ = 0;
  }
  return out;
}

std::string StopStrings::finish() {
  return stopped() ? std::string() : take(0);
}

std::string TextStream::finish() {
  // The detokenizer's last character may itself complete or break a stop string.
  std::string out = stops_.push(detokenizer_.finish());
  return out += stops_.finish();
}

}  // namespace headwater::engine
