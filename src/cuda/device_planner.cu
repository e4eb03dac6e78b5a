// The kernel that plans: one cooperative launch. All blocks look for common runs; the first one goes on alone.
#include "cuda/device_planner.h"
#include "cuda/device_planner_emit.h"
#include "cuda/device_planner_team.cuh"

namespace headwater::cuda {
namespace {

template <bool kShared>
__global__ void __launch_bounds__(kPlannerThreads) plan_on_device(const __grid_constant__ PlannerParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ BlockSums sums;
  PlannerScratch scratch;
  std::byte* memory = reinterpret_cast<std::byte*>(shared);
  if constexpr (!kShared) memory = p.scratch + blockIdx.x * p.scratch_bytes;
  lay_out(scratch, memory, p.in.num_requests, p.in.max_units);
  make_plan(BlockTeam(sums), CooperativeGrid(), p.cost, p.in, scratch, p.out);
}

}  // namespace

const void* planner_kernel(bool shared) {
  return shared ? reinterpret_cast<const void*>(&plan_on_device<true>)
                : reinterpret_cast<const void*>(&plan_on_device<false>);
}

int planner_threads() {
  return kPlannerThreads;
}

}  // namespace headwater::cuda
