"""torch tensors as arrays that the bindings import, and the library's names of torch's types."""

import torch

_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
}


def plain(tensor):
    """`tensor` without autograd; None stays None."""
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


def dtype_name(dtype, argument):
    """The library's name of a torch dtype, or of its name ("float16", "torch.float16")."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if dtype not in _NAMES:
        raise ValueError(f"{argument} = {dtype}, expected float32, float16, bfloat16 or (KV only) float8_e4m3fn")
    return _NAMES[dtype]
