// Debug builds only: notices that memory which a run needs for itself (its workspace, the queue of its plan) is in use
// by a run on another stream, whose results would be wrong. Looked at on the host when a run is launched: a run still
// under way on another stream, on memory that overlaps, is a mistake of the caller. Misses are possible (the last
// kSlots ranges are remembered; a run that is being captured is not looked at, nor are replays), false alarms only
// where the caller ordered two streams by events of his own, which one DevicePlan does not allow either.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

#include "headwater/cuda.h"

struct CUevent_st;

namespace headwater::cuda {

class StreamWatch {
 public:
  StreamWatch() = default;
  ~StreamWatch();
  StreamWatch(const StreamWatch&) = delete;
  StreamWatch& operator=(const StreamWatch&) = delete;

  /// Throws Error (invalid_argument, naming `what`) if a run on another stream still uses part of the memory.
  void check(const char* what, const void* memory, std::size_t bytes, Stream stream);
  /// What was last put on `stream` uses the memory.
  void note(const void* memory, std::size_t bytes, Stream stream);

  /// Of this process.
  [[nodiscard]] static StreamWatch& instance();

 private:
  struct Use {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    Stream stream = nullptr;
    bool beside = false;  ///< the default stream does not wait for it
    int device = -1;
    CUevent_st* done = nullptr;  ///< nullptr: the slot is free
  };
  static constexpr std::size_t kSlots = 64;

  static void release(Use& use);

  std::mutex mutex_;
  std::array<Use, kSlots> uses_;
  std::size_t next_ = 0;
};

}  // namespace headwater::cuda
