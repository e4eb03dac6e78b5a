"""The CUDA back end: plans on a device, attention by them, the cache, merging.

    planner = headwater.Planner(headwater.cuda.device_model(shape))
    plan = planner.plan(shape, batch)                            # page tables: host arrays
    device_plan = headwater.cuda.DevicePlan(shape, headwater.cuda.Capacity.of(plan))   # once
    device_plan.upload(plan)                                     # every step
    headwater.cuda.run(device_plan, q, (k, v), out, workspace=workspace)               # every layer

or, where the device alone knows the page tables, by a DevicePlanner. Arrays are torch's, cupy's or anything with DLPack
or __cuda_array_interface__, in place. Calls launch on `stream` (torch's or cupy's current one where none is given) and
return. Only DevicePlan and DevicePlanner allocate, when they are made; an upload waits for the last but one before it.
"""

import struct as _struct
from typing import NamedTuple as _NamedTuple

from ._core import Unsupported as _Unsupported

try:
    from ._core.cuda import (
        Capacity,
        DevicePlan,
        DevicePlanner,
        RunArgs,
        append_kv,
        check_supported,
        copy_pages,
        device_model,
        h200_model,
        merge_state,
        merge_states,
        model_for_shape,
        num_devices,
        run,
    )

    _built = True
except ModuleNotFoundError:  # the extension has no such part
    _built = False

BAD_PAGE_ID = 1  # an id outside the pool; its keys count as zeros
BAD_LENGTH = 2  # a length below 0 or beyond max_blocks; taken as the nearest
BAD_ROWS = 4  # qo_indptr falls or passes max_rows: nothing is computed
OVER_CAPACITY = 8  # the shared spans need more items or partial states than there is room for


class PlanStatus(_NamedTuple):
    """What became of the last plan that a DevicePlanner made. With any flag it is flat: nothing is shared."""

    flags: int  #: BAD_PAGE_ID, BAD_LENGTH, BAD_ROWS, OVER_CAPACITY
    num_spans: int  #: spans split off for several requests; 0: the plan is flat
    shared_tokens: int  #: summed over spans
    member_sequences: int  #: summed over spans
    num_items: int
    num_partials: int

    @classmethod
    def read(cls, array):
        """From the host memory that DevicePlanner.copy_status wrote, once that copy is done."""
        if hasattr(array, "numpy"):  # torch tensors have no buffer protocol
            array = array.numpy()
        return cls(*_struct.unpack("=Iiqqii", memoryview(array).cast("B")))


def is_built():
    """Whether this package was built with the CUDA back end. It may be, and there be no device: see num_devices."""
    return _built


def __getattr__(name):
    if not _built and not name.startswith("_"):
        raise _Unsupported(
            f"headwater.cuda.{name}: this package was built without CUDA; `pip install .` builds it where nvcc is found"
        )
    raise AttributeError(f"module 'headwater.cuda' has no attribute '{name}'")


__all__ = [name for name in dir() if not name.startswith("_")]
