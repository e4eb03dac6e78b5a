// What a build without the CUDA back end says when it is asked for a device; see cuda_processor.h.
#include "bench/cuda_processor.h"
#include "headwater/error.h"

namespace headwater::bench {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "device cuda: this build has no CUDA back end (CMake option HEADWATER_CUDA)");
}

}  // namespace

std::unique_ptr<Processor> make_cuda_processor(std::optional<DeviceModel> /*one_head*/) {
  refuse();
}

DeviceModel calibrate_cuda(DType /*type*/, const std::function<void(double, const std::string&)>& /*progress*/) {
  refuse();
}

std::string cuda_device_name() {
  refuse();
}

}  // namespace headwater::bench
