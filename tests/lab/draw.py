"""How the lab draws: the same colours for the same kinds everywhere, readable in grey."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From dark to light, so that they differ in grey too; hatches tell neighbours apart in print.
COLOURS = {
    "weights": "#1b2a49",
    "optimizer state": "#2f5d8a",
    "gradients": "#4c8c6b",
    "data": "#8a8f98",
    "activations": "#e0a030",
    "temporary": "#f3d9a4",
}
HATCHES = {"optimizer state": "//", "activations": "..", "temporary": "\\\\"}
# Lines: each colour with a mark and a dash of its own.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#1b2a49", "marker": "o", "linestyle": "-"},
    {"color": "#c25b12", "marker": "s", "linestyle": "--"},
    {"color": "#4c8c6b", "marker": "^", "linestyle": "-."},
    {"color": "#8a5a9e", "marker": "D", "linestyle": ":"},
    {"color": "#2f8fb0", "marker": "v", "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#6b6b6b", "marker": "x", "linestyle": (0, (1, 1))},
)
_STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}
mpl.rcParams.update(_STYLE)


def figure(columns: int = 1, height: float = 3.6, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with its axes, row by row."""
    found = Figure(figsize=(7.2, height), layout="constrained")
    return found, list(found.subplots(rows, columns, squeeze=False).flat)


def unit_of(most: float) -> tuple[float, str]:
    """The unit in which the largest number of bytes reads well."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return float(size), name
    return 1.0, "bytes"


def stacked_bars(axes: Axes, bars: Mapping[str, Mapping[str, int]]) -> None:
    """A bar for each name, stacked by kind, with its total at the end."""
    unit, word = unit_of(max(sum(parts.values()) for parts in bars.values()))
    names = list(bars)
    kinds = [kind for kind in COLOURS if any(parts.get(kind) for parts in bars.values())]
    left = [0.0] * len(names)
    for kind in kinds:
        sizes = [bars[name].get(kind, 0) / unit for name in names]
        style: dict[str, Any] = {
            "color": COLOURS[kind],
            "hatch": HATCHES.get(kind, ""),
            "edgecolor": "white",
        }
        axes.barh(names, sizes, left=left, label=kind, linewidth=0, **style)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for number, total in enumerate(left):
        place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{total:.3g}", (total, number), **place)
    axes.invert_yaxis()
    axes.set(xlim=(0, max(left) * 1.12), xlabel=word)
    axes.grid(visible=False, axis="y")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.45, 0.0),
        borderaxespad=4.5,  # of its letters: below the numbers and the unit
        ncols=len(kinds),
        fontsize=8,
        frameon=False,
        columnspacing=1.0,
        handlelength=1.4,
    )


Rows = Sequence[Mapping[str, int]]


def stacked_timelines(panels: Mapping[str, Rows], *, rows: int = 1, height: float = 3.4) -> Figure:
    """Panels with a title each: live bytes after each operation of a step, stacked by kind."""
    most = max(sum(row.values()) for steps in panels.values() for row in steps)
    found, axes = figure(columns=len(panels) // rows, rows=rows, height=height)
    for panel, (title, steps) in zip(axes, panels.items(), strict=True):
        _stacked_timeline(panel, steps, most)
        panel.set_title(title, fontsize=9)
    legend_below(found, axes[0], columns=6)
    return found


def legend_below(found: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels: that of `axes`."""
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
    found.legend(*axes.get_legend_handles_labels(), fontsize=8, frameon=False, **place)


def _stacked_timeline(axes: Axes, rows: Rows, most: float) -> None:
    unit, word = unit_of(most)
    kinds = [kind for kind in COLOURS if any(row.get(kind) for row in rows)]
    layers = [[row.get(kind, 0) / unit for row in rows] for kind in kinds]
    shares = [100 * number / max(1, len(rows) - 1) for number in range(len(rows))]
    stack = axes.stackplot(shares, layers, labels=kinds, colors=[COLOURS[k] for k in kinds])
    for part, kind in zip(stack, kinds, strict=True):
        part.set_hatch(HATCHES.get(kind, ""))
        part.set_edgecolor("white")
        part.set_linewidth(0)
    axes.set_ylim(0, most / unit * 1.05)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the step's operations")
    axes.set_ylabel(word)


def lines(axes: Axes, x: Sequence[float], ys: Mapping[str, Sequence[float]]) -> None:
    """A line for each name, with marks that differ."""
    for (name, y), style in zip(ys.items(), LINES, strict=False):
        axes.plot(x, y, label=name, markersize=4, linewidth=1.4, **style)
    axes.legend(fontsize=8, frameon=False)


def save(found: Figure, path: Path, title: str) -> None:
    """Write path.svg, whose text stays text, and path.png; the title says the finding."""
    found.suptitle(textwrap.fill(title, 72), fontsize=10.5, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    found.savefig(path.with_suffix(".png"), dpi=144)
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": path.name}):
        found.savefig(text, format="svg", metadata={"Date": None})
    # Names in a page must differ between plots.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{path.name}-", text.getvalue())
    path.with_suffix(".svg").write_text(svg[svg.index("<svg") :], encoding="utf-8")
