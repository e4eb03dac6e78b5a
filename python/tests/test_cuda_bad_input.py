"""Bad input to headwater.cuda: an exception that names the argument, never a crash. Arrays are invented (only described, by
__cuda_array_interface__): nothing may reach a device, so these tests are for builds with CUDA on machines without a GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwater
import headwater.cuda as cuda

pytestmark = [
    pytest.mark.skipif(not cuda.is_built(), reason="built without CUDA"),
    pytest.mark.skipif(cuda.is_built() and cuda.num_devices() > 0, reason="there is a GPU"),
]

TYPES = {"f4": 4, "f2": 2, "i4": 4, "i8": 8, "u1": 1}


class Described:
    """An array of a device that is not there. `changes` replaces fields of its description."""

    def __init__(self, its_shape, dtype="f2", device=0, **changes):
        self.device = type("Device", (), {"id": device})()
        described = dict(shape=tuple(its_shape), typestr="<" + dtype, data=(0x7F0000000000, False), strides=None, version=3)
        self.__cuda_array_interface__ = described | changes


ROWS, KV_HEADS, HEADS, DIM, PAGES, PAGE = 3, 2, 8, 64, 5, 16


def cache(**changes):
    return Described((PAGES, PAGE, KV_HEADS, DIM), **changes)


def arguments_of(call):
    """Arguments that are right: (function, positional, named). With a device it would launch."""
    rows = lambda heads=KV_HEADS, dtype="f2": Described((ROWS, heads, DIM), dtype)  # noqa: E731
    lse = lambda: Described((ROWS, HEADS), "f4")  # noqa: E731
    if call == "append_kv":
        return cuda.append_kv, dict(kv=(cache(), cache()), k=rows(), v=rows(), token_slots=Described((ROWS,), "i8"))
    if call == "copy_pages":
        return cuda.copy_pages, dict(kv=(cache(), cache()), copies=Described((ROWS, 3), "i4"))
    if call == "merge_state":
        named = dict(v_a=rows(HEADS), s_a=lse(), v_b=rows(HEADS), s_b=lse(), out_v=rows(HEADS), out_s=lse())
        return cuda.merge_state, named
    if call == "merge_states":
        named = dict(v=rows(HEADS), s=lse(), indptr=Described((ROWS + 1,), "i4"), out_v=rows(HEADS), out_s=lse())
        return cuda.merge_states, named
    named = dict(q=rows(HEADS), kv=(cache(), cache()), out=rows(HEADS), workspace=Described((4096,), "u1"), lse=lse())
    return cuda.RunArgs, named


CALLS = ["append_kv", "copy_pages", "merge_state", "merge_states", "RunArgs"]
ARRAYS = [(call, name) for call in CALLS for name in arguments_of(call)[1]] if cuda.is_built() else []


@pytest.mark.parametrize("call", CALLS)
def test_right_arguments_get_as_far_as_the_device(call):
    function, named = arguments_of(call)
    if call == "RunArgs":
        assert function(**named) is not None  # which launches nothing
        return
    with pytest.raises(headwater.DeviceError, match="cuda"):
        function(**named)


WRONG = {
    "type": lambda x: 7,
    "none": lambda x: None,
    "host": lambda x: np.zeros(x.__cuda_array_interface__["shape"], x.__cuda_array_interface__["typestr"][1:]),
    "other device": lambda x: Described((ROWS,), "f2", device=1),
    "dtype": lambda x: Described(x.__cuda_array_interface__["shape"], "f8"),
    "rank": lambda x: Described((2, *x.__cuda_array_interface__["shape"], 2), x.__cuda_array_interface__["typestr"][1:]),
}


@pytest.mark.parametrize("call, name", ARRAYS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(call, name, wrong):
    function, named = arguments_of(call)
    if (name, wrong) in (("lse", "none"), ("workspace", "dtype"), ("workspace", "rank")):  # these are right
        return
    was = named[name][0] if name == "kv" else named[name]
    changed = WRONG[wrong](was)
    named[name] = (changed, named[name][1]) if name == "kv" else changed
    with pytest.raises((ValueError, TypeError), match=f"{name}|{ {'k': 'v', 'v_a': 's_a', 'q': 'out'}.get(name, name) }"):
        function(**named)


def described(draw):
    """Descriptions of all kinds, right and wrong."""
    size = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**40, 2**62, -(2**62), 2**63 - 1]))
    shape = draw(st.lists(size, max_size=6))
    changes = {}
    if draw(st.booleans()):
        stride = st.one_of(st.integers(-64, 512), st.sampled_from([2**31, 2**62, -(2**62)]))
        changes["strides"] = tuple(draw(st.lists(stride, min_size=max(len(shape) - 1, 0), max_size=len(shape) + 1)))
    if draw(st.booleans()):
        changes["data"] = draw(st.sampled_from([(0, False), (8, True), (12345, False), (2**64 - 1, False), None, (1,), "x"]))
    if draw(st.integers(0, 9)) == 0:
        changes["typestr"] = draw(st.sampled_from([None, "", "<", ">f4", "<f99", "<x4", "|b1", "<f0", "<i999999999999", 7]))
    if draw(st.integers(0, 9)) == 0:
        changes["shape"] = draw(st.sampled_from([None, 5, "ab", [2, 3], (1.5,), (2, None)]))
    return Described(shape, draw(st.sampled_from(sorted(TYPES))), draw(st.sampled_from([0, 0, 0, 1, -1, 10**6])), **changes)


#: What the binding raises for a description that is none: all of Python's own, with the name of what is wrong.
REFUSALS = (headwater.Error, TypeError)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_description_crashes(data):
    call, name = data.draw(st.sampled_from(ARRAYS))
    function, named = arguments_of(call)
    change = described(data.draw)
    if name == "kv":
        change = data.draw(st.sampled_from([(change, named["kv"][1]), (named["kv"][0], change), (change,), (), change]))
    named[name] = change
    try:
        function(**named)
    except REFUSALS as error:
        assert str(error)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300), min_size=4, max_size=4), st.integers(-3, 2**31 - 1))
def test_capacities(numbers, bound):
    shape = headwater.AttentionShape(HEADS, KV_HEADS, DIM, q_dtype="f16")
    model = cuda.h200_model(shape)
    try:
        capacity = cuda.Capacity(*numbers)
        assert capacity.workspace_size(shape) >= 0
        with pytest.raises(headwater.Error):
            cuda.DevicePlan(shape, capacity)
    except REFUSALS as error:
        assert str(error)
    limits = dict(max_requests=bound, max_rows=numbers[0], max_pages=numbers[1], model=model)
    for options in (dict(limits), dict(limits, page_size=bound % 400 - 3), dict(limits, max_shared_spans=bound % 9)):
        try:
            assert cuda.Capacity.within(shape, **options).max_rows >= 0
        except REFUSALS as error:
            assert str(error)


@settings(max_examples=100, deadline=None)
@given(st.integers(-5, 600), st.integers(-3, 200), st.integers(-3, 40), st.sampled_from(["f32", "f16", "bf16"]))
def test_what_is_supported_is_said_for_any_sizes(head_dim, heads, kv_heads, dtype):
    try:
        cuda.check_supported(headwater.AttentionShape(heads, kv_heads, head_dim, q_dtype=dtype), page_size=head_dim)
    except headwater.Error as error:
        assert str(error)


@pytest.mark.parametrize("device", [-1, 0, 99, "cuda", 1.5])
def test_devices_that_are_not_there(device):
    shape = headwater.AttentionShape(HEADS, KV_HEADS, DIM, q_dtype="f16")
    for make in (
        lambda: cuda.DevicePlan(shape, cuda.Capacity(1, 1, 1, 1), device=device),
        lambda: cuda.DevicePlanner(shape, max_requests=1, max_blocks=1, num_pages=1, device=device),
        lambda: cuda.device_model(shape, device=device),
    ):
        with pytest.raises(headwater.InvalidArgument, match="device = .*, expected None or 0.."):
            make()
