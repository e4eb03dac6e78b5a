// Kernels for tests that only take time: they occupy multiprocessors, so that the blocks of what runs beside them start
// late, few at a time and in another order.
#pragma once

struct CUstream_st;

namespace headwater::cuda_test {

/// `blocks` blocks that each keep most of a multiprocessor's shared memory for up to `microseconds`, every one for
/// another time.
void spin(int blocks, int microseconds, unsigned seed, CUstream_st* stream);

}  // namespace headwater::cuda_test
