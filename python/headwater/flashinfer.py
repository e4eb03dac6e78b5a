"""FlashInfer's cascade and paged wrappers by Headwater: `import headwater.flashinfer as flashinfer`.

Arguments, layouts and defaults are FlashInfer's (0.6); what it accepts and gets wrong is right here or refused. CPU
and CUDA tensors: the device is that of float_workspace_buffer, or of the page tables where none is given. Differences:
docs/python.md. Log-sum-exps are float32, base 2, [rows, heads].
"""

import torch

from . import _core, cuda
from ._device_runner import DeviceRunner
from ._torch_arrays import dtype_name, plain

_LARGEST_PAGE = 64
#: Arguments of FlashInfer's older `forward` that plans have.
_PLANNED = ("window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")
_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def _on_host(*tensors):
    """Page tables where the host can read them; what lies on a device is copied, which waits for it, as FlashInfer does."""
    return [t.cpu() for t in tensors]


def _shape(num_qo_heads, num_kv_heads, head_dim, q_type, kv_type, out_type=None):
    q_name = dtype_name(q_type, "q_data_type")
    return _core.AttentionShape(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        q_dtype=q_name,
        kv_dtype=q_name if kv_type is None else dtype_name(kv_type, "kv_data_type"),
        out_dtype=q_name if out_type is None else dtype_name(out_type, "o_data_type"),
    )


def _options(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale):
    if pos_encoding_mode != "NONE":
        raise _core.Unsupported(
            f'pos_encoding_mode = "{pos_encoding_mode}", expected "NONE": apply rotary embeddings before the append, '
            "give ALiBi slopes to headwater.run"
        )
    if sm_scale == 0:  # the library's word for the default
        raise _core.Unsupported("sm_scale = 0, expected None (1 / sqrt(head_dim)) or another number")
    return _core.PlanOptions(
        causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap or 0.0, sm_scale=sm_scale or 0.0
    )


def _num_pages(indptr, indices):
    """The plan is made before the cache is known: pages up to the greatest id; run checks that the cache has them.

    What lies behind the last request's ids in a buffer does not count.
    """
    used = indices[: int(indptr[-1])] if indptr.numel() > 0 else indices
    return int(used.max()) + 1 if used.numel() > 0 else 0


def _level(qo_indptr, indptr, indices, last_page_len, page_size, num_pages=None):
    pages = _num_pages(indptr, indices) if num_pages is None else num_pages
    return _core.Level(qo_indptr, indptr, indices, last_page_len, page_size=page_size, num_pages=max(pages, 0))


def _numbered(device):
    """`device`, a CUDA device with its number."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _cache(paged_kv_cache):
    if isinstance(paged_kv_cache, (tuple, list)):
        return tuple(plain(x) for x in paged_kv_cache)
    return plain(paged_kv_cache)


def _check_layout(kv_layout):
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f'kv_layout = "{kv_layout}", expected "NHD" or "HND"')
    return kv_layout


class _Wrapper:
    """What the wrappers share: a planner, the latest plan, and where it runs."""

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph=False, index_buffers=()):
        self._kv_layout = _check_layout(kv_layout)
        self._use_cuda_graph = bool(use_cuda_graph)
        self._device = getattr(float_workspace_buffer, "device", None)
        self._index_buffers = [b for b in index_buffers if b is not None]
        self._planner = None
        self._plan = None
        self._runner = None
        self._scales = {}

    @property
    def is_cuda_graph_enabled(self):
        """What the constructor was told. If it holds, nothing is allocated after the first plan."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, *int_workspace_buffers):
        """Accepted; the plan has its own workspace."""

    def end_forward(self):
        """Does nothing, as FlashInfer's."""

    def _set_plan(self, shape, batch, options, tables):
        """Plans on the host; on a CUDA device the plan is in force for what follows on the current stream."""
        device = self._device or tables.device
        if self._runner is not None and self._runner.device != _numbered(device):
            self._runner, self._scales = None, {}  # a shared-prefix wrapper follows its q
        if device.type == "cpu":
            self._planner = self._planner or _core.Planner()
            self._plan = self._planner.plan(shape, batch, options)
            return
        plan = _core.Planner(cuda.device_model(shape, device=device.index)).plan(shape, batch, options)
        if self._runner is None:
            self._runner = DeviceRunner(device, self._graph_capacity(plan) if self._use_cuda_graph else None)
        try:
            self._runner.upload(plan)
        except _core.CapacityExceeded as error:
            raise _core.CapacityExceeded(f"{error}: with use_cuda_graph, plan the largest batch first") from None
        self._plan = plan

    def _graph_capacity(self, plan):
        """Room for later plans, whose memory a captured graph knows: as many rows, four times the rest."""
        first = cuda.Capacity.of(plan)
        ids = max([4 * first.max_page_ids, *(b.numel() for b in self._index_buffers)])
        return cuda.Capacity(first.max_rows, ids, 4 * first.max_items + 1024, 4 * first.max_partials + 1024)

    def _run(self, q, kv, out=None, lse=None, return_lse=False, k_scale=None, v_scale=None, kv_layout=None):
        if self._plan is None:
            raise _core.Unsupported("run was called before plan, or after a plan that was refused")
        kv_layout = kv_layout or self._kv_layout
        q = plain(q)
        if self._runner is None:
            return _core.run(
                self._plan, q, kv, out, lse=lse, return_lse=return_lse, kv_layout=kv_layout, k_scale=k_scale,
                v_scale=v_scale,
            )  # fmt: skip
        shape = self._plan.shape
        rows = self._plan.stats.num_rows
        if not self._use_cuda_graph and q.shape[0] != rows:
            raise _core.InvalidArgument(f"q.shape[0] = {q.shape[0]}, expected {rows} (rows of the plan)")
        if out is None:
            out_type = q.dtype if shape.out_dtype == shape.q_dtype else getattr(torch, _TYPES[shape.out_dtype])
            out = q.new_empty((q.shape[0], q.shape[1], shape.head_dim_vo), dtype=out_type)
            out[rows:].zero_()  # with use_cuda_graph q may have more rows than the plan
        if return_lse and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            lse[rows:].fill_(-torch.inf)
        scales = dict(k_scale=self._scale(k_scale), v_scale=self._scale(v_scale))
        self._runner.run(q, kv, out, lse, kv_layout=kv_layout, **scales)
        return (out, lse) if return_lse else out

    def _scale(self, value):
        """A number as a tensor of the device, kept: a graph reads it again."""
        if value is None or isinstance(value, torch.Tensor):
            return value
        if value in self._scales:
            return self._scales[value]
        scale = torch.full((1,), float(value), dtype=torch.float32, device=self._runner.device)
        if not torch.cuda.is_current_stream_capturing():  # else it is that graph's, which alone fills it
            self._scales[value] = scale
        return scale


class MultiLevelCascadeAttentionWrapper(_Wrapper):
    """Attention over explicitly given levels of shared pages (all of one pool)."""

    def __init__(
        self,
        num_levels,
        float_workspace_buffer=None,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None,
        paged_kv_indices_buf_arr=None,
        paged_kv_last_page_len_buf_arr=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indices_buf_arr or ())
        if num_levels < 1:
            raise ValueError(f"num_levels = {num_levels}, expected at least 1")
        self._num_levels = num_levels

    def plan(
        self,
        qo_indptr_arr,
        paged_kv_indptr_arr,
        paged_kv_indices_arr,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        """Lists with one int32 tensor a level, outermost first; see FlashInfer. `window_left` counts tokens of the path."""
        self._plan = None  # a refused plan leaves none
        lists = dict(
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        for name, values in lists.items():
            if len(values) != self._num_levels:
                raise ValueError(f"{name} has {len(values)} entries, expected {self._num_levels} (num_levels)")
        tables = [_on_host(*arrays) for arrays in zip(*lists.values())]
        num_pages = max(_num_pages(indptr, indices) for _, indptr, indices, _ in tables)
        levels = [_level(*arrays, page_size, num_pages) for arrays in tables]
        self._set_plan(
            _shape(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type),
            _core.Batch.from_levels(levels),
            _options(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
            paged_kv_indices_arr[0],
        )

    begin_forward = plan

    def run(self, q, paged_kv_cache):
        """q [rows, Hq, D]; the cache is one 5-D tensor or a tuple (k, v). Returns out [rows, Hq, D]."""
        return self._run(q, _cache(paged_kv_cache))

    forward = run


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Decoding, one row a request. Pages that requests share are read once where that pays."""

    def __init__(
        self,
        float_workspace_buffer=None,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, [paged_kv_indices_buffer])
        if jit_args is not None:
            raise _core.Unsupported("jit_args is given, expected None: there are no custom variants")

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
    ):
        """indptr int32 [B+1], indices int32, last_page_len int32 [B]; `data_type` is that of q and kv where theirs is not given."""
        self._plan = None  # a refused plan leaves none
        if data_type is not None:
            q_data_type = data_type if q_data_type in (None, "float16") else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        qo_indptr = torch.arange(indptr.shape[0], dtype=torch.int32)
        host = _on_host(indptr, indices, last_page_len)
        self._set_plan(
            _shape(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type, o_data_type),
            _core.Batch(qo_indptr, *host, page_size=page_size, num_pages=_num_pages(host[0], host[1])),
            _options(True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
            indices,
        )

    begin_forward = plan

    def run(self, q, paged_kv_cache, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        """q [B, Hq, D]. Returns out, or (out, lse)."""
        if q_scale is not None:
            k_scale = q_scale if k_scale is None else k_scale * q_scale  # both multiply the scores
        return self._run(q, _cache(paged_kv_cache), out, lse, return_lse, k_scale, v_scale)

    def run_return_lse(self, q, paged_kv_cache, **options):
        """run with return_lse."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def forward(self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, **options):
        """FlashInfer's older form of run. What it would change of the plan (window_left, sm_scale, ...) is refused."""
        _options(True, pos_encoding_mode, -1, None, None)
        changed = sorted(name for name, value in options.items() if value is not None and name in _PLANNED)
        if changed:
            raise _core.Unsupported(f"forward: {changed[0]} is given, expected it at plan")
        kept = {name: value for name, value in options.items() if name not in _PLANNED}
        return self.run(q, paged_kv_cache, q_scale, k_scale, v_scale, **kept)

    def forward_return_lse(self, q, paged_kv_cache, *options, **named):
        """forward with return_lse."""
        return self.forward(q, paged_kv_cache, *options, **named, return_lse=True)


class _SharedPrefix(_Wrapper):
    """A prefix [S, Hkv, D] that every row attends to, and paged tokens of each request behind it."""

    def _begin(self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size):
        self._arrays = _on_host(qo_indptr, indptr, indices, last_page_len)
        self._sizes = (num_qo_heads, num_kv_heads, head_dim)
        self._page_size = page_size

    def _forward(self, q, k_shared, v_shared, unique_kv_cache, options):
        if not hasattr(self, "_arrays"):
            raise _core.Unsupported("forward was called before begin_forward")
        if self._kv_layout == "HND":
            k_shared, v_shared = k_shared.transpose(0, 1), v_shared.transpose(0, 1)
        tokens = k_shared.shape[0]
        if v_shared.shape[0] != tokens:
            raise ValueError(f"v_shared has {v_shared.shape[0]} tokens, expected {tokens} as k_shared")
        # The prefix as pages of its own pool, of the greatest size that divides it (pages may be cut between workers).
        sizes = (2**i for i in range(9)) if q.is_cuda else range(1, _LARGEST_PAGE + 1)
        page = max((n for n in sizes if tokens % n == 0), default=1)
        pages = tokens // page
        shared = tuple(plain(x).unflatten(0, (pages, page)) for x in (k_shared, v_shared))
        rows = int(self._arrays[0][-1])
        ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
        levels = [
            _level(ints(0, rows), ints(0, pages), torch.arange(pages, dtype=torch.int32), ints(page), page, pages),
            _level(*self._arrays, self._page_size),
        ]
        shape = _shape(*self._sizes, q.dtype, k_shared.dtype)
        self._device = q.device
        self._set_plan(shape, _core.Batch.from_levels(levels), options, q)
        unique = _cache(unique_kv_cache)
        if self._kv_layout == "HND":  # one layout for both levels: the prefix is NHD by its strides
            unique = tuple(x.transpose(1, 2) for x in (unique if isinstance(unique, tuple) else unique.unbind(1)))
        return self._run(q, [shared, unique], kv_layout="NHD")


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decoding behind one shared prefix."""

    def __init__(self, float_workspace_buffer=None, kv_layout="NHD"):
        super().__init__(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        unique_kv_indptr,
        unique_kv_indices,
        unique_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        data_type="float16",
    ):
        """Page tables of the requests' own tokens. Types are those of the tensors given to forward."""
        qo_indptr = torch.arange(unique_kv_indptr.shape[0], dtype=torch.int32)
        self._begin(
            qo_indptr, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size,
        )  # fmt: skip

    plan = begin_forward

    def forward(self, q, k_shared, v_shared, unique_kv_cache):
        """q [B, Hq, D]; k_shared, v_shared [S, Hkv, D] (NHD) or [Hkv, S, D] (HND). Returns out."""
        return self._forward(q, k_shared, v_shared, unique_kv_cache, _core.PlanOptions(causal=False))

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Several rows a request behind one shared prefix."""

    def __init__(self, float_workspace_buffer=None, kv_layout="NHD"):
        super().__init__(float_workspace_buffer, kv_layout)

    def begin_forward(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
    ):
        """qo_indptr int32 [B+1] and page tables of the requests' own tokens."""
        self._begin(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size,
        )  # fmt: skip

    plan = begin_forward

    def forward(
        self,
        q,
        k_shared,
        v_shared,
        unique_kv_cache,
        causal=False,
        use_fp16_qk_reduction=False,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
    ):
        """q [rows, Hq, D]. `causal` masks within the requests' own tokens. Returns out."""
        return self._forward(q, k_shared, v_shared, unique_kv_cache, _options(causal, "NONE", -1, None, sm_scale))

    run = forward


def _merge(v_a, s_a, v_b, s_b, out_v, out_s):
    where = cuda if v_a.is_cuda else _core
    where.merge_state(plain(v_a), plain(s_a), plain(v_b), plain(s_b), out_v=plain(out_v), out_s=plain(out_s))


def merge_state(v_a, s_a, v_b, s_b):
    """Merges state a of each row with its state b: v [N, H, D], s float32 [N, H]. Returns (v, s)."""
    out_v, out_s = v_a.detach().new_empty(v_a.shape), s_a.detach().new_empty(s_a.shape)
    _merge(v_a, s_a, v_b, s_b, out_v, out_s)
    return out_v, out_s


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """merge_state into v and s; with mask (bool [N]) only the rows where it holds."""
    if mask is None:
        _merge(v, s, v_other, s_other, v, s)
        return
    if mask.shape != (v.shape[0],):
        raise ValueError(f"mask has shape {list(mask.shape)}, expected [{v.shape[0]}]")
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    v.copy_(torch.where(mask.bool()[:, None, None], merged_v, v))
    s.copy_(torch.where(mask.bool()[:, None], merged_s, s))


def merge_states(v, s):
    """Merges K states of each row: v [N, K, H, D], s float32 [N, K, H]. Returns (v [N, H, D], s [N, H])."""
    if v.dim() != 4 or s.shape != v.shape[:3]:
        raise ValueError(f"v, s have shapes {list(v.shape)}, {list(s.shape)}, expected [N, K, H, D] and [N, K, H]")
    indptr = torch.arange(v.shape[0] + 1, dtype=torch.int32, device=v.device) * v.shape[1]
    return variable_length_merge_states(v.flatten(0, 1), s.flatten(0, 1), indptr)


def variable_length_merge_states(v, s, indptr):
    """Merges groups of states: group j's are the rows [indptr[j], indptr[j+1]) of v [N, H, D], s [N, H]."""
    groups = max(indptr.shape[0] - 1, 0)
    out_v, out_s = v.detach().new_empty((groups, *v.shape[1:])), s.detach().new_empty((groups, *s.shape[1:]))
    where = cuda if v.is_cuda else _core
    where.merge_states(plain(v), plain(s), indptr, out_v=out_v, out_s=out_s)
    return out_v, out_s


__all__ = [name for name in dir() if name[0] != "_" and name not in ("torch", "cuda", "plain", "dtype_name", "DeviceRunner")]
