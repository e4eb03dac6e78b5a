"""Pictures of plans and of measurements, by matplotlib (`pip install 'headwater[plot]'`).

    ax = headwater.plot.forest(plan)                  # who shares which tokens, and what is read once
    ax = headwater.plot.kv_bytes(plan, by="span")     # bytes of K and V, against flat attention
    ax = headwater.plot.bench("bench.json")           # of `headwater bench --json bench.json`
    ax = headwater.plot.serving("serving.json", value="ttft")    # of `headwater bench-serving --json serving.json`
    ax.figure.savefig("picture.svg")

Each draws on the `ax` that it is given, or on that of a new figure, and returns it. pyplot is not imported, no setting
of matplotlib is changed. Bytes are of one layer. `python -m headwater.plot` does the same from files.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "headwater.plot draws with matplotlib, which is not installed: pip install 'headwater[plot]'", name=error.name
    ) from None

from ._measured import bench, serving  # noqa: E402
from ._plan import forest, kv_bytes  # noqa: E402

__all__ = ["bench", "forest", "kv_bytes", "serving"]
