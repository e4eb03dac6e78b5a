// The shipped constants: products as fitted per instruction-set level, everything else as in DeviceModel{}.
#include "headwater/device_model.h"

#include <algorithm>
#include <thread>

#include "headwater/cpu.h"

namespace headwater {

DeviceModel DeviceModel::for_isa(Isa isa) {
  DeviceModel model;
  model.has_dot16 = isa == Isa::avx512_bf16;
  switch (isa) {
    case Isa::scalar:
      model.fma32 = {60'000, 0, 60'000, 1, 0};
      break;
    case Isa::avx2:  // a Zen 3
      model.fma32 = {9'200, 15'000, 6'530, 8, 12};
      break;
    case Isa::avx512:  // an Intel Xeon (Emerald Rapids)
      model.fma32 = {7'400, 16'400, 3'560, 16, 12};
      break;
    case Isa::avx512_bf16:  // estimates for a Zen 4
      break;
  }
  return model;
}

DeviceModel DeviceModel::default_cpu() {
  DeviceModel model = for_isa(cpu::default_isa());
  model.num_workers = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return model;
}

}  // namespace headwater
