"""Attention that reads every shared page of a paged KV cache once per decode step.

    planner = headwater.Planner()
    shape = headwater.AttentionShape(32, 8, 128, q_dtype="f16")
    batch = headwater.Batch(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size=16, num_pages=1000)
    plan = planner.plan(shape, batch)             # once per step, serves every layer
    out = headwater.run(plan, q, (k, v))          # once per layer
    planner.update(plan, next_batch)              # next step: only what changed

Arrays are numpy's, torch's, jax's or anything with DLPack or the buffer protocol, used in place; neither of them is
imported here. `headwater.torch` has torch operators, `headwater.flashinfer` FlashInfer's wrappers.
"""

import os as _os

from ._core import (
    AttentionShape,
    Batch,
    CapacityExceeded,
    ComputeModel,
    DeviceError,
    DeviceModel,
    Error,
    Executor,
    InternalError,
    InvalidArgument,
    InvalidPageTable,
    IoError,
    Level,
    OutOfPages,
    PagePool,
    Plan,
    Planner,
    PlanOptions,
    PlanStats,
    PrefixCache,
    PrefixCacheStats,
    RunArgs,
    RunOutcome,
    SerialExecutor,
    ThreadPool,
    Unsupported,
    WorkspaceTooSmall,
    __version__,
    append_kv,
    copy_pages,
    default_isa,
    detect_isa,
    merge_state,
    merge_states,
    run,
)
from ._core import _forget_default_pool

# Tracebacks name errors as users import them.
for _name in dir():
    if isinstance(globals()[_name], type) and issubclass(globals()[_name], BaseException):
        globals()[_name].__module__ = "headwater"

# The child of a fork has none of the parent's threads.
_os.register_at_fork(after_in_child=_forget_default_pool)

__all__ = [name for name in dir() if not name.startswith("_")] + ["__version__"]
