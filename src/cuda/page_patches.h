// Page ids that have changed since the last upload, as the arguments of a small kernel: a step of a decode changes a
// page of some requests, and the rest of their tables need not be copied again.
#pragma once

#include <cstdint>

namespace headwater::cuda {

/// As many as the 4 KB of arguments that any launch can have hold.
struct PagePatches {
  static constexpr std::int32_t kMost = 448;
  std::int32_t count = 0;
  std::int32_t at[kMost];
  std::int32_t id[kMost];
};

/// What the kernel takes: the ids, and what to write into them.
struct PatchParams {
  std::int32_t* page_ids = nullptr;
  PagePatches patches;
};

/// The kernel, of kMost threads; its one argument is a PatchParams.
const void* patch_kernel();

}  // namespace headwater::cuda
