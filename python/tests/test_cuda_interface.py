"""headwater.cuda without a GPU: importable, with names and docstrings; what needs a device says so."""

import struct
import subprocess
import sys

import pytest

import headwater
import headwater.cuda

SHAPE = headwater.AttentionShape(32, 8, 128, q_dtype="f16")
built = pytest.mark.skipif(not headwater.cuda.is_built(), reason="built without CUDA")


def test_import_needs_neither_device_nor_framework():
    code = "import sys, headwater.cuda; print([m for m in ('torch', 'numpy', 'cupy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_status_is_read_from_bytes():
    status = headwater.cuda.PlanStatus.read(bytearray(struct.pack("=Iiqqii", 5, 2, 300, 7, 11, 13)))
    assert status == (5, 2, 300, 7, 11, 13) and status.flags == 5 and status.num_partials == 13
    with pytest.raises(Exception, match="buffer|unpack"):
        headwater.cuda.PlanStatus.read(bytearray(8))


@pytest.mark.skipif(headwater.cuda.is_built(), reason="built with CUDA")
def test_a_build_without_cuda_says_so():
    with pytest.raises(headwater.Unsupported, match="headwater.cuda.run: this package was built without CUDA"):
        headwater.cuda.run(None)
    with pytest.raises(AttributeError):
        headwater.cuda._no_such_thing


@built
def test_what_needs_no_device():
    cuda = headwater.cuda
    model = cuda.h200_model(SHAPE)
    assert model.num_workers == 33  # 2 blocks on each of 132 multiprocessors, 8 heads to a team
    bounds = dict(max_requests=64, max_rows=64, max_pages=128, max_shared_spans=1, model=model)
    capacity = cuda.Capacity.within(SHAPE, **bounds)
    assert capacity.max_rows == 64
    assert capacity.workspace_size(SHAPE) == capacity.max_partials * 32 * 129 * 4
    missing = [name for name in cuda.__all__ if not getattr(cuda, name).__doc__]
    assert missing == []


@built
@pytest.mark.skipif(not headwater.cuda.is_built() or headwater.cuda.num_devices() > 0, reason="there is a GPU")
def test_without_a_device_errors_are_told():
    with pytest.raises(headwater.DeviceError, match="cudaGetDevice"):
        headwater.cuda.device_model(SHAPE)
    with pytest.raises(headwater.DeviceError):
        headwater.cuda.DevicePlan(SHAPE, headwater.cuda.Capacity(1, 1, 1, 1))
