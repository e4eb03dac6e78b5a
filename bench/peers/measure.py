"""One cell: every arm prepared and checked, then all of them timed in turns, round by round; a row an arm."""

import contextlib
import statistics
import time

from .arm import Inputs, NotServed, Unavailable

LEAST_ROUNDS = 7
PLANNED = 7  # times that an arm plans, for the median

COLUMNS = (
    "cell arm library version status reason path shared requests median_us p10_us p90_us min_us rounds calls plan_us plan_on "
    "out_error lse_error distinct_bytes flat_bytes kv_bytes_read products_us device run"
).split()


def measure(cell, arms, device, *, rounds, seconds, product_rate, run):
    """Rows (dicts of COLUMNS) of one cell, one an arm of `arms` (name -> function that makes it).

    Rounds end early once `seconds` have passed with them, but not before LEAST_ROUNDS. `product_rate`: flop/s that the
    device reaches. `run` names the run in the rows.
    """
    common = dict(
        cell=cell.name, shared=int(cell.is_shared), requests=cell.num_requests, distinct_bytes=cell.distinct_bytes,
        flat_bytes=cell.flat_bytes, products_us=cell.flops / product_rate * 1e6, device=device.name, run=run,
    )  # fmt: skip
    rows = {name: dict.fromkeys(COLUMNS, "") | common | dict(arm=name) for name in arms}
    inputs = Inputs(device, cell)
    ready = {}
    for name, make in arms.items():
        with _noted(rows[name], device):
            ready[name] = _ready(make, inputs, rows[name])
    for name, times in _in_turns(device, ready, rounds, seconds).items():
        arm, graph = ready[name]
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        with _noted(rows[name], device):
            rows[name] |= dict(
                status="ok", median_us=statistics.median(times), p10_us=tenths[0], p90_us=tenths[-1], min_us=min(times),
                rounds=len(times), calls=graph.num_calls, path=arm.path(), plan_us=_planning(arm, device),
                plan_on="device" if arm.plans_on_device else "host",
            )  # fmt: skip
    return list(rows.values())


@contextlib.contextmanager
def _noted(row, device):
    """What keeps an arm from its result is the row's status: a peer's failure is a result, not the end."""
    try:
        yield
    except Unavailable as error:
        row |= dict(status="not run", reason=str(error))
    except NotServed as error:
        row |= dict(status="not served", reason=str(error))
    except Exception as error:
        row |= dict(status="failed", reason=f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
        device.synchronize()  # raises where the failure has taken the whole device with it: then it is the end


def _ready(make, inputs, row):
    """(arm, graph of its calls), once it has given right results by its own path; else an exception."""
    arm = make()
    row |= dict(library=arm.library, version=arm.version)
    arm.prepare(inputs)
    arm.plan()
    graph = inputs.device.capture([lambda copy=copy: arm.call(copy) for copy in range(len(inputs.copies))])
    of_out, of_lse = arm.errors(graph)
    row |= dict(path=arm.path(), kv_bytes_read=arm.kv_bytes_read() or "", out_error=of_out)
    row |= {} if of_lse is None else dict(lse_error=of_lse)
    for what, error in (("out", of_out), ("LSE", of_lse or 0.0)):
        if not error <= arm.tolerance:  # NaN neither
            raise ArithmeticError(f"WRONG RESULT: error of {what} {error:.1e}, expected at most {arm.tolerance}")
    return arm, graph


def _in_turns(device, ready, rounds, seconds):
    """Samples of each arm. Every round begins with another arm; a first round is not counted."""
    names = list(ready)
    samples = {name: [] for name in names}
    if not names:
        return samples
    device.round([graph for _, graph in ready.values()])
    begin = time.monotonic()
    for i in range(rounds):
        if i >= LEAST_ROUNDS and time.monotonic() - begin > seconds:
            break
        order = names[i % len(names) :] + names[: i % len(names)]
        for name, microseconds in zip(order, device.round([ready[name][1] for name in order])):
            samples[name].append(microseconds)
    return samples


def _planning(arm, device):
    """Median microseconds of planning anew, to the end of what it puts on the device."""
    if arm.plans_on_device:
        graph = device.capture([arm.plan] * PLANNED)
        return statistics.median(device.round([graph])[0] for _ in range(PLANNED))
    times = []
    for _ in range(PLANNED):
        device.synchronize()
        begin = time.perf_counter()
        arm.plan()
        device.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)
