"""The stream of a call that names none, with stand-ins for torch and cupy."""

import sys
import types

import numpy as np
import pytest

import headwater
from headwater._streams import current


class Tensor:
    pass


class Ndarray:
    pass


class OfAnother:
    pass


@pytest.fixture
def frameworks(monkeypatch):
    """Puts stand-ins in place whose current streams on device d are those given + d; None: not imported."""

    def make(torch, cupy):
        stream = lambda base, field: lambda device: types.SimpleNamespace(**{field: base + device})  # noqa: E731
        fake_torch = torch and types.SimpleNamespace(
            Tensor=Tensor,
            cuda=types.SimpleNamespace(is_initialized=lambda: True, current_stream=stream(torch, "cuda_stream")),
        )
        fake_cupy = cupy and types.SimpleNamespace(
            ndarray=Ndarray, cuda=types.SimpleNamespace(get_current_stream=stream(cupy, "ptr"))
        )
        monkeypatch.setitem(sys.modules, "torch", fake_torch)
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy)

    return make


@pytest.mark.parametrize("device", [0, 1])
def test_an_array_has_its_frameworks_stream(frameworks, device):
    frameworks(100, 200)
    assert current(Tensor(), device) == 100 + device
    assert current(Ndarray(), device) == 200 + device
    assert current(OfAnother(), device) == 0


@pytest.mark.parametrize("like", [None, np.zeros(4)], ids=["none", "host memory"])
def test_without_one_that_of_what_is_imported(frameworks, like):
    for torch, cupy, expected in ((100, None, 101), (None, 200, 201), (None, None, 0), (300, 300, 301)):
        frameworks(torch, cupy)
        assert current(like, 1) == expected
    frameworks(100, 200)
    with pytest.raises(headwater.InvalidArgument, match="stream = None, expected a stream: torch and cupy"):
        current(like, 1)
