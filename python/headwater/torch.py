"""Torch operators, for torch.compile(fullgraph=True): importing this module registers them under torch.ops.headwater.

    attend            attention by a plan that a PlanHandle registered; one plan serves every layer of a step
    paged_attention   attention straight from page tables; it plans at every call
    merge_state, merge_states, append_kv

Inference only: no gradients. Tensors are used in place, outputs are new. CPU tensors in this build.
"""

import itertools
import weakref

import torch
from torch import Tensor

from . import _core
from ._torch_arrays import dtype_name, plain

_handles: "weakref.WeakValueDictionary[int, PlanHandle]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class PlanHandle:
    """A plan that operators name by a number (`id`), since operators take tensors and numbers only.

    Keep the handle while compiled code uses it. Update the plan in place (Planner.update) from step to step: the number
    stays, nothing is compiled anew.
    """

    def __init__(self, plan: _core.Plan):
        self.plan = plan
        self.id = next(_numbers)
        _handles[self.id] = self


def _plan_of(number: int) -> _core.Plan:
    handle = _handles.get(number)
    if handle is None:
        raise ValueError(f"plan = {number} is not the id of a live PlanHandle")
    return handle.plan


def _outputs(q: Tensor, head_dim_vo: int) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[0], q.shape[1]
    return q.new_empty((rows, heads, head_dim_vo)), q.new_empty((rows, heads), dtype=torch.float32)


def _run(plan, q, k, v, kv_layout, **options):
    out, lse = _outputs(q.detach(), v.shape[-1])
    _core.run(plan, plain(q), (plain(k), plain(v)), out, lse=lse, kv_layout=kv_layout, **options)
    return out, lse


@torch.library.custom_op("headwater::attend", mutates_args=(), device_types="cpu")
def attend(q: Tensor, k: Tensor, v: Tensor, plan: int, kv_layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """Attention by the plan of PlanHandle number `plan`, whose out_dtype is q's.

    q [rows, Hq, D]; k [pages, page, Hkv, D], v [pages, page, Hkv, Dv] (NHD; HND: page and Hkv the other way round).
    Returns (out [rows, Hq, Dv], lse float32 [rows, Hq], base 2). Raises ValueErrors as headwater.run.
    """
    return _run(_plan_of(plan), q, k, v, kv_layout)


@attend.register_fake
def _(q, k, v, plan, kv_layout="NHD"):
    return _outputs(q, v.shape[-1])


@torch.library.custom_op("headwater::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    sm_scale: float = 0.0,
    logits_soft_cap: float = 0.0,
    policy: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention from page tables (int32, as headwater.Batch); sharing is found and used. Returns (out, lse) as attend."""
    nhd = kv_layout == "NHD"
    shape = _core.AttentionShape(
        q.shape[1],
        k.shape[2 if nhd else 1],
        q.shape[2],
        head_dim_vo=v.shape[-1],
        q_dtype=dtype_name(q.dtype, "q.dtype"),
        kv_dtype=dtype_name(k.dtype, "k.dtype"),
    )
    batch = _core.Batch(
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size=k.shape[1 if nhd else 2], num_pages=k.shape[0]
    )
    options = _core.PlanOptions(
        causal=causal, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, policy=policy
    )
    return _run(_core.Planner().plan(shape, batch, options), q, k, v, kv_layout)


@paged_attention.register_fake
def _(q, k, v, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, *options, **named):
    return _outputs(q, v.shape[-1])


@torch.library.custom_op("headwater::merge_state", mutates_args=(), device_types="cpu")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two states of each row: v [N, H, D], s float32 [N, H] (base 2)."""
    return _core.merge_state(plain(v_a), plain(s_a), plain(v_b), plain(s_b))


@merge_state.register_fake
def _(v_a, s_a, v_b, s_b):
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


@torch.library.custom_op("headwater::merge_states", mutates_args=(), device_types="cpu")
def merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merges groups of states: group j's are the rows [indptr[j], indptr[j+1]) of v [N, H, D] and s [N, H] (base 2)."""
    return _core.merge_states(plain(v), plain(s), indptr)


@merge_states.register_fake
def _(v, s, indptr):
    groups = indptr.shape[0] - 1
    return v.new_empty((groups, *v.shape[1:])), s.new_empty((groups, s.shape[1]))


@torch.library.custom_op("headwater::append_kv", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def append_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, token_slots: Tensor, kv_layout: str = "NHD"
) -> None:
    """Writes rows k, v [rows, Hkv, D] to the slots (int64 [rows], page * page_size + offset) of a cache."""
    _core.append_kv((plain(k_cache), plain(v_cache)), plain(k), plain(v), token_slots, kv_layout=kv_layout)


@append_kv.register_fake
def _(k_cache, v_cache, k, v, token_slots, kv_layout="NHD"):
    return None


__all__ = ["PlanHandle", "append_kv", "attend", "merge_state", "merge_states", "paged_attention"]
