#include "headwater/device_model.h"

#include "headwater/cpu.h"

namespace headwater {

DeviceModel DeviceModel::for_isa(Isa isa) {
  DeviceModel model;
  model.has_dot16 = isa == Isa::avx512_bf16;
  if (isa == Isa::scalar) model.fma32 = {60'000, 0, 60'000, 1, 0};
  return model;
}

DeviceModel DeviceModel::default_cpu() {
  return for_isa(cpu::default_isa());
}

}  // namespace headwater
