"""CSV files of rows, and the tables made of them."""

import csv
import os
import statistics

from .measure import COLUMNS

OURS = "hw_auto"  # the arm that a user gets: it is set beside the best peer
NO_PEERS = ("headwater", "floor")  # libraries


def read(path):
    """Rows of a file that this module wrote."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {COLUMNS}")
        return list(reader)


def append(path, rows):
    """Adds rows to a file, which is made with a head where it is missing."""
    new = not os.path.exists(path) or os.path.getsize(path) == 0
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows({key: plain(value) for key, value in row.items()} for row in rows)


def plain(value):
    return f"{value:.6g}" if isinstance(value, float) else value


def latest(rows):
    """{cell: {arm: row}} of each cell's last run: times of different runs are not set side by side."""
    last = {row["cell"]: row["run"] for row in rows}
    out = {}
    for row in rows:
        if row["run"] == last[row["cell"]]:
            out.setdefault(row["cell"], {})[row["arm"]] = row
    return out


def markdown(rows):
    """The report: a table of cells, means, losses, planning, and what did not run."""
    cells = latest(rows)
    compared = {name: arms for name, arms in cells.items() if _best_peer(arms) and OURS in _times(arms)}
    parts = [_about(cells), _table(cells, compared), _means(compared), _losses(compared), _planning(cells), _missing(cells)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _times(arms):
    """{arm: microseconds} of what was measured."""
    return {name: float(row["median_us"]) for name, row in arms.items() if row["status"] == "ok"}


def _best_peer(arms):
    """(microseconds, arm) of the quickest, or None."""
    return min(((us, name) for name, us in _times(arms).items() if arms[name]["library"] not in NO_PEERS), default=None)


def _ratio(arms):
    """Of our time to the best peer's: below 1 ours is quicker."""
    return _times(arms)[OURS] / _best_peer(arms)[0]


def _limit(arms):
    """The least time: of reading every page once, or of the products; None where no kernel read."""
    read = _times(arms).get("read_once")
    return read and max(read, float(arms["read_once"]["products_us"]))


def _names(cells):
    """Of arms, in the order in which they were measured."""
    return list(dict.fromkeys(name for arms in cells.values() for name in arms))


def _lines(head, body):
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(out + ["| " + " | ".join(line) + " |" for line in body])


def _about(cells):
    rows = [row for arms in cells.values() for row in arms.values()]
    libraries = {f"{row['library']} {row['version']}".strip() for row in rows if row["library"] not in ("", "floor")}
    devices, runs = ({row[key] for row in rows} for key in ("device", "run"))
    spreads = [(float(r["p90_us"]) - float(r["p10_us"])) / float(r["median_us"]) for r in rows if r["status"] == "ok"]
    spread = f" Spread (p90 - p10 of the rounds): {statistics.median(spreads):.1%} of the median." if spreads else ""
    return (
        f"Microseconds of one attention call, medians; {', '.join(sorted(devices))}; {', '.join(sorted(libraries))}; "
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}.{spread} **limit**: `read_once`, or the products at the rate of "
        f"a large matrix product, whichever takes longer. **bold**: `{OURS}` is slower than the best peer."
    )


def _table(cells, compared):
    shown = [name for name in _names(cells) if any(name in _times(arms) for arms in cells.values())]
    body = []
    for cell, arms in cells.items():
        times = _times(arms)
        line = [cell] + [f"{time:.1f}" if time else "-" for time in (_limit(arms), *map(times.get, shown))]
        if cell in compared:
            ratio = f"{_ratio(arms):.2f}"
            line += [_best_peer(arms)[1], f"**{ratio}**" if _ratio(arms) > 1 else ratio]
        else:
            line += ["-", "-"]
        body.append(line)
    return _lines(["cell", "limit", *shown, "best peer", "auto / best peer"], body)


def _means(compared):
    if not compared:
        return ""
    body, mean = [], statistics.geometric_mean
    for word, shared in (("shared", "1"), ("unshared", "0")):
        group = [arms for arms in compared.values() if next(iter(arms.values()))["shared"] == shared]
        if not group:
            continue
        for name in sorted({name for arms in group for name in _times(arms)}):
            having = [arms for arms in group if name in _times(arms)]
            to_limit = [_times(arms)[name] / _limit(arms) for arms in having if _limit(arms)]
            to_peer = [_times(arms)[name] / _best_peer(arms)[0] for arms in having]
            means = f"{mean(to_limit):.2f}" if to_limit else "-", f"{mean(to_peer):.3f}"
            body.append([word, name, f"{len(having)} of {len(group)}", *means])
    return "Geometric means:\n\n" + _lines(["cells", "arm", "measured in", "/ limit", "/ best peer"], body)


def _losses(compared):
    lost = [(_ratio(arms), cell, _best_peer(arms)[1]) for cell, arms in compared.items() if _ratio(arms) > 1]
    if not lost:
        return f"`{OURS}` loses none of {len(compared)} cells." if compared else ""
    words = ", ".join(f"{cell} {ratio:.2f}x of {arm}" for ratio, cell, arm in sorted(lost, reverse=True))
    return f"`{OURS}` loses {len(lost)} of {len(compared)} cells: {words}."


def _planning(cells):
    body = []
    for name in _names(cells):
        rows = [arms[name] for arms in cells.values() if name in arms and arms[name]["status"] == "ok"]
        times = sorted(float(row["plan_us"]) for row in rows)
        if times and rows[0]["library"] != "floor":
            values = (statistics.median(times), times[0], times[-1])
            body.append([name, rows[0]["plan_on"], *(f"{value:.0f}" for value in values)])
    if not body:
        return ""
    title = "Planning, once a step, microseconds over the cells (host: called, and waited for; device: in a graph):"
    return title + "\n\n" + _lines(["arm", "on", "median", "least", "most"], body)


def _missing(cells):
    """NOT RUN, FAILED and NOT SERVED, with reasons, each once."""
    reasons = {}
    for cell, arms in cells.items():
        for name, row in arms.items():
            if row["status"] != "ok":
                reasons.setdefault((row["status"].upper(), name, row["reason"]), []).append(cell)
    lines = []
    for (status, name, reason), where in sorted(reasons.items()):
        places = f"{len(where)} cells" if len(where) > 3 else ", ".join(where)
        lines.append(f"- {status} {name} ({places}): {reason}")
    return "\n".join(lines)
