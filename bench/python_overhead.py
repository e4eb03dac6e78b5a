"""What Python adds to `run` and `plan`: the same call from Python and from C++, in turn; minima and medians over pairs.

    python bench/python_overhead.py

`run` is of one request of 16 tokens on one thread, so that little but the call is left; `plan` of 256 requests that share
128 pages and have 4 of their own.
"""

import statistics
import time

import numpy as np

import headwater
from headwater import _core


def pairs(python, cpp, count, repeats=41):
    """Median nanoseconds of a call from Python, from C++, and of the difference."""
    a, b = [], []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(count):
            python()
        a.append((time.perf_counter_ns() - start) / count)
        b.append(cpp(count) / count)
    return min(a), min(b), statistics.median(x - y for x, y in zip(a, b))


def show(name, result):
    python, cpp, difference = (x / 1e3 for x in result)
    print(f"{name:24} Python {python:8.2f} us, C++ {cpp:8.2f} us: +{python - cpp:.2f} us ({(python / cpp - 1) * 100:.1f} %) of the"
          f" minima, median of differences {difference:.2f} us")


def ints(*values):
    return np.array(values, np.int32)


planner, serial = headwater.Planner(), headwater.SerialExecutor()
shape = headwater.AttentionShape(8, 8, 64, q_dtype="f32")
plan = planner.plan(shape, headwater.Batch(ints(0, 1), ints(0, 1), ints(0), ints(16), page_size=16, num_pages=1))
q, k, v = np.ones((1, 8, 64), np.float32), *np.ones((2, 1, 16, 8, 64), np.float32)
out = np.empty_like(q)
args = headwater.RunArgs(q, (k, v), out)
run, kv = headwater.run, (k, v)
cpp = lambda n: _core._time_runs(plan, args, serial, n)  # noqa: E731
show("run, prepared (RunArgs)", pairs(lambda: run(plan, args, executor=serial), cpp, 500))
show("run, numpy arrays", pairs(lambda: run(plan, q, kv, out, executor=serial), cpp, 500))
try:
    import torch

    tq, tkv, tout = torch.from_numpy(q), (torch.from_numpy(k), torch.from_numpy(v)), torch.from_numpy(out)
    show("run, torch tensors", pairs(lambda: run(plan, tq, tkv, tout, executor=serial), cpp, 500))
except ImportError:
    pass

members, shared, own = 256, 128, 4
tables = np.concatenate(
    [np.concatenate([np.arange(shared), shared + own * b + np.arange(own)]) for b in range(members)]
).astype(np.int32)
batch = headwater.Batch(
    np.arange(members + 1, dtype=np.int32),
    np.arange(members + 1, dtype=np.int32) * (shared + own),
    tables,
    np.full(members, 16, np.int32),
    page_size=16,
    num_pages=shared + own * members,
)
shape, options = headwater.AttentionShape(32, 8, 128), headwater.PlanOptions()
show("plan, 256 requests", pairs(lambda: planner.plan(shape, batch, options),
                                 lambda n: _core._time_plans(planner, shape, batch, options, n), 3, 31))
