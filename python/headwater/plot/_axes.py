"""What the pictures have in common: axes, colours, labels that are left out where they do not fit, reading of JSON.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; what differs in meaning differs in
lightness or in its line, too.
"""

import json
import os
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.text import Text

BLUE, SKY, ORANGE, GREEN, RED, PURPLE = "#0072b2", "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7"
GREY, PALE, INK = "#8c959f", "#dde1e6", "#24292f"


def axes_of(ax, width, height):
    """`ax`, or the only axes of a new figure of that size in inches."""
    if ax is not None:
        return ax
    return Figure(figsize=(width, height), layout="constrained", facecolor="white").subplots()


def dress(ax, title, xlabel, ylabel=None):
    """Title on the left, no box; the legend, if there is one, lies between the title and the axes."""
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=26)
    ax.set_xlabel(xlabel, color=INK)
    if ax.get_ylabel() == "" and ylabel:
        ax.set_ylabel(ylabel, color=INK)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(labelsize=9, color=GREY)


def legend_above(ax, handles, labels):
    """One line of entries between title and axes."""
    ax.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3, ncols=len(labels), frameon=False,
        fontsize=9, handlelength=1.4, columnspacing=1.4, borderpad=0,
    )  # fmt: skip


class FittingText(Text):
    """The first of `texts` that fits into `patch` as it is drawn; none where none does."""

    def __init__(self, ax, patch, texts, color):
        box = patch.get_bbox()
        x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        super().__init__(x, y, "", color=color, fontsize=8, ha="center", va="center")
        self.set_bbox(dict(facecolor=patch.get_facecolor(), edgecolor="none", pad=1))  # over lines and hatches
        self._patch, self._texts = patch, texts
        self.set_in_layout(False)
        ax.add_artist(self)

    def draw(self, renderer):
        room = self._patch.get_window_extent(renderer)
        for text in self._texts:
            self.set_text(text)
            mine = self.get_window_extent(renderer)
            if mine.width + 4 <= room.width and mine.height + 1 <= room.height:
                return super().draw(renderer)
        self.set_text("")


def document_of(source, argument):
    """A parsed JSON document: `source` itself, or what the file of that path holds."""
    if isinstance(source, (str, os.PathLike)):
        with open(source, encoding="utf-8") as file:
            return json.load(file)
    if isinstance(source, (Mapping, Sequence)):
        return source
    raise TypeError(f"{argument} is of type {type(source).__name__}, expected a path or what json.load returns")


def human_bytes(count):
    """1234567 -> "1.23 MB"."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count:.0f} B"


def human_us(us):
    """1234.5 -> "1.23 ms"."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
