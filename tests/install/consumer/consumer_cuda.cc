// A program in C++ that uses an installed CUDA back end: a cost model, a refusal, and what is said where there is no
// GPU.
#include <headwater/cuda.h>
#include <headwater/headwater.h>

#include <iostream>
#include <string>

int main() {
  const headwater::AttentionShape shape{32, 8, 128, 128};
  if (headwater::cuda::h200_model(shape).num_workers < 1) return 1;
  try {
    headwater::cuda::copy_pages(headwater::KvCache{}, {}, 0, 128, 128, nullptr);
    return 2;
  } catch (const headwater::Error& error) {
    if (std::string(error.what()) != "num_kv_heads = 0, expected at least 1") return 3;
  }
  const int devices = headwater::cuda::num_devices();
  try {
    const headwater::DeviceModel model = headwater::cuda::device_model(shape);
    if (devices == 0 || model.num_workers < 1) return 4;
  } catch (const headwater::Error& error) {
    if (devices > 0 || error.code() != headwater::ErrorCode::device) return 5;
  }
  std::cout << "headwater " << headwater::version() << " with CUDA, " << devices << " devices\n";
  return 0;
}
