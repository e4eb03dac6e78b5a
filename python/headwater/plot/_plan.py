"""What a plan found and decided: the sharing forest, and the bytes of K and V that it reads.

Both are drawn from the plan's JSON form (docs/plan_json.md). A node of the forest is a range of tokens [begin, end) that
its members have in common; the nodes of a request, root first, are its whole KV. A node is read once where it is split
off, else by each part below it that is read for itself: a request, or a node that is split off together with it.
"""

import json
from collections import defaultdict
from collections.abc import Mapping

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

from .. import _core
from ._axes import BLUE, GREY, INK, PALE, SKY, FittingText, axes_of, document_of, dress, human_bytes, legend_above

_SIZES = {"f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1}


class _Forest:
    """The nodes of a plan's JSON form, and the order in which requests lie below each other."""

    def __init__(self, plan):
        #: Whether something was decided for this shape; of a Batch only the sharing is known.
        self.decided = not isinstance(plan, _core.Batch)
        if not self.decided:
            shape = _core.AttentionShape(1, 1, 64)
            plan = _core.Planner().plan(shape, plan, _core.PlanOptions(policy="forest"))
        self.document = json.loads(plan.to_json()) if isinstance(plan, _core.Plan) else document_of(plan, "plan")
        if not isinstance(self.document, Mapping) or not {"forest", "stats", "shape"} <= self.document.keys():
            raise ValueError("plan has no forest, stats and shape, expected a Plan, a Batch or the JSON form of a plan")
        self.stats = self.document["stats"]
        self.nodes = self.document["forest"]
        if self.stats["num_requests"] > 0 and not self.nodes:
            raise ValueError('plan has an empty forest: nothing was looked for, expected a plan with cascade "auto" or "on"')
        self.children = defaultdict(list)
        for node in self.nodes:
            self.children[node["parent"]].append(node)
        self.depth = {}
        self.lanes = {}  # of each request, its place from the top
        for node in self.nodes:  # depth first: parents come before their children
            self.depth[node["id"]] = self.depth.get(node["parent"], -1) + 1
            if len(node["requests"]) == 1:
                self.lanes.setdefault(node["requests"][0], len(self.lanes))
        for request in range(self.stats["num_requests"]):  # without tokens
            self.lanes.setdefault(request, len(self.lanes))

    def readings(self, node):
        """How often the plan reads the node's tokens."""
        if node["split"] or len(node["requests"]) == 1:
            return 1
        return sum(1 if child["split"] else self.readings(child) for child in self.children[node["id"]])

    def token_bytes(self):
        """K and V of one token, in one layer."""
        shape = self.document["shape"]
        return shape["num_kv_heads"] * (shape["head_dim_qk"] + shape["head_dim_vo"]) * _SIZES[shape["kv_dtype"]]


def _tokens(node):
    return node["end"] - node["begin"]


def forest(plan, ax=None):
    """The sharing forest: width is tokens, a lane is a request; a span that several share is one block across their lanes.

    Args:
      plan: a headwater.Plan, a headwater.Batch (page tables: their sharing alone), the JSON form of a plan, parsed, or
        the path of a file that holds it (`headwater explain --json`).
      ax: matplotlib Axes; None: those of a new figure.

    Returns the Axes. Raises ValueError for a plan without a forest (cascade "off").
    """
    found = _Forest(plan)
    count = len(found.lanes)
    ax = axes_of(ax, 9, min(max(0.24 * count, 1.2), 8) + 1.3)
    kinds = {}
    for node in found.nodes:
        if _tokens(node) == 0:
            continue
        members = len(node["requests"])
        top = min(found.lanes[r] for r in node["requests"])
        if members == 1:
            kind, style, ink = "own", dict(facecolor=PALE), INK
        elif node["split"] or not found.decided:
            kind = "shared, read once" if found.decided else "shared"
            style, ink = dict(facecolor=BLUE), "white"
        else:
            kind, style, ink = "shared, read apart", dict(facecolor=SKY, hatch="///"), INK
        block = Rectangle((node["begin"], top + 0.06), _tokens(node), members - 0.12, edgecolor="white", lw=0.8, **style)
        ax.add_patch(block)
        for lane in range(top + 1, top + members):  # members stay visible
            ax.plot([node["begin"], node["end"]], [lane, lane], color="white", lw=0.6, alpha=0.5)
        long = f"{_tokens(node)} tokens" + (f" of {members}" if members > 1 else "")
        FittingText(ax, block, [long, str(_tokens(node))], ink)
        kinds.setdefault(kind, Patch(**style))
    ax.set_xlim(min((n["begin"] for n in found.nodes), default=0), max((n["end"] for n in found.nodes), default=1))
    ax.set_ylim(count, 0)
    _name_lanes(ax, found.lanes)
    dress(ax, _title(found), "position in the request, tokens", "request")
    order = sorted(kinds, key=["shared", "shared, read once", "shared, read apart", "own"].index)
    legend_above(ax, [kinds[k] for k in order], order)
    return ax


def _name_lanes(ax, lanes):
    requests = sorted(lanes, key=lanes.get)
    step = -(-len(requests) // 32)
    ax.set_yticks([i + 0.5 for i in range(0, len(requests), step)], [str(r) for r in requests[::step]])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _title(found):
    stats = found.stats
    shared = sum(1 for n in found.nodes if len(n["requests"]) > 1 and _tokens(n) > 0)
    text = f"{stats['num_requests']} requests, {shared} shared {'span' if shared == 1 else 'spans'}"
    if not found.decided:
        return text
    share = stats["kv_bytes_read"] / max(stats["kv_bytes_flat"], 1)
    return f"{text}; {found.document['path']}, reads {100 * share:.3g} % of flat's KV bytes"


def kv_bytes(plan, ax=None, *, by="level", most=12):
    """The byte model: K and V that flat attention reads in one layer, and that the plan reads.

    Args:
      plan: a headwater.Plan, its JSON form, parsed, or the path of a file that holds it.
      ax: matplotlib Axes; None: those of a new figure.
      by: "level": rows are depths of the forest; "span": shared spans, those that flat reads most of first, and what
        requests have for themselves.
      most: with "span", of more spans the rest is one row.

    The last row is the plan as a whole, counted over its work items. Rows above are the forest's tokens: windows,
    repeated reading for many query rows and the cuts of batch-invariant mode are in the last row alone.
    Returns the Axes. Raises ValueError for a plan without a forest (cascade "off").
    """
    if by not in ("level", "span"):
        raise ValueError(f'by = "{by}", expected "level" or "span"')
    if isinstance(plan, _core.Batch):
        raise ValueError("plan is a Batch, expected a Plan: bytes depend on the shape and on what was decided")
    found = _Forest(plan)
    rows = _rows_by_level(found) if by == "level" else _rows_by_span(found, most)
    rows.append(("whole plan", found.stats["kv_bytes_flat"], found.stats["kv_bytes_read"]))
    ax = axes_of(ax, 9, 0.5 * len(rows) + 1.5)
    widest = max(max(flat, read) for _, flat, read in rows) or 1
    for i, (_, flat, read) in enumerate(rows):
        for value, offset, color in ((flat, -0.19, GREY), (read, 0.19, BLUE)):
            ax.barh(i + offset, value, 0.36, color=color)
            ax.text(value + 0.008 * widest, i + offset, human_bytes(value), va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlim(0, 1.12 * widest)
    ax.axhline(len(rows) - 1.5, color=PALE, lw=1)
    ax.xaxis.set_major_formatter(EngFormatter("B"))
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.tick_params(axis="y", length=0)
    dress(ax, _title(found), "K and V read in one layer, bytes")
    legend_above(ax, [Patch(color=GREY), Patch(color=BLUE)], ["flat", "this plan"])
    return ax


def _bytes_of(found, nodes):
    """What flat and the plan read of some nodes."""
    size = found.token_bytes()
    flat = sum(_tokens(n) * len(n["requests"]) for n in nodes) * size
    return flat, sum(_tokens(n) * found.readings(n) for n in nodes) * size


def _rows_by_level(found):
    levels = defaultdict(list)
    for node in found.nodes:
        levels[found.depth[node["id"]]].append(node)
    return [(f"level {depth}", *_bytes_of(found, levels[depth])) for depth in sorted(levels)]


def _rows_by_span(found, most):
    shared = [n for n in found.nodes if len(n["requests"]) > 1 and _tokens(n) > 0]
    shared.sort(key=lambda n: (-_tokens(n) * len(n["requests"]), n["begin"]))
    rows = [
        (f"tokens {n['begin']}..{n['end']} of {len(n['requests'])} requests", *_bytes_of(found, [n]))
        for n in shared[:most]
    ]
    if len(shared) > most:
        rows.append((f"{len(shared) - most} more spans", *_bytes_of(found, shared[most:])))
    own = [n for n in found.nodes if len(n["requests"]) == 1]
    return [*rows, ("own tokens", *_bytes_of(found, own))]
