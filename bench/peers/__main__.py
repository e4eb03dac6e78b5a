"""Headwater's CUDA attention beside FlashInfer's and FlashAttention 3's: one process, the same inputs, arms in turns."""

import argparse
import fnmatch
import functools
import os
import sys
import time

from . import cells, device, fa3_arms, flashinfer_arms, floor_arms, headwater_arms, measure, report
from .arm import Unavailable

EPILOG = """
arms (all without --arms; one whose library is missing is NOT RUN, with the reason):
  read_once            a kernel that only reads every distinct page: the floor
  hw_flat, hw_auto, hw_forest   Headwater, planned on the host by that policy; hw_auto_device: planned on the GPU
  fi_flat              FlashInfer, BatchDecodeWithPagedKVCacheWrapper
  fi_cascade           its MultiLevelCascadeAttentionWrapper as it comes (fa3 kernels on Hopper)
  fi_cascade_fa2, fi_cascade_fa3_fa2, fi_cascade_2   the same levels by fa2; fa3 with fa2 for the leaves; two levels, fa2
  fi_shared_prefix     its BatchDecodeWithSharedPrefixPagedKVCacheWrapper
  fa3_flat, fa3_flat_32         vLLM's FlashAttention 3; KV split as it chooses, or up to 32 times
  fa3_cascade, fa3_cascade_32   vLLM's cascade of it: two calls and a merge

examples, from the root of the repository:
  python -m bench.peers --csv peers.csv --markdown peers.md
  python -m bench.peers --csv peers.csv --seconds 120 --append          # in pieces: again until nothing is left
  python -m bench.peers --cells '2lv_B64*' --arms 'hw_*,fa3_*' --csv part.csv
  python -m bench.peers --forest '4096[256*32]*2 2048*16' --heads 32/8/128 --csv mine.csv
  python -m bench.peers --report peers.csv other.csv --markdown all.md  # no GPU needed
  python -m bench.peers --list > cells.txt && headwater bench --device cuda --cells cells.txt
  python -m bench.peers --dry-run --cells 'tot_*' --csv dry.csv         # everything but the GPU: needs numpy

Exit status: 0 all that was asked for was measured or could not run here; 1 an arm failed or was wrong; 2 wrong arguments,
files or device; 3 time ran out.
"""

ARMS = {
    "read_once": floor_arms.ReadOnce,
    "hw_flat": functools.partial(headwater_arms.HostPlan, "flat"),
    "hw_auto": functools.partial(headwater_arms.HostPlan, "auto"),
    "hw_forest": functools.partial(headwater_arms.HostPlan, "forest"),
    "hw_auto_device": functools.partial(headwater_arms.DevicePlan, "auto"),
    "fi_flat": flashinfer_arms.Flat,
    "fi_cascade": flashinfer_arms.Cascade,
    "fi_cascade_fa2": functools.partial(flashinfer_arms.Levels, "fa2", "fa2"),
    "fi_cascade_fa3_fa2": functools.partial(flashinfer_arms.Levels, "fa3", "fa2"),
    "fi_cascade_2": functools.partial(flashinfer_arms.Levels, "fa2", "fa2", most=2),
    "fi_shared_prefix": flashinfer_arms.SharedPrefix,
    "fa3_flat": functools.partial(fa3_arms.Flat, 0),
    "fa3_flat_32": functools.partial(fa3_arms.Flat, 32),
    "fa3_cascade": functools.partial(fa3_arms.Cascade, 0),
    "fa3_cascade_32": functools.partial(fa3_arms.Cascade, 32),
}

DRY_ARMS = {
    "hw_flat": functools.partial(headwater_arms.CpuPlan, "flat"),
    "hw_auto": functools.partial(headwater_arms.CpuPlan, "auto"),
    "hw_forest": functools.partial(headwater_arms.CpuPlan, "forest"),
    "numpy": floor_arms.Numpy,
    "fi_flat": flashinfer_arms.Flat,
    "fa3_flat": functools.partial(fa3_arms.Flat, 0),
}


class UsageError(Exception):
    """What was asked for cannot be begun; the reason."""


def arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="*", help="names of cells, with * and ?, separated by commas (default: all 48)")
    parser.add_argument("--arms", default="*", help="names of arms, likewise")
    parser.add_argument("--forest", help="one cell of your own instead: tokens of nodes, in the notation of bench/peers/cells.py")
    parser.add_argument("--heads", default="32/8/128", help="of --forest: q heads/KV heads/head size (default: %(default)s)")
    parser.add_argument("--csv", help="rows go here, cell by cell")
    parser.add_argument("--append", action="store_true", help="keep the rows of --csv, measure cells that it lacks")
    parser.add_argument("--markdown", help="the report goes here (default: standard output)")
    parser.add_argument("--rounds", type=int, default=30, help="samples of an arm and cell (default: %(default)s)")
    parser.add_argument(
        "--cell-seconds", type=float, default=1.0, help="rounds of a cell end after this, but for the first seven (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0, help="no cell is begun that could end after this (default: no limit)")
    parser.add_argument("--report", nargs="+", metavar="CSV", help="only make the report of these files")
    parser.add_argument("--list", action="store_true", help="only print the cells, as `headwater bench --cells` reads them")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, by numpy, with 1/64 of the tokens")
    options = parser.parse_args(argv)
    if options.rounds < measure.LEAST_ROUNDS:
        parser.error(f"--rounds {options.rounds}, expected at least {measure.LEAST_ROUNDS}")
    if options.csv and not options.append and os.path.exists(options.csv):
        parser.error(f"--csv {options.csv} exists: --append measures what it lacks")
    for flag, path in (("--csv", options.csv), ("--markdown", options.markdown)):
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"{flag} {path}: there is no such folder")
    return options


def chosen(names, patterns, what):
    """Names that some pattern takes, in their own order; a pattern that takes none is an error."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"--{what} {pattern}: there is no such name; there are {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]


def chosen_cells(options):
    if options.forest:
        try:
            heads = [int(n) for n in options.heads.split("/")]
            if len(heads) != 3 or min(heads) < 1 or heads[0] % heads[1]:
                raise ValueError(f"--heads {options.heads}, expected q heads/KV heads/head size, q heads a multiple of KV heads")
            return [cells.Cell(options.forest.replace(" ", "_"), *heads, cells.parse(options.forest))]
        except ValueError as error:
            raise UsageError(str(error)) from None
    by_name = {cell.name: cell for cell in cells.standard()}
    return [by_name[name] for name in chosen(list(by_name), options.cells, "cells")]


def usable(arms):
    """Arms, made once to see whether they can be: one that cannot is replaced by one that says why."""
    out = {}
    for name, make in arms.items():
        try:
            make()
            out[name] = make
        except Unavailable as error:
            print(f"NOT RUN {name}: {error}", file=sys.stderr)
            out[name] = functools.partial(_refuse, str(error))
    return out


def _refuse(reason):
    raise Unavailable(reason)


def progress(done, count, name, begin):
    """A bar on standard error; on a terminal in place."""
    width = 30
    filled = width * done // max(count, 1)
    text = f"[{'#' * filled}{'.' * (width - filled)}] {done}/{count} {time.monotonic() - begin:5.0f} s  {name}"
    end = "\n" if done == count or not sys.stderr.isatty() else ""
    print(f"\r{text:100}" if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)


def read_all(paths):
    try:
        return [row for path in paths for row in report.read(path)]
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def run_cells(options, wanted, begin):
    """Measures; returns (rows, whether time ran out)."""
    arms = DRY_ARMS if options.dry_run else ARMS
    arms = {name: arms[name] for name in chosen(list(arms), options.arms, "arms")}
    rows = read_all([options.csv]) if options.csv and os.path.exists(options.csv) else []
    present = report.latest(rows)
    left = [cell for cell in wanted if any(name not in present.get(cell.name, {}) for name in arms)]
    if not left:
        return rows, False
    try:
        on = device.Host() if options.dry_run else device.Cuda()
    except (ImportError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    arms = usable(arms)
    settings = dict(rounds=options.rounds, seconds=options.cell_seconds, product_rate=on.product_rate())
    print(f"a large product: {settings['product_rate']:.3g} flop/s", file=sys.stderr)
    settings["run"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    longest = 0.0
    for done, cell in enumerate(left):
        progress(done, len(left), cell.name, begin)
        started = time.monotonic()
        if options.seconds and started - begin + longest > options.seconds:
            print(f"\ntime is up before {cell.name}: --append goes on from there", file=sys.stderr)
            return rows, True
        new = measure.measure(cell.shrunk(64) if options.dry_run else cell, arms, on, **settings)
        on.release()
        for row in new:
            if row["status"] == "failed":
                print(f"\nFAILED {row['arm']} on {cell.name}: {row['reason']}", file=sys.stderr)
        if options.csv:
            report.append(options.csv, new)
        rows += [{key: str(report.plain(value)) for key, value in row.items()} for row in new]
        longest = max(longest, time.monotonic() - started)
    progress(len(left), len(left), "", begin)
    return rows, False


def main(argv=None):
    options = arguments(argv)
    try:
        return answer(options)
    except UsageError as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2


def answer(options):
    """Does what the options ask for; returns the exit status."""
    begin = time.monotonic()
    wanted = chosen_cells(options)
    if options.list:
        print("\n".join(map(cells.notation, wanted)))
        return 0
    if options.report:
        rows, late = read_all(options.report), False
    else:
        rows, late = run_cells(options, wanted, begin)
    text = report.markdown(rows)
    if options.markdown:
        with open(options.markdown, "w") as file:
            file.write(text)
    else:
        print(text)
    failed = any(row["status"] == "failed" for arms in report.latest(rows).values() for row in arms.values())
    return 1 if failed else 3 if late else 0


if __name__ == "__main__":
    sys.exit(main())
