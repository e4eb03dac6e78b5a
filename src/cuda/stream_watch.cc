// See stream_watch.h.
#include "cuda/stream_watch.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/capture.h"
#include "headwater/error.h"

namespace headwater::cuda {
namespace {

/// Whether the stream runs beside the default stream; else either waits for the other's work.
bool is_beside(Stream stream) {
  unsigned flags = cudaStreamNonBlocking;
  if (stream != nullptr && cudaStreamGetFlags(stream, &flags) != cudaSuccess) cudaGetLastError();
  return stream != nullptr && (flags & cudaStreamNonBlocking) != 0;
}

bool under_way(CUevent_st* done) {
  const cudaError_t status = cudaEventQuery(done);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaErrorNotReady;
}

}  // namespace

StreamWatch& StreamWatch::instance() {
  static auto* watch = new StreamWatch;  // never destroyed: the CUDA runtime may be gone before
  return *watch;
}

StreamWatch::~StreamWatch() {
  for (Use& use : uses_) release(use);
}

void StreamWatch::release(Use& use) {
  if (use.done != nullptr) cudaEventDestroy(use.done);
  use = {};
}

void StreamWatch::check(const char* what, const void* memory, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  const RelaxedCapture relaxed;
  if (bytes == 0 || is_captured(stream)) return;
  const auto* begin = static_cast<const std::byte*>(memory);
  const bool beside = is_beside(stream);
  for (Use& use : uses_) {
    if (use.done == nullptr || use.begin >= begin + bytes || begin >= use.end) continue;
    if (!under_way(use.done)) {
      release(use);
    } else if (use.stream != stream && (beside || use.beside || (use.stream != nullptr && stream != nullptr))) {
      throw Error(ErrorCode::invalid_argument,
                  std::string(what) + " is in use by a run on another stream, expected one of its own for each stream");
    }
  }
}

void StreamWatch::note(const void* memory, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  const RelaxedCapture relaxed;
  int device = -1;
  if (bytes == 0 || is_captured(stream) || cudaGetDevice(&device) != cudaSuccess) return;
  const auto* begin = static_cast<const std::byte*>(memory);
  // The slot of an earlier run in the same place, else the one that was filled longest ago.
  Use* slot = nullptr;
  for (Use& use : uses_) {
    if (use.done != nullptr && use.begin == begin && use.stream == stream && use.device == device) slot = &use;
  }
  if (slot == nullptr) {
    slot = &uses_[next_];
    next_ = (next_ + 1) % kSlots;
    release(*slot);
    if (cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming) != cudaSuccess) {
      cudaGetLastError();
      slot->done = nullptr;
      return;
    }
  }
  *slot = {begin, begin + bytes, stream, is_beside(stream), device, slot->done};
  if (cudaEventRecord(slot->done, stream) != cudaSuccess) {
    cudaGetLastError();
    release(*slot);
  }
}

}  // namespace headwater::cuda
