"""`python -m headwater.plot KIND JSON PICTURE`: a picture of a file, for instance of `headwater explain --json`."""

import argparse
import json
import sys

from matplotlib import rc_context
from matplotlib.figure import Figure

from . import bench, forest, kv_bytes, serving

_KINDS = {
    "forest": (forest, "sharing forest of a plan (headwater explain --json)"),
    "bytes": (kv_bytes, "bytes of K and V by level of the same"),
    "spans": (lambda document, ax=None: kv_bytes(document, ax, by="span"), "bytes of K and V by shared span of the same"),
    "bench": (bench, "times of headwater bench --json"),
    "serving": (None, "throughput and time to the first token of headwater bench-serving --json"),
}


def _both(document):
    figure = Figure(figsize=(11, 4), layout="constrained", facecolor="white")
    for ax, value in zip(figure.subplots(1, 2), ("throughput", "ttft")):
        serving(document, ax, value=value)
    return figure


def main(arguments=None):
    """Returns the exit code: 0, or 2 with a message where the input cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m headwater.plot", description=__doc__)
    parser.add_argument("kind", choices=_KINDS, help="; ".join(f"{name}: {what}" for name, (_, what) in _KINDS.items()))
    parser.add_argument("json", help="file, -: standard input")
    parser.add_argument("picture", help="file to write; its suffix is the format: svg, png, pdf")
    given = parser.parse_args(arguments)
    try:
        if given.json == "-":
            document = json.load(sys.stdin)
        else:
            with open(given.json, encoding="utf-8") as file:
                document = json.load(file)
        figure = _both(document) if given.kind == "serving" else _KINDS[given.kind][0](document).figure
        # The same input gives the same bytes; letters stay letters.
        with rc_context({"svg.hashsalt": "headwater", "svg.fonttype": "none"}):
            dated = given.picture.endswith((".svg", ".pdf"))
            key = "Date" if given.picture.endswith(".svg") else "CreationDate"
            figure.savefig(given.picture, dpi=150, metadata={key: None} if dated else None)
    except KeyError as error:
        return _refuse(f"{given.json} lacks the field {error}")
    except (OSError, ValueError, TypeError) as error:
        return _refuse(error)
    return 0


def _refuse(why):
    print(f"headwater.plot: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
