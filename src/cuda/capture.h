// Stream capture, as host code that must not end one has to see it.
#pragma once

#include <cuda_runtime_api.h>

#include "headwater/cuda.h"

namespace headwater::cuda {

/// Asking about events would end a capture that any thread has begun in global mode, unless this thread says otherwise.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Whether nothing can be asked of the stream: it is being captured, or cannot say.
inline bool is_captured(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();
  return true;
}

}  // namespace headwater::cuda
