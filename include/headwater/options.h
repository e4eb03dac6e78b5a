// Shape and options of an attention call that the plan depends on.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "headwater/types.h"

namespace headwater {

/// Greatest head size; sizes are multiples of 16.
inline constexpr int kMaxHeadDim = 1024;

/// Heads, head sizes and types. The same for every layer that a plan serves.
struct AttentionShape {
  int num_qo_heads = 32;
  int num_kv_heads = 8;  ///< divides num_qo_heads; query head h reads KV head h / (num_qo_heads / num_kv_heads)
  int head_dim_qk = 128;
  int head_dim_vo = 128;
  DType q_dtype = DType::bf16;
  DType kv_dtype = DType::bf16;
  DType out_dtype = DType::bf16;

  [[nodiscard]] int group_size() const noexcept { return num_qo_heads / num_kv_heads; }
};

/// How shared spans are chosen.
enum class Policy : std::uint8_t {
  automatic,  ///< minimise the cost model's predicted time; flat is always a candidate
  flat,       ///< share nothing
  two_level,  ///< the single group that removes the most page reads (16 pages / 2 members unless set)
  vllm,       ///< vLLM's published heuristic on the prefix common to all requests
  forest,     ///< split every shared span that passes the thresholds
};

/// "auto", "flat", "two_level", "vllm", "forest".
[[nodiscard]] std::string_view name_of(Policy policy) noexcept;

/// Master switch. `off`: no scan for sharing at all. `on`: as policy `forest`. `automatic`: as `policy` says.
enum class CascadeSwitch : std::uint8_t { automatic, on, off };

struct PlanOptions {
  Policy policy = Policy::automatic;
  CascadeSwitch cascade = CascadeSwitch::automatic;
  int min_shared_pages = 0;  ///< 0: the policy's default (1; 16 for two_level)
  int min_members = 0;       ///< 0: the policy's default (2)

  // Mask. Row i of a request with qo_len rows and kv_len keys has q_pos = kv_len - qo_len + i and sees
  // [0, num_sink_tokens) and [lo, hi), never a key behind itself if causal: hi = q_pos + 1 if causal, else kv_len;
  // lo = max(0, q_pos - window_left if window_left >= 0, floor(q_pos / local_chunk) * local_chunk if local_chunk > 0);
  // with local_chunk a row also sees no key behind its own chunk (a row before the first key, which only non-causal
  // calls have, still sees the sinks).
  bool causal = true;
  std::int64_t window_left = -1;     ///< inclusive; -1: everything
  std::int64_t local_chunk = 0;      ///< tokens; 0: off
  std::int64_t num_sink_tokens = 0;  ///< leading tokens that every row sees whatever its window; more than local_chunk
                                     ///< (if that is on) without causal is refused (ErrorCode::unsupported)

  // Scores: s = sm_scale * k_scale * q.k; s = cap * tanh(s / cap) if cap > 0; s += slope * (k_pos - q_pos) with ALiBi.
  float sm_scale = 0.0F;         ///< 0: 1 / sqrt(head_dim_qk)
  float logits_soft_cap = 0.0F;  ///< 0: off; else 1e-30..1e30
  bool alibi = false;            ///< RunArgs::alibi_slopes will be given
  bool sinks = false;            ///< RunArgs::sinks will be given (learned sink logits)

  /// Results whose bits do not depend on batch, policy, row tile or number of threads (per device and ISA level). With
  /// explicit levels a row's bits are a function of where its levels end, too.
  bool batch_invariant = false;
  int invariant_chunk = 128;  ///< tokens; states are closed at absolute multiples of it

  /// Workers to schedule for; 0: the device model's. No run of the plan uses more of its executor's.
  int num_workers = 0;

  /// `base` with HEADWATER_CASCADE_ATTENTION, HEADWATER_CASCADE_MIN_SHARED_PAGES and HEADWATER_CASCADE_MIN_MEMBERS
  /// applied. `lookup` returns a variable's value or nullptr (std::getenv, or a test's table). A value that cannot be
  /// read as documented leaves the field as it is in `base`.
  [[nodiscard]] static PlanOptions from_env(const std::function<const char*(const char*)>& lookup, PlanOptions base);
};

}  // namespace headwater
