"""CSV files of rows, and the tables made of them."""

import csv
import os
import statistics

from .measure import COLUMNS

OURS, FLOOR = "headwater", "floor"


def read(path):
    """Rows of a file that this module wrote."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(COLUMNS):
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
    compared = {name: arms for name, arms in cells.items() if _best(arms, _is_peer) and _times(arms, _is_ours)}
    parts = [_about(rows), _table(cells), _means(compared), _losses(compared), _planning(cells), _missing(cells)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _is_ours(row):
    return row["library"] == OURS


def _is_peer(row):
    return row["library"] not in (OURS, FLOOR)


def _times(arms, wanted=lambda row: True):
    """{arm: microseconds} of what was measured."""
    return {name: float(row["median_us"]) for name, row in arms.items() if row["status"] == "ok" and wanted(row)}


def _best(arms, wanted):
    """(microseconds, arm) of the quickest, or None."""
    return min(((us, name) for name, us in _times(arms, wanted).items()), default=None)


def _auto(arms):
    """Time of the arm that a user gets: `hw_auto`, else the first of ours."""
    times = _times(arms, _is_ours)
    return times.get("hw_auto", next(iter(times.values())))


def _limit(arms):
    """The least time: of reading every page once, measured if it was, or of the products."""
    row = next(iter(arms.values()))
    read = _times(arms).get("read_once", float(row["floor_us"]))
    return max(read, float(row["products_us"]))


def _lines(head, body):
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(out + ["| " + " | ".join(line) + " |" for line in body])


def _about(rows):
    libraries = {f"{row['library']} {row['version']}".strip() for row in rows if row["library"] not in ("", FLOOR)}
    devices, runs = ({row[key] for row in rows} for key in ("device", "run"))
    spreads = [(float(r["p90_us"]) - float(r["p10_us"])) / float(r["median_us"]) for r in rows if r["status"] == "ok"]
    spread = f" Spread (p90 - p10 of the rounds): {statistics.median(spreads):.1%} of the median." if spreads else ""
    return (
        f"Microseconds of one attention call, medians; {', '.join(sorted(devices))}; {', '.join(sorted(libraries))}; "
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}.{spread} **limit**: reading every distinct page once, or the "
        "products, whichever takes longer. **bold**: `hw_auto` is slower than the best peer."
    )


def _table(cells):
    order = {}
    for arms in cells.values():
        order |= {name: None for name in arms}
    shown = [name for name in order if any(name in _times(arms) for arms in cells.values())]
    body = []
    for cell, arms in cells.items():
        times, best = _times(arms), _best(arms, _is_peer)
        line = [cell, f"{_limit(arms):.1f}"] + [f"{times[name]:.1f}" if name in times else "-" for name in shown]
        if best and _times(arms, _is_ours):
            ratio = f"{_auto(arms) / best[0]:.2f}"
            line += [best[1], f"**{ratio}**" if _auto(arms) > best[0] else ratio]
        else:
            line += ["-", "-"]
        body.append(line)
    return _lines(["cell", "limit", *shown, "best peer", "auto / best peer"], body)


def _means(compared):
    if not compared:
        return ""
    body = []
    for word, shared in (("shared", "1"), ("unshared", "0")):
        group = [arms for arms in compared.values() if next(iter(arms.values()))["shared"] == shared]
        if not group:
            continue
        names = {name for arms in group for name in _times(arms)}
        for name in sorted(names):
            having = [arms for arms in group if name in _times(arms)]
            mean = statistics.geometric_mean
            body.append(
                [
                    word, name, f"{len(having)} of {len(group)}",
                    f"{mean(_times(arms)[name] / _limit(arms) for arms in having):.2f}",
                    f"{mean(_times(arms)[name] / _best(arms, _is_peer)[0] for arms in having):.3f}",
                ]
            )  # fmt: skip
    return "Geometric means:\n\n" + _lines(["cells", "arm", "measured in", "/ limit", "/ best peer"], body)


def _losses(compared):
    lost = [
        (_auto(arms) / best[0], cell, best[1])
        for cell, arms in compared.items()
        if (best := _best(arms, _is_peer)) and _auto(arms) > best[0]
    ]
    if not lost:
        return f"`hw_auto` loses none of {len(compared)} cells." if compared else ""
    words = ", ".join(f"{cell} {ratio:.2f}x of {arm}" for ratio, cell, arm in sorted(lost, reverse=True))
    return f"`hw_auto` loses {len(lost)} of {len(compared)} cells: {words}."


def _planning(cells):
    body = []
    for name in dict.fromkeys(name for arms in cells.values() for name in arms):
        rows = [arms[name] for arms in cells.values() if name in arms and arms[name]["status"] == "ok"]
        times = sorted(float(row["plan_us"]) for row in rows)
        if times and rows[0]["library"] != FLOOR:
            values = (statistics.median(times), times[0], times[-1])
            body.append([name, rows[0]["plan_on"], *(f"{value:.0f}" for value in values)])
    if not body:
        return ""
    return "Planning, once a step, microseconds over the cells:\n\n" + _lines(["arm", "on", "median", "least", "most"], body)


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
