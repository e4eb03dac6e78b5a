"""What `headwater bench --json` and `headwater bench-serving --json` measured."""

from collections.abc import Mapping

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ._axes import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, axes_of, document_of, dress, human_us, legend_above

_POLICIES = {"flat": GREY, "auto": BLUE, "two_level": ORANGE, "vllm": PURPLE, "forest": GREEN}


def bench(results, ax=None):
    """Median times of the cells of `headwater bench`, a bar for each policy, with the limit of the machine.

    Args:
      results: the array that `headwater bench --json FILE` writes, parsed, or the path of FILE. Gates are left out.
      ax: matplotlib Axes; None: those of a new figure.

    Behind each bar: the time and, but for the first policy, the base's time / its time. Returns the Axes.
    """
    entries = document_of(results, "results")
    if isinstance(entries, Mapping):
        raise ValueError("results is an object, expected the array that `headwater bench --json` writes")
    entries = [e for e in entries if isinstance(e, Mapping) and "median_us" in e]
    if not entries:
        raise ValueError("results has no entry with median_us, expected what `headwater bench --json` writes")
    cells = {}
    for entry in entries:
        cells.setdefault(_cell(entry), []).append(entry)
    policies = list(dict.fromkeys(e["policy"] for e in entries))
    ax = axes_of(ax, 9, 0.24 * len(entries) + 0.14 * len(cells) + 1.5)
    y, places = 0.0, []
    times = [x for e in entries for x in (e["median_us"], e["limit_us"]) if x > 0]
    low, high = min(times, default=1), max(times, default=1)
    for arms in cells.values():
        places.append(y + (len(arms) - 1) / 2)
        for i, arm in enumerate(arms):
            ax.barh(y, arm["median_us"], 0.84, color=_color_of(policies, arm["policy"]))
            if arm["limit_us"] > 0:
                ax.plot([arm["limit_us"]] * 2, [y - 0.5, y + 0.5], color=RED, lw=2, solid_capstyle="butt")
            text = human_us(arm["median_us"]) + (f", {arm['speedup']:.2f}x" if i else "")
            end = max(arm["median_us"], arm["limit_us"])
            ax.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
            y += 1
        y += 0.6
    ax.set_xscale("log")
    ax.set_xlim(low / 2, high * (high / low * 2) ** 0.25)  # labels want room behind the longest bar
    ax.xaxis.set_major_locator(LogLocator(numticks=12))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human_us(x)))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(y - 0.9, -0.7)
    ax.set_yticks(places, list(cells))
    ax.tick_params(axis="y", length=0)
    dress(ax, f"headwater bench, {entries[0]['device']}, {entries[0]['isa']}", "median time of one layer's attention")
    handles = [Patch(color=_color_of(policies, p)) for p in policies]
    legend_above(ax, [*handles, Line2D([], [], color=RED, lw=2)], [*policies, "limit of the machine"])
    return ax


def _cell(entry):
    """A name that tells a cell from the others."""
    heads = f"{entry['num_qo_heads']}/{entry['num_kv_heads']}/{entry['head_dim_qk']}"
    kv = "" if entry["kv_dtype"] == entry["dtype"] else f", KV {entry['kv_dtype']}"
    return f"{entry['workload']}\n{heads} {entry['dtype']}{kv}"


def _color_of(policies, policy):
    return _POLICIES.get(policy, RED if policies.index(policy) % 2 else INK)


#: Title, label of the axis, field of the line, field of the dashed line.
_VALUES = {
    "throughput": ("Throughput", "tokens per second, all requests", "aggregate_tps", None),
    "ttft": ("Time to the first token", "seconds, mean (dashed: 95th percentile)", "ttft_mean_s", "ttft_p95_s"),
}


def serving(results, ax=None, *, value="throughput"):
    """Throughput, or time to the first token, against concurrency.

    Args:
      results: the object that `headwater bench-serving --json FILE` writes, parsed, or the path of FILE. With `--pair`
        there are two lines: cascade on and off.
      ax: matplotlib Axes; None: those of a new figure.
      value: "throughput": tokens of all requests that ended well / time in rounds; "ttft": mean, and dashed the 95th
        percentile.

    Returns the Axes.
    """
    if value not in _VALUES:
        raise ValueError(f'value = "{value}", expected "throughput" or "ttft"')
    document = document_of(results, "results")
    if not isinstance(document, Mapping) or not document.get("levels"):
        raise ValueError("results has no levels, expected the object that `headwater bench-serving --json` writes")
    title, ylabel, solid, dashed = _VALUES[value]
    ax = axes_of(ax, 6, 4)
    arms = list(dict.fromkeys(level.get("cascade", "") for level in document["levels"]))
    handles = []
    for arm, color, marker in zip(arms, (BLUE, GREY), "os"):
        levels = [x for x in document["levels"] if x.get("cascade", "") == arm and x["ok"] > 0]
        levels.sort(key=lambda x: x["concurrency"])
        x = [level["concurrency"] for level in levels]
        handles += ax.plot(x, [level[solid] for level in levels], color=color, marker=marker, ms=5)
        if dashed:
            ax.plot(x, [level[dashed] for level in levels], "--", color=color, marker=marker, ms=3.5, lw=1.2)
    ax.set_xscale("log", base=2)
    ticks = sorted({level["concurrency"] for level in document["levels"]})
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color=PALE, lw=0.8)
    ax.set_axisbelow(True)
    dress(ax, title, f"requests at once\n{_asked(document)}", ylabel)
    if len(arms) > 1:
        legend_above(ax, handles, [f"cascade {arm}" for arm in arms])
    return ax


def _asked(document):
    """What was asked of which model."""
    if "trace" in document:
        return f"{document['model']}, {document['trace']}"
    return f"{document['model']}, {document['shared_prefix_tokens']} shared + {document['prompt_tokens']} own tokens in"
