// Merging of states that the caller holds: checks in the CPU back end's words, then one launch.
#include "cuda/states.h"

#include <algorithm>
#include <string>

#include "cpu/validate.h"
#include "cuda/enqueue.h"
#include "headwater/cuda.h"

namespace headwater::cuda {
namespace {

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

void check_sizes(int num_heads, int head_dim) {
  if (num_heads < 1) cpu::refuse(ErrorCode::invalid_argument, "num_heads", num_heads, "at least 1");
  if (head_dim < 1) cpu::refuse(ErrorCode::invalid_argument, "head_dim", head_dim, "at least 1");
}

/// Blocks have 31-bit numbers.
void check_count(const char* name, std::int64_t count, int num_heads) {
  const std::int64_t most = kStateWarps * ((std::int64_t{1} << 31) - 1) / num_heads;
  if (count < 0 || count > most) {
    cpu::refuse(ErrorCode::invalid_argument, name, count, "0.." + std::to_string(most));
  }
}

bool in_quads(const void* data, DType dtype, std::int64_t row_stride, std::int64_t head_stride) {
  return is_aligned(data, 4 * static_cast<std::int64_t>(size_of(dtype))) && row_stride % 4 == 0 && head_stride % 4 == 0;
}

StatesIn states_in(const ConstRowsView& v, const ConstLseView& lse) {
  return {v.data,
          v.row_stride,
          v.head_stride,
          lse.data,
          lse.row_stride,
          lse.head_stride,
          lse.base == LseBase::two ? 1.0F : kLog2E};
}

void launch(StatesParams params, DType in, bool in_aligned, int num_heads, int head_dim, const RowsView& v_out,
            const LseView& lse_out, Stream stream, const char* name) {
  params.num_heads = num_heads;
  params.head_dim = head_dim;
  params.aligned =
      in_aligned && head_dim % 4 == 0 && in_quads(v_out.data, v_out.dtype, v_out.row_stride, v_out.head_stride);
  params.v_out = v_out.data;
  params.out_row_stride = v_out.row_stride;
  params.out_head_stride = v_out.head_stride;
  params.lse_out = lse_out.data;
  params.lse_out_row_stride = lse_out.row_stride;
  params.lse_out_head_stride = lse_out.head_stride;
  params.from_base_two = lse_out.base == LseBase::two ? 1.0F : kLn2;
  const std::int64_t warps = params.num_groups * num_heads;
  enqueue(states_kernel(in, v_out.dtype), dim3(static_cast<unsigned>((warps + kStateWarps - 1) / kStateWarps)),
          32 * kStateWarps, params, stream, name);
}

}  // namespace

void merge_states(ConstRowsView v_in, ConstLseView lse_in, std::int64_t num_states, const std::int32_t* o_indptr,
                  std::int64_t num_groups, int num_heads, int head_dim, RowsView v_out, LseView lse_out,
                  Stream stream) {
  check_sizes(num_heads, head_dim);
  check_count("num_states", num_states, 1);
  check_count("num_groups", num_groups, num_heads);
  cpu::check_rows("v_in", v_in, num_states, num_heads, head_dim);
  cpu::check_lse("lse_in", lse_in, num_states, num_heads);
  cpu::check_rows("v_out", v_out, num_groups, num_heads, head_dim);
  if (lse_out.data != nullptr) cpu::check_lse("lse_out", lse_out, num_groups, num_heads);
  if (num_groups == 0) return;
  check_device_array("o_indptr", o_indptr, alignof(std::int32_t));

  StatesParams params;
  params.in[0] = states_in(v_in, lse_in);
  params.o_indptr = o_indptr;
  params.num_states = num_states;
  params.num_groups = num_groups;
  launch(params, v_in.dtype, in_quads(v_in.data, v_in.dtype, v_in.row_stride, v_in.head_stride), num_heads, head_dim,
         v_out, lse_out, stream, "merge_states");
}

void merge_state(ConstRowsView v_a, ConstLseView lse_a, ConstRowsView v_b, ConstLseView lse_b, std::int64_t num_rows,
                 int num_heads, int head_dim, RowsView v_out, LseView lse_out, Stream stream) {
  check_sizes(num_heads, head_dim);
  check_count("num_rows", num_rows, num_heads);
  cpu::check_rows("v_a", v_a, num_rows, num_heads, head_dim);
  cpu::check_lse("lse_a", lse_a, num_rows, num_heads);
  cpu::check_rows("v_b", v_b, num_rows, num_heads, head_dim);
  if (v_b.dtype != v_a.dtype) {
    cpu::refuse(ErrorCode::invalid_argument, "v_b.dtype", name_of(v_b.dtype),
                std::string(name_of(v_a.dtype)) + " (v_a's)");
  }
  cpu::check_lse("lse_b", lse_b, num_rows, num_heads);
  cpu::check_rows("v_out", v_out, num_rows, num_heads, head_dim);
  if (lse_out.data != nullptr) cpu::check_lse("lse_out", lse_out, num_rows, num_heads);
  if (num_rows == 0) return;

  StatesParams params;
  params.in[0] = states_in(v_a, lse_a);
  params.in[1] = states_in(v_b, lse_b);
  params.num_groups = num_rows;
  const bool aligned = in_quads(v_a.data, v_a.dtype, v_a.row_stride, v_a.head_stride) &&
                       in_quads(v_b.data, v_b.dtype, v_b.row_stride, v_b.head_stride);
  launch(params, v_a.dtype, aligned, num_heads, head_dim, v_out, lse_out, stream, "merge_state");
}

}  // namespace headwater::cuda
