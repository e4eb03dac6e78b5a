"""Torch operators, for torch.compile(fullgraph=True): importing this module registers them under torch.ops.headwater.

    attend            attention by a plan that a PlanHandle or a TablePlanHandle holds; it serves every layer of a step
    plan_tables       makes a TablePlanHandle's plan on the CUDA device, from page tables there
    paged_attention   attention straight from page tables; it plans at every call
    merge_state, merge_states, append_kv

Inference only: no gradients. Tensors are used in place, outputs are new. CPU and, where the package was built with it,
CUDA tensors; on CUDA everything goes to torch's current stream, and all but paged_attention may be captured in a graph.
"""

import itertools
import math
import threading
import weakref
from collections import OrderedDict
from typing import Optional

import torch
from torch import Tensor

from . import _core, cuda
from ._device_runner import DeviceRunner, TableRunner
from ._torch_arrays import dtype_name, plain

_handles: "weakref.WeakValueDictionary[int, _Handle]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class _Handle:
    """What operators name by a number (`id`), since they take tensors and numbers only. Keep it while they may use it."""

    def __init__(self):
        self.id = next(_numbers)
        _handles[self.id] = self


class PlanHandle(_Handle):
    """A host's plan for `attend`.

    Update the plan in place (Planner.update) from step to step: the number stays, nothing is compiled anew. On a CUDA
    device, upload() then puts it in force; graphs that captured `attend` replay the plan that was uploaded last.

    Args:
      plan: headwater.Plan; for a CUDA device from Planner(headwater.cuda.device_model(shape)).
      device: where q, the caches and the outputs are.
      capacity: headwater.cuda.Capacity that no later plan exceeds; needed for graphs, whose memory may not move.
    """

    def __init__(self, plan: _core.Plan, device="cpu", capacity=None):
        super().__init__()
        self.plan = plan
        device = torch.device(device)
        self._runner = None if device.type == "cpu" else DeviceRunner(device, capacity)
        self.upload()

    def upload(self) -> None:
        """CUDA: puts the plan as it is now in force for what follows on the current stream. Not to be captured."""
        if self._runner is not None:
            self._runner.upload(self.plan)

    def _run(self, q, kv, out, lse, **options):
        if self._runner is None:
            _core.run(self.plan, q, kv, out, lse=lse, **options)
        else:
            _clear_behind(self._runner.rows_written(), out, lse)
            self._runner.run(q, kv, out, lse, **options)


class TablePlanHandle(_Handle):
    """Plans made on a CUDA device, by `plan_tables`, for `attend`. Everything is allocated here, nothing later.

    Args:
      shape, options: AttentionShape and PlanOptions (no windows; headwater.cuda.DevicePlanner).
      max_requests, max_blocks: size of the block table.  num_pages: pages of the pool.
      page_size, max_rows, null_page: as DevicePlanner's.
    """

    def __init__(
        self, shape, options=None, *, max_requests, max_blocks, num_pages, page_size=16, max_rows=0, null_page=-1,
        device="cuda",
    ):  # fmt: skip
        super().__init__()
        self._runner = TableRunner(
            torch.device(device), shape, options, max_requests=max_requests, max_blocks=max_blocks,
            num_pages=num_pages, page_size=page_size, max_rows=max_rows, null_page=null_page,
        )  # fmt: skip
        #: int64 [4] on the device, rewritten by every plan_tables: what became of the plan.
        self.status = torch.zeros(4, dtype=torch.int64, device=self._runner.device)

    def read_status(self) -> cuda.PlanStatus:
        """Waits for the device."""
        return cuda.PlanStatus.read(self.status.cpu())

    def _run(self, q, kv, out, lse, **options):
        _clear_behind(self._runner.rows_written(), out, lse)
        self._runner.run(q, kv, out, lse, **options)


def _clear_behind(rows, out, lse):
    """Rows that a plan of `rows` query rows does not write become those without keys: 0 and -inf. None: any row may be."""
    rows = 0 if rows is None else rows
    if rows < out.shape[0]:
        out[rows:].zero_()
        lse[rows:].fill_(-math.inf)


def _handle_of(number: int, kind=_Handle):
    handle = _handles.get(number)
    if not isinstance(handle, kind):
        raise ValueError(f"plan = {number} is not the id of a live PlanHandle or TablePlanHandle that can be used here")
    return handle


def _outputs(q: Tensor, head_dim_vo: int) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[0], q.shape[1]
    return q.new_empty((rows, heads, head_dim_vo)), q.new_empty((rows, heads), dtype=torch.float32)


@torch.library.custom_op("headwater::attend", mutates_args=(), device_types=("cpu", "cuda"))
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: int,
    kv_layout: str = "NHD",
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    status: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Attention by the plan of handle number `plan`, whose out_dtype is q's.

    q [rows, Hq, D]; k [pages, page, Hkv, D], v [pages, page, Hkv, Dv] (NHD; HND: page and Hkv the other way round).
    k_scale, v_scale: float32 [1] or [Hkv]; sinks: float32 [Hq], with that option. status: of the TablePlanHandle; not
    read, but given it orders attend behind plan_tables in compiled code. block_table: the one given to plan_tables; not
    read either, but given it stays where it is until then in compiled and captured code.
    Returns (out [rows, Hq, Dv], lse float32 [rows, Hq], base 2). Raises ValueErrors as headwater.run. On CUDA q may have
    more rows than the plan: theirs are 0, lse -inf.
    """
    out, lse = _outputs(q.detach(), v.shape[-1])
    _handle_of(plan)._run(
        plain(q), (plain(k), plain(v)), out, lse, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, sinks=sinks
    )
    return out, lse


@attend.register_fake
def _(q, k, v, plan, kv_layout="NHD", k_scale=None, v_scale=None, sinks=None, status=None, block_table=None):
    return _outputs(q, v.shape[-1])


@torch.library.custom_op("headwater::plan_tables", mutates_args=("status",), device_types="cuda")
def plan_tables(
    status: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    plan: int,
    qo_indptr: Optional[Tensor] = None,
    max_rows: Optional[int] = None,
) -> None:
    """Makes the plan of TablePlanHandle number `plan` on the device, and writes its status.

    status: the handle's.  block_table int32 [requests, max_blocks], lengths int32 [requests] (0: padded),
    qo_indptr int32 [requests + 1] (None: one row each). max_rows: a bound that the last entry of qo_indptr keeps, where q
    has fewer rows than the handle's max_rows. The table must stay as it is until the step's attention is done: where code
    is compiled or captured, give it to attend too.
    """
    _handle_of(plan, TablePlanHandle)._runner.plan(status, block_table, lengths, qo_indptr, max_rows)


@plan_tables.register_fake
def _(status, block_table, lengths, plan, qo_indptr=None, max_rows=None):
    return None


_recent: "OrderedDict[tuple, DeviceRunner]" = OrderedDict()
_recent_lock = threading.Lock()
_MOST_RECENT = 8


def _recent_runner(q, shape):
    """For paged_attention, so that not every call allocates; a DevicePlan belongs to one stream."""
    key = (q.device, torch.cuda.current_stream(q.device).cuda_stream, repr(shape))
    with _recent_lock:
        runner = _recent.pop(key, None) or DeviceRunner(q.device)
        _recent[key] = runner
        if len(_recent) > _MOST_RECENT:
            _recent.popitem(last=False)
    return runner


@torch.library.custom_op("headwater::paged_attention", mutates_args=(), device_types=("cpu", "cuda"))
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
    """Attention from page tables (int32, as headwater.Batch); sharing is found and used. Returns (out, lse) as attend.

    The host plans: with CUDA tensors, page tables on the device are copied to it first, which waits for the device.
    """
    nhd = kv_layout == "NHD"
    shape = _core.AttentionShape(
        q.shape[1],
        k.shape[2 if nhd else 1],
        q.shape[2],
        head_dim_vo=v.shape[-1],
        q_dtype=dtype_name(q.dtype, "q.dtype"),
        kv_dtype=dtype_name(k.dtype, "k.dtype"),
    )
    tables = [t.cpu() if q.is_cuda else t for t in (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)]
    batch = _core.Batch(*tables, page_size=k.shape[1 if nhd else 2], num_pages=k.shape[0])
    options = _core.PlanOptions(
        causal=causal, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, policy=policy
    )
    out, lse = _outputs(q.detach(), v.shape[-1])
    arrays = (plain(q), (plain(k), plain(v)), out)
    if not q.is_cuda:
        _core.run(_core.Planner().plan(shape, batch, options), *arrays, lse=lse, kv_layout=kv_layout)
        return out, lse
    model = cuda.device_model(shape, device=q.get_device())
    runner = _recent_runner(q, shape)
    plan = _core.Planner(model).plan(shape, batch, options)
    with runner.lock:  # threads on one stream share it
        runner.upload(plan)
        runner.run(*arrays, lse, kv_layout=kv_layout)
    return out, lse


@paged_attention.register_fake
def _(q, k, v, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, *options, **named):
    return _outputs(q, v.shape[-1])


@torch.library.custom_op("headwater::merge_state", mutates_args=(), device_types=("cpu", "cuda"))
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two states of each row: v [N, H, D], s float32 [N, H] (base 2)."""
    where = cuda if v_a.is_cuda else _core
    out_v, out_s = _new(v_a), _new(s_a)
    where.merge_state(plain(v_a), plain(s_a), plain(v_b), plain(s_b), out_v=out_v, out_s=out_s)
    return out_v, out_s


def _new(like: Tensor, rows: Optional[int] = None) -> Tensor:
    return like.detach().new_empty((like.shape[0] if rows is None else rows, *like.shape[1:]))


@merge_state.register_fake
def _(v_a, s_a, v_b, s_b):
    return _new(v_a), _new(s_a)


@torch.library.custom_op("headwater::merge_states", mutates_args=(), device_types=("cpu", "cuda"))
def merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merges groups of states: group j's are the rows [indptr[j], indptr[j+1]) of v [N, H, D] and s [N, H] (base 2)."""
    where = cuda if v.is_cuda else _core
    groups = max(indptr.shape[0] - 1, 0)
    out_v, out_s = _new(v, groups), _new(s, groups)
    where.merge_states(plain(v), plain(s), indptr, out_v=out_v, out_s=out_s)
    return out_v, out_s


@merge_states.register_fake
def _(v, s, indptr):
    return _new(v, indptr.shape[0] - 1), _new(s, indptr.shape[0] - 1)


@torch.library.custom_op("headwater::append_kv", mutates_args=("k_cache", "v_cache"), device_types=("cpu", "cuda"))
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    token_slots: Tensor,
    kv_layout: str = "NHD",
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
) -> None:
    """Writes rows k, v [rows, Hkv, D] to the slots (int64 [rows], page * page_size + offset) of a cache."""
    where = cuda if k_cache.is_cuda else _core
    where.append_kv(
        (plain(k_cache), plain(v_cache)), plain(k), plain(v), token_slots, kv_layout=kv_layout, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip


@append_kv.register_fake
def _(k_cache, v_cache, k, v, token_slots, kv_layout="NHD", k_scale=None, v_scale=None):
    return None


__all__ = [
    "PlanHandle",
    "TablePlanHandle",
    "append_kv",
    "attend",
    "merge_state",
    "merge_states",
    "paged_attention",
    "plan_tables",
]
