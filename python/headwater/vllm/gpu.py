"""vLLM's attention on NVIDIA GPUs: decoding by Headwater, by plans made on the device; prefill by FlashAttention.

The first layer of a step that needs a plan launches the planner, on vLLM's block table, and the others use the same
plan. Under full CUDA graphs that launch is captured with the rest: a replay costs the host nothing, and the host never
knows what is shared. What vLLM's FlashAttention back end serves and this one's kernels or planner do not (windows,
ALiBi, long prefills, context parallelism, ...) goes to it: docs/vllm.md has the table.
"""

import dataclasses
import functools
import weakref

import torch
from vllm import _custom_ops as ops
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import headwater.cuda
from headwater import _core
from headwater._torch_arrays import dtype_name

from . import Settings
from ._device_plans import DevicePlans
from ._metrics import Meter
from ._sampler import Sampler

logger = init_logger("vllm.headwater")

#: Sizes of pages that the device planner and the kernels take.
_BLOCK_SIZES = [16, 32, 64, 128, 256]
#: The planner's fastest kernel takes so many requests; larger batches have a planner of their own.
_FEW_REQUESTS = 256


@functools.cache
def _unsupported(head_size, dtype, fp8, block_size):
    """Why Headwater's kernels cannot serve this, or None."""
    if not headwater.cuda.is_built():
        return "this headwater was built without CUDA"
    q_name = dtype_name(dtype, "dtype")
    shape = _core.AttentionShape(1, 1, head_size, q_dtype=q_name, kv_dtype="f8e4m3" if fp8 else q_name)
    try:
        headwater.cuda.check_supported(shape, _core.PlanOptions(), block_size)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


class HeadwaterBackend(FlashAttentionBackend):
    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return HeadwaterImpl

    @staticmethod
    def get_builder_cls():
        return HeadwaterBuilder

    @staticmethod
    def get_supported_kernel_block_sizes():
        return list(_BLOCK_SIZES)

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_mm_prefix(cls):
        return False

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, block_size, *args, **kwargs):
        fp8 = kv_cache_dtype is not None and is_quantized_kv_cache(kv_cache_dtype)
        reason = _unsupported(head_size, dtype, fp8, 16)
        if reason is not None:
            return f"headwater: {reason}"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, block_size, *args, **kwargs)


@dataclasses.dataclass
class HeadwaterMetadata:
    """A step whose first num_requests requests, of num_rows query rows, are Headwater's."""

    builder: "HeadwaterBuilder"
    num_actual_tokens: int
    num_requests: int
    num_rows: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    #: FlashAttention's, of the requests behind them; None: there are none.
    rest: FlashAttentionMetadata | None
    #: FlashAttention's, of all requests, for layers that Headwater does not serve; None: there are none.
    whole: FlashAttentionMetadata | None
    #: What was planned for this step, by HeadwaterImpl.plan_key. vLLM makes a metadata object anew for each pass that
    #: runs layers, captures included, so a graph holds the planner's launch exactly once.
    planned: dict = dataclasses.field(default_factory=dict)


class HeadwaterBuilder(FlashAttentionMetadataBuilder):
    #: The planner reads the block table of each group.
    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        graph_size = self.compilation_config.max_cudagraph_capture_size or 0
        self._max_requests = max(vllm_config.scheduler_config.max_num_seqs, graph_size)
        self._max_rows = max(vllm_config.scheduler_config.max_num_seqs * self.reorder_batch_threshold, graph_size)
        #: Local chunks: vLLM makes requests of them, with tables of another width each step.
        self._in_chunks = getattr(kv_cache_spec, "attention_chunk_size", None) is not None
        self._plans = {}  # DevicePlans by (HeadwaterImpl.plan_key, is small)
        self._workspace = None
        self._foreign_layers = None
        self._impls = []  # of the layers that Headwater serves, once a first step was built
        settings = Settings.from_env()
        self.meter = Meter(
            f"{layer_names[0] if layer_names else ''} ({len(layer_names)} layers)", settings.metrics_seconds
        )
        self._sampler = Sampler(self.meter, self._max_requests) if settings.metrics_seconds > 0 else None

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        has_foreign_layers = self._has_foreign_layers()
        if has_foreign_layers and not self._impls:  # windowed groups of hybrid models: no step of theirs is Headwater's
            return super().build(0, common, fast_build)
        requests, rows = self._ours(common)
        self.meter.report()
        self.meter.step("decode" if rows == common.num_actual_tokens else "mixed" if rows else "prefill")
        if rows == 0:
            return super().build(0, common, fast_build)
        if self._sampler is not None:
            self._sampler.step(self._plans_of(requests, rows), common.seq_lens[:requests])
        rest = whole = None
        if rows < common.num_actual_tokens:
            rest = super().build(0, _behind(common, requests, rows), fast_build)
            if has_foreign_layers and rest.scheduler_metadata is not None:  # a buffer that the next build writes again
                rest.scheduler_metadata = rest.scheduler_metadata.clone()
        refresh_sinks(self._impls)
        if has_foreign_layers:
            whole = super().build(0, common, fast_build)
        return HeadwaterMetadata(
            builder=self,
            num_actual_tokens=common.num_actual_tokens,
            num_requests=requests,
            num_rows=rows,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            rest=rest,
            whole=whole,
        )

    def use_cascade_attention(self, *args, **kwargs):
        return False

    def _ours(self, common):
        """(requests, query rows) at the batch's beginning that Headwater serves: decodes, and in graphs of mixed
        batches everything, since what is captured must serve every later batch."""
        if (
            common.causal is not True
            or self.dcp_world_size > 1
            or self.rswa_window is not None
            or self._in_chunks
            or common.mm_req_doc_ranges is not None
        ):
            return 0, 0
        requests, rows = common.num_reqs, common.num_actual_tokens
        in_mixed_graph = self.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL and rows <= (
            self.compilation_config.max_cudagraph_capture_size or 0
        )
        if common.max_query_len > self.reorder_batch_threshold and not in_mixed_graph:
            requests, _, rows, _ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        return (requests, rows) if requests <= self._max_requests and rows <= self._max_rows else (0, 0)

    def _has_foreign_layers(self):
        if self._foreign_layers is None:  # at the first step: layers exist by then
            layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
            impls = [layer.impl for layer in layers.values()]
            self._impls = [impl for impl in impls if getattr(impl, "ours", False)]
            self._foreign_layers = len(self._impls) < len(impls)
        return self._foreign_layers

    def _is_small(self, requests, rows):
        return requests <= _FEW_REQUESTS and rows <= _FEW_REQUESTS * self.reorder_batch_threshold

    def _plans_of(self, requests, rows):
        """Those of a step of this size, of any layer; None before the first one."""
        small = self._is_small(requests, rows)
        return next((plans for (_, is_small), plans in self._plans.items() if is_small == small), None)

    def plan(self, impl, metadata, num_pages):
        """Launches the planner for layers like `impl`, whose cache has `num_pages` blocks; returns its DevicePlans."""
        small = self._is_small(metadata.num_requests, metadata.num_rows)
        plans = self._plans.get((impl.plan_key, small))
        if plans is None or plans.num_pages != num_pages:  # vLLM's older runner begins with a small cache
            plans = self._plans[impl.plan_key, small] = self._make_plans(impl, metadata, small, num_pages)
        requests = metadata.num_requests
        plans.planner.plan(
            plans.plan,
            metadata.block_table[:requests],
            metadata.seq_lens[:requests],
            metadata.query_start_loc[: requests + 1],
            max_rows=metadata.num_rows,
        )
        metadata.planned[impl.plan_key] = plans
        return plans

    def _make_plans(self, impl, metadata, small, num_pages):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("headwater: a CUDA graph is captured before a step of its size ran once")
        few_rows = _FEW_REQUESTS * self.reorder_batch_threshold
        made = DevicePlans(
            impl.shape,
            impl.plan_options(),
            max_requests=min(_FEW_REQUESTS, self._max_requests) if small else self._max_requests,
            max_rows=min(few_rows, self._max_rows) if small else self._max_rows,
            max_blocks=metadata.block_table.shape[1],
            page_size=self.block_size,
            num_pages=num_pages,
            device=self.device,
        )
        self._workspace = made.share_workspace(self._workspace)
        return made


def _behind(common, requests, rows):
    """The batch without its first `requests` requests of `rows` query rows."""

    def cut(tensor, begin):
        return None if tensor is None else tensor[begin:]

    return common.replace(
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - rows,
        query_start_loc=common.query_start_loc[requests:] - rows,
        query_start_loc_cpu=common.query_start_loc_cpu[requests:] - rows,
        seq_lens=common.seq_lens[requests:],
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[rows:],
        positions=cut(common.positions, rows),
        is_prefilling=cut(common.is_prefilling, requests),
        seq_lens_cpu_upper_bound=cut(common.seq_lens_cpu_upper_bound, requests),
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def refresh_sinks(impls):
    """Copies learned sinks to where kernels and graphs read them: weights may change between steps. One launch or two."""
    stale = [impl for impl in impls if impl.sinks is not None and impl.sinks32 is not None]
    if stale:
        torch._foreach_copy_([impl.sinks32 for impl in stale], [impl.sinks.detach() for impl in stale])


class HeadwaterImpl(FlashAttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads, *args, **kwargs):
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        #: What Headwater does not serve; with fp8 it wants queries in fp8, Headwater in the model's type.
        self._flash = FlashAttentionImpl(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        self.supports_quant_query_input = False
        self._fp8 = is_quantized_kv_cache(self.kv_cache_dtype)
        reason = self._not_ours()
        self.ours = reason is None
        if reason is not None:
            logger.info_once("headwater: layers with %s are left to FlashAttention", reason)
        #: Layers with equal keys share plans: kernels are told these when they are launched.
        self.plan_key = (self.scale, self.logits_soft_cap, self.sinks is not None)
        self.shape = None
        self.sinks32 = None  # fp32, at one place from the first step on
        self._cache = None  # weakly, the cache whose views are kept
        self._kv = None

    def _not_ours(self):
        if self.attn_type != AttentionType.DECODER:
            return f"attention of type {self.attn_type}"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.sliding_window != (-1, -1):
            return "a sliding window"
        if self.dcp_world_size > 1:
            return "decode context parallelism"
        return None

    def plan_options(self):
        return _core.PlanOptions.from_env(
            _core.PlanOptions(sm_scale=self.scale, logits_soft_cap=self.logits_soft_cap, sinks=self.sinks is not None)
        )

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
        if attn_metadata is None:  # vLLM looks how much memory a step takes
            return output.fill_(0)
        if not isinstance(attn_metadata, HeadwaterMetadata):
            return self._forward_flash(layer, query, key, value, kv_cache, attn_metadata, output)
        if not self.ours:
            return self._forward_flash(layer, query, key, value, kv_cache, attn_metadata.whole, output)
        plans = attn_metadata.planned.get(self.plan_key)
        if plans is None:
            self._prepare(query)
            plans = attn_metadata.builder.plan(self, attn_metadata, kv_cache.shape[0])
        headwater.cuda.run(
            plans.plan,
            query,
            self._views(kv_cache),
            output,
            workspace=plans.workspace,
            sinks=self._learned_sinks(),
            k_scale=layer._k_scale if self._fp8 else None,
            v_scale=layer._v_scale if self._fp8 else None,
        )
        if attn_metadata.rest is not None:
            rows = attn_metadata.num_rows
            behind = [None if t is None else t[rows:] for t in (query, key, value)]
            self._forward_flash(layer, *behind, kv_cache, attn_metadata.rest, output[rows:])
        return output

    def _prepare(self, query):
        """What only a first query tells."""
        if self.shape is None:
            q_name = dtype_name(query.dtype, "query.dtype")
            self.shape = _core.AttentionShape(
                self.num_heads,
                self.num_kv_heads,
                self.head_size,
                q_dtype=q_name,
                kv_dtype="f8e4m3" if self._fp8 else q_name,
            )

    def _learned_sinks(self):
        """In fp32: made at the first step, brought up to date by the builder, outside graphs."""
        if self.sinks is not None and self.sinks32 is None:
            self.sinks32 = self.sinks.detach().to(torch.float32, copy=True)
        return self.sinks32

    def _views(self, kv_cache):
        """(k, v), each [blocks, block, Hkv, D], of [blocks, Hkv, block, 2 D]; any strides. Kept as long as the cache is."""
        if self._cache is None or self._cache() is not kv_cache:
            self._cache = weakref.ref(kv_cache, self._forget_views)
            # Detached: a view of the cache itself would keep it.
            self._kv = kv_cache.detach().transpose(1, 2).split(self.head_size, dim=-1)
        return self._kv

    def _forget_views(self, gone):
        """They would keep the memory of a cache that vLLM gave up, the profiling run's for instance."""
        if gone is self._cache:
            self._cache = self._kv = None

    def _forward_flash(self, layer, query, key, value, kv_cache, attn_metadata, output):
        if self._fp8 and self._flash.supports_quant_query_input:
            flat, _ = ops.scaled_fp8_quant(query.reshape(query.shape[0], -1), layer._q_scale)
            query = flat.view(query.shape)
        return self._flash.forward(layer, query, key, value, kv_cache, attn_metadata, output)
