"""FlashAttention 3 as vLLM ships it: flat decoding, and vLLM's cascade (what all requests begin with, the rest, a merge).

`num_splits` 0 lets the kernels choose how often KV is split; 32 is vLLM's bound under CUDA graphs. vLLM itself takes its
cascade only for 8 requests and 256 common tokens or more; here it runs wherever all requests have pages in common.
"""

import math

from .arm import Arm, NotServed, Unavailable
from .cells import PAGE


def _merge_function():
    try:
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
    except ImportError:
        from vllm.attention.ops.merge_attn_states import merge_attn_states
    return merge_attn_states


class _Fa3(Arm):
    library = "vllm"

    def __init__(self, num_splits):
        try:
            import vllm
            import vllm.vllm_flash_attn as flash_attention

            self.merge = _merge_function()
        except Exception as error:  # its import fails in many ways: missing packages, libraries, devices
            raise Unavailable(f"vLLM's FlashAttention cannot be imported: {error!r}") from None
        self.fa = flash_attention
        self.version = vllm.__version__
        self.num_splits = num_splits
        if not flash_attention.is_fa_version_supported(3):
            raise Unavailable(str(flash_attention.fa_version_unsupported_reason(3)))

    def prepare(self, inputs):
        super().prepare(inputs)
        self.torch = inputs.device.torch
        self.block_table = inputs.block_table
        self.out = self.torch.empty_like(inputs.q)

    def _lengths(self, lengths, rows):
        """What a call over requests of `rows` query rows each needs to know."""
        ints, cell = self.inputs.device.ints, self.inputs.cell
        return dict(
            cu_seqlens_q=ints([rows * i for i in range(len(lengths) + 1)]), seqused_k=ints(lengths), max_seqlen_q=rows,
            max_seqlen_k=max(lengths), softmax_scale=1 / math.sqrt(cell.head_dim),
        )  # fmt: skip

    def _schedule(self, of, causal):
        cell = self.inputs.cell
        return self.fa.get_scheduler_metadata(
            batch_size=len(of["seqused_k"]), max_seqlen_q=of["max_seqlen_q"], max_seqlen_k=of["max_seqlen_k"],
            num_heads_q=cell.num_qo_heads, num_heads_kv=cell.num_kv_heads, headdim=cell.head_dim,
            cache_seqlens=of["seqused_k"], qkv_dtype=self.torch.float16, cu_seqlens_q=of["cu_seqlens_q"],
            page_size=PAGE, causal=causal, num_splits=self.num_splits,
        )  # fmt: skip

    def _attend(self, copy, of, block_table, schedule, causal, **more):
        k, v = self.inputs.copies[copy]
        return self.fa.flash_attn_varlen_func(
            self.inputs.q, k, v, **of, causal=causal, block_table=block_table, scheduler_metadata=schedule,
            num_splits=self.num_splits, fa_version=3, **more,
        )  # fmt: skip


class Flat(_Fa3):
    """One call over all requests."""

    def prepare(self, inputs):
        super().prepare(inputs)
        self.all = self._lengths(inputs.cell.lengths, rows=1)

    def plan(self):
        self.schedule = self._schedule(self.all, causal=True)

    def call(self, copy):
        return self._attend(copy, self.all, self.block_table, self.schedule, True, out=self.out)

    def call_with_lse(self, copy):
        out, lse = self._attend(copy, self.all, self.block_table, self.schedule, True, return_softmax_lse=True)
        return out, lse.T

    def path(self):
        return "flat fa3"


class Cascade(_Fa3):
    """Pages that all requests begin with in one call, the rest of each in a second one, and vLLM's merge."""

    def prepare(self, inputs):
        super().prepare(inputs)
        self.common = inputs.tables.common_pages() if inputs.cell.is_shared else 0
        if not self.common:
            raise NotServed("no pages that all requests begin with")
        tokens, cell = self.common * PAGE, inputs.cell
        self.prefix = self._lengths([tokens], rows=cell.num_requests)
        self.rest = self._lengths([n - tokens for n in cell.lengths], rows=1)
        self.rest_table = self.block_table[:, self.common :]
        self.lse = inputs.q.new_empty((cell.num_qo_heads, cell.num_requests), dtype=self.torch.float32)

    def plan(self):
        self.prefix_schedule = self._schedule(self.prefix, causal=False)
        self.rest_schedule = self._schedule(self.rest, causal=True)

    def _run(self, copy, lse):
        with_lse = dict(return_softmax_lse=True)
        prefix = self._attend(copy, self.prefix, self.block_table[:1], self.prefix_schedule, False, **with_lse)
        rest = self._attend(copy, self.rest, self.rest_table, self.rest_schedule, True, **with_lse)
        self.merge(self.out, *prefix, *rest, lse)
        return self.out

    def call(self, copy):
        return self._run(copy, None)

    def call_with_lse(self, copy):
        self.inputs.device.poison(self.lse)
        return self._run(copy, self.lse), self.lse.T

    def path(self):
        return f"cascade fa3+fa3, {self.common} common pages"
