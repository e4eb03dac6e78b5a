"""headwater.torch's and headwater.flashinfer's use of a device, on stand-ins for it: what is made anew, what is cleared."""

import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

import headwater  # noqa: E402
import headwater._device_runner as runners  # noqa: E402
import headwater.torch as ops  # noqa: E402


class FakeDevicePlan:
    """Takes plans whose name it was made for; refuses others in the words of the library."""

    made = 0

    def __init__(self, shape, capacity, device=None):
        type(self).made += 1
        self.first, self.refusal, self.stats = None, None, None

    def upload(self, plan, stream=None):
        if self.refusal is not None:
            raise self.refusal
        self.stats = plan.stats

    def workspace_size(self):
        return 0


@pytest.fixture
def device(monkeypatch):
    """A DeviceRunner's surroundings without CUDA: (make a runner, plan of some rows, is the stream captured)."""
    FakeDevicePlan.made = 0
    capturing = types.SimpleNamespace(now=False)
    fields = dict(max_rows=1, max_page_ids=1, max_items=1, max_partials=1)
    capacity = types.SimpleNamespace(of=lambda plan: types.SimpleNamespace(**fields))
    made = types.SimpleNamespace(DevicePlan=FakeDevicePlan, Capacity=capacity, run=lambda *_, **__: None)
    monkeypatch.setattr(runners, "cuda", made)
    monkeypatch.setattr(runners, "roomy", lambda capacity: capacity)
    monkeypatch.setattr(runners.DeviceRunner, "_stream", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **options: empty(*shape, **options))
    plan_of = lambda rows: types.SimpleNamespace(shape=None, stats=types.SimpleNamespace(num_rows=rows))  # noqa: E731
    return types.SimpleNamespace(
        runner=lambda capacity=None: runners.DeviceRunner(torch.device("cuda", 0), capacity), plan=plan_of, capturing=capturing
    )


@pytest.mark.parametrize(
    "error, makes_another",
    [
        (headwater.CapacityExceeded("capacity.max_items = 4, expected at least 9"), True),
        (headwater.InvalidArgument("plan.shape is not the shape that this DevicePlan was made for"), True),
        (headwater.InvalidArgument("plan.options: sm_scale, ... differ from the first plan's"), True),
        (headwater.InvalidArgument("plan: page sizes or their number differ from the first plan's"), True),
        (headwater.InvalidArgument("stream: it is being captured, expected one that is not"), False),
        (headwater.InvalidArgument("this DevicePlan is in use by another thread, expected nobody to use it"), False),
        (headwater.InvalidArgument("plan is being updated by another thread, expected nobody to change it"), False),
    ],
)
def test_a_device_plan_is_made_anew_only_where_that_helps(device, error, makes_another):
    runner = device.runner()
    runner.upload(device.plan(3))
    first = runner._plan
    first.refusal = error
    if makes_another:
        runner.upload(device.plan(4))
        assert runner._plan is not first and runner.rows_written() == 4 and FakeDevicePlan.made == 2
    else:
        with pytest.raises(type(error), match=str(error)[:20]):
            runner.upload(device.plan(4))
        assert runner._plan is first and FakeDevicePlan.made == 1
    fixed = device.runner(capacity=object())
    fixed.upload(device.plan(3))
    fixed._plan.refusal = error
    with pytest.raises(type(error)):
        fixed.upload(device.plan(4))


def attended(handle, rows):
    out, lse = torch.full((rows, 2, 4), 7.0), torch.full((rows, 2), 7.0)
    handle._run(None, None, out, lse)
    return [bool((out[i] == 0).all() and (lse[i] == -torch.inf).all()) for i in range(rows)]


def test_rows_behind_the_plan_are_cleared(device):
    handle = ops.PlanHandle.__new__(ops.PlanHandle)
    handle._runner = device.runner(capacity=object())
    handle._runner.upload(device.plan(3))
    assert attended(handle, 3) == [False] * 3
    assert attended(handle, 5) == [False] * 3 + [True] * 2
    device.capturing.now = True  # a replay may meet a plan of fewer rows
    assert attended(handle, 3) == [True] * 3


def test_rows_behind_a_plan_of_the_device_are_cleared(device):
    runner = runners.TableRunner.__new__(runners.TableRunner)
    runners.DeviceRunner.__init__(runner, torch.device("cuda", 0))
    runner._fixed = True
    runner._take(FakeDevicePlan(None, None))
    runner.planner = types.SimpleNamespace(plan=lambda *_, **__: None, copy_status=lambda *_, **__: None)
    handle = ops.TablePlanHandle.__new__(ops.TablePlanHandle)
    handle._runner = runner
    table, starts = torch.zeros((3, 2), dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    runner.plan(None, table, None, None)
    assert attended(handle, 3) == [False] * 3 and attended(handle, 4) == [False] * 3 + [True]
    runner.plan(None, table, None, starts)
    assert attended(handle, 3) == [True] * 3
