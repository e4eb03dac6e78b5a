"""Uninitialised arrays in the framework of another array, for outputs that a caller did not give.

numpy has no bfloat16: such outputs are uint16, the bits. jax arrays cannot be written to; jax callers get numpy arrays,
which jnp.asarray takes over.
"""

import sys

_NUMPY_NAMES = {"f32": "float32", "f16": "float16", "bf16": "uint16", "f8e4m3": "uint8"}
_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8e4m3": "float8_e4m3fn"}


def empty_like(like, shape, dtype):
    """An array of `shape` and `dtype` ("f32", ...) of the framework that `like` belongs to; numpy's for others."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, _TORCH_NAMES[dtype]), device=like.device)
    import numpy as np

    return np.empty(shape, dtype=_NUMPY_NAMES[dtype])
