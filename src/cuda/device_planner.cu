// The kernel that plans: one cooperative launch. All blocks look for common runs; the first one goes on alone.
#include "cuda/device_planner.h"
#include "cuda/device_planner_emit.h"
#include "cuda/device_planner_team.cuh"

namespace headwater::cuda {
namespace {

template <class Scratch, bool kShared>
__global__ void __launch_bounds__(kPlannerThreads, 1) plan_on_device(const __grid_constant__ PlannerParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ BlockSums sums;
  std::byte* memory = reinterpret_cast<std::byte*>(shared);
  if constexpr (!kShared) memory = p.scratch + blockIdx.x * sizeof(Scratch);
  make_plan(BlockTeam(sums), CooperativeGrid(), p.cost, p.in, *reinterpret_cast<Scratch*>(memory), p.out);
}

template <class Scratch, bool kShared>
PlannerKernel kernel_of() {
  return {reinterpret_cast<const void*>(&plan_on_device<Scratch, kShared>), Scratch::kMostRequests, Scratch::kMostUnits,
          sizeof(Scratch), kShared};
}

}  // namespace

PlannerKernel planner_kernel(int index) {
  switch (index) {
    case 0:
      return kernel_of<SmallScratch, true>();
    case 1:
      return kernel_of<MediumScratch, true>();
    default:
      return kernel_of<LargeScratch, false>();
  }
}

int planner_threads() {
  return kPlannerThreads;
}

}  // namespace headwater::cuda
