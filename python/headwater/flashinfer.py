"""FlashInfer's cascade and paged wrappers by Headwater: `import headwater.flashinfer as flashinfer`.

Arguments, layouts and defaults are FlashInfer's (0.6); what it accepts and gets wrong is right here or refused. CPU
tensors. Differences: docs/python.md. Log-sum-exps are float32, base 2, [rows, heads].
"""

import torch

from . import _core
from ._torch_arrays import dtype_name, plain

_LARGEST_PAGE = 64


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
    return _core.PlanOptions(
        causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap or 0.0, sm_scale=sm_scale or 0.0
    )


def _num_pages(indices):
    """The plan is made before the cache is known: pages up to the greatest id; run checks that the cache has them."""
    return int(indices.max()) + 1 if indices.numel() > 0 else 0


def _level(qo_indptr, indptr, indices, last_page_len, page_size, num_pages=None):
    pages = _num_pages(indices) if num_pages is None else num_pages
    return _core.Level(qo_indptr, indptr, indices, last_page_len, page_size=page_size, num_pages=max(pages, 0))


def _cache(paged_kv_cache):
    if isinstance(paged_kv_cache, (tuple, list)):
        return tuple(plain(x) for x in paged_kv_cache)
    return plain(paged_kv_cache)


def _check_layout(kv_layout):
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f'kv_layout = "{kv_layout}", expected "NHD" or "HND"')
    return kv_layout


class _Wrapper:
    """What the wrappers share: a planner, the latest plan."""

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph=False):
        self._kv_layout = _check_layout(kv_layout)
        self._use_cuda_graph = bool(use_cuda_graph)
        self._workspace = float_workspace_buffer
        self._planner = _core.Planner()
        self._plan = None

    @property
    def is_cuda_graph_enabled(self):
        """What the constructor was told; on the CPU it changes nothing."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, *int_workspace_buffers):
        """Accepted; the plan has its own workspace, of exactly the size that it needs."""
        self._workspace = float_workspace_buffer

    def _planned(self):
        if self._plan is None:
            raise _core.Unsupported("run was called before plan")
        return self._plan

    def end_forward(self):
        """Does nothing, as FlashInfer's."""


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
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
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
        lists = dict(
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        for name, values in lists.items():
            if len(values) != self._num_levels:
                raise ValueError(f"{name} has {len(values)} entries, expected {self._num_levels} (num_levels)")
        num_pages = max(_num_pages(indices) for indices in paged_kv_indices_arr)
        levels = [_level(*arrays, page_size, num_pages) for arrays in zip(*lists.values())]
        self._plan = self._planner.plan(
            _shape(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type),
            _core.Batch.from_levels(levels),
            _options(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        )

    begin_forward = plan

    def run(self, q, paged_kv_cache):
        """q [rows, Hq, D]; the cache is one 5-D tensor or a tuple (k, v). Returns out [rows, Hq, D]."""
        return _core.run(self._planned(), plain(q), _cache(paged_kv_cache), kv_layout=self._kv_layout)

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
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
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
        """indptr int32 [B+1], indices int32, last_page_len int32 [B]; `data_type` sets both q's and kv's type."""
        if data_type is not None:
            q_data_type, kv_data_type = data_type, kv_data_type or data_type
        qo_indptr = torch.arange(indptr.shape[0], dtype=torch.int32)
        self._plan = self._planner.plan(
            _shape(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type, o_data_type),
            _core.Batch(qo_indptr, indptr, indices, last_page_len, page_size=page_size, num_pages=_num_pages(indices)),
            _options(True, pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        )

    begin_forward = plan

    def run(self, q, paged_kv_cache, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        """q [B, Hq, D]. Returns out, or (out, lse)."""
        if q_scale is not None:
            k_scale = q_scale if k_scale is None else k_scale * q_scale  # both multiply the scores
        result = _core.run(
            self._planned(),
            plain(q),
            _cache(paged_kv_cache),
            out,
            lse=lse,
            return_lse=return_lse,
            kv_layout=self._kv_layout,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return result

    forward = run

    def forward_return_lse(self, q, paged_kv_cache, **options):
        """run with return_lse."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    run_return_lse = forward_return_lse


class _SharedPrefix(_Wrapper):
    """A prefix [S, Hkv, D] that every row attends to, and paged tokens of each request behind it."""

    def _begin(self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size):
        self._arrays = (qo_indptr, indptr, indices, last_page_len)
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
        page = max((n for n in range(1, _LARGEST_PAGE + 1) if tokens % n == 0), default=1)
        pages = tokens // page
        shared = tuple(plain(x).unflatten(0, (pages, page)) for x in (k_shared, v_shared))
        rows = int(self._arrays[0][-1])
        ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
        levels = [
            _level(ints(0, rows), ints(0, pages), torch.arange(pages, dtype=torch.int32), ints(page), page, pages),
            _level(*self._arrays, self._page_size),
        ]
        shape = _shape(*self._sizes, q.dtype, k_shared.dtype)
        plan = self._planner.plan(shape, _core.Batch.from_levels(levels), options)
        unique = _cache(unique_kv_cache)
        if self._kv_layout == "HND":  # one layout for both levels: the prefix is NHD by its strides
            unique = tuple(x.transpose(1, 2) for x in (unique if isinstance(unique, tuple) else unique.unbind(1)))
        return _core.run(plan, plain(q), [shared, unique])


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


def merge_state(v_a, s_a, v_b, s_b):
    """Merges state a of each row with its state b: v [N, H, D], s float32 [N, H]. Returns (v, s)."""
    return _core.merge_state(plain(v_a), plain(s_a), plain(v_b), plain(s_b))


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """merge_state into v and s; with mask (bool [N]) only the rows where it holds."""
    if mask is None:
        _core.merge_state(plain(v), plain(s), plain(v_other), plain(s_other), out_v=plain(v), out_s=plain(s))
        return
    if mask.shape != (v.shape[0],):
        raise ValueError(f"mask has shape {list(mask.shape)}, expected [{v.shape[0]}]")
    rows = mask.bool().nonzero().flatten()
    merged_v, merged_s = merge_state(v[rows], s[rows], v_other[rows], s_other[rows])
    v[rows], s[rows] = merged_v, merged_s


def merge_states(v, s):
    """Merges K states of each row: v [N, K, H, D], s float32 [N, K, H]. Returns (v [N, H, D], s [N, H])."""
    if v.dim() != 4 or s.shape != v.shape[:3]:
        raise ValueError(f"v, s have shapes {list(v.shape)}, {list(s.shape)}, expected [N, K, H, D] and [N, K, H]")
    indptr = torch.arange(v.shape[0] + 1, dtype=torch.int32) * v.shape[1]
    return variable_length_merge_states(v.flatten(0, 1), s.flatten(0, 1), indptr)


def variable_length_merge_states(v, s, indptr):
    """Merges groups of states: group j's are the rows [indptr[j], indptr[j+1]) of v [N, H, D], s [N, H]."""
    return _core.merge_states(plain(v), plain(s), indptr)


__all__ = [name for name in dir() if name[0] != "_" and name not in ("torch", "plain", "dtype_name")]
