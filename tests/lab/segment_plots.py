"""What the experiment with segments draws and reads off: each plot with its title and its words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lab import draw
from lab.chains import Point, fewest_runs
from lab.measure import power, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawn = tuple["Figure", str, str]  # the figure, its title, and what is drawn
Ways = dict[str, list[Point]]
GRAPHS = {"ZOMI's layer": 1, "Q9's block": 5}  # activations that a layer's graph keeps, in inputs
ROOT = "√L segments"
TICKS = (5, 10, 20, 50, 100, 200)


def lowest(points: list[Point]) -> Point:
    """The setting with the lowest peak."""
    return min(points, key=lambda point: point.peak)


def trade(points: dict[str, Ways], insides: dict[str, float], depth: int) -> Drawn:
    """Bytes against runs for every way, and the lower bound below them."""
    figure, panels = draw.figure(columns=2, height=4.3)
    bounds = {}
    for panel, (kind, ways) in zip(panels, points.items(), strict=True):
        runs = fewest_runs(depth, GRAPHS[kind])
        bounds[kind] = [(r, waiting + insides[kind]) for waiting, r in enumerate(runs) if r < 6]
        panel.step(*zip(*bounds[kind], strict=True), where="post", color="black", linewidth=2.5)
        panel.lines[-1].set_label("lower bound")
        for (way, found), style in zip(ways.items(), draw.LINES, strict=False):
            x, y = [point.runs for point in found], [point.peak for point in found]
            hollow = "none" if way == "checkpoint_sequential" else style["color"]  # it hides ours
            marks = {**style, "linestyle": "", "markerfacecolor": hollow}
            panel.plot(x, y, label=way, markersize=5, **marks)
        for axis, ticks in ((panel.xaxis, (1, 1.5, 2, 3, 4, 5)), (panel.yaxis, TICKS)):
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
        panel.set_ylim(0.9 * bounds[kind][0][1], 1.2 * max(peak for _, peak in bounds[kind]))
        panel.set_title(f"{depth} of {kind}", fontsize=9)
        panel.set(xlabel="runs of a layer in one step", ylabel="peak, inputs of a layer")
    draw.legend_below(figure, panels[0], columns=5)
    simple, wide = points.values()
    best = lowest(simple["run_in_segments"])
    least = min(peak for runs, peak in next(iter(bounds.values())) if runs <= best.runs + 1e-9)
    title = (
        f"{best.setting} segments peak at {best.peak:.0f} inputs, {best.peak / least - 1:.0%} "
        f"above the lower bound; wide blocks at {lowest(wide['run_in_segments']).peak:.0f} in "
        f"segments, at {lowest(wide['segment_size']).peak:.0f} nested"
    )
    return (
        figure,
        title,
        f"Peak against runs of a layer for {', '.join(simple)}, and a lower bound.",
    )


def segments(ways: Ways, timed: dict[str, Any], depth: int) -> Drawn:
    """Peak and time against the number of segments."""
    figure, (left, right) = draw.figure(columns=2, height=3.4)
    ours = ways["run_in_segments"]
    numbers = [point.setting for point in ours]
    ys = {way: [p.peak for p in ways[way]] for way in ("run_in_segments", "checkpoint_sequential")}
    ys["n + L/n, rounded up"] = [n + math.ceil(depth / n) for n in numbers]
    draw.lines(left, numbers, ys)
    left.set(ylabel="peak, inputs of a layer", ylim=(0, None))
    seconds, flops = timed["seconds"], timed["flops"]
    names = {1: "plain"} | {n: f"{n} segments" for n in numbers if f"{n} segments" in seconds}
    slower = [ratio(seconds[name], seconds["plain"]) for name in names.values()]
    middles, spreads = zip(*slower, strict=True)
    counted = [flops[name] / flops["plain"] for name in names.values()]
    style: dict[str, Any] = {"markersize": 4, "linewidth": 1.4, **draw.LINES[0]}
    right.errorbar(list(names), middles, yerr=spreads, label="time", capsize=3, **style)
    right.plot(list(names), counted, label="operations", markersize=4, **draw.LINES[1])
    right.set_ylabel("times the plain step")
    right.set_ylim(0, 1.05 * max(1.6, *(sum(pair) for pair in slower)))
    right.legend(fontsize=8, frameon=False, loc="lower right")
    for panel in (left, right):
        panel.set_xlabel("segments")
    best = lowest(ours).setting
    title = (
        f"The peak is lowest at {best} segments (the square root of {depth} is "
        f"{math.sqrt(depth):.0f}); operations grow by at most {max(counted) - 1:.0%}"
    )
    return figure, title, f"Peak, time and operations by number of segments, {depth} layers."


def powers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For each way, the power of the depth with which the peak grows."""
    depths = [row["depth"] for row in rows]
    return {way: power(depths, [row["peaks"][way] for row in rows]) for way in rows[0]["peaks"]}


def by_depth(rows: list[dict[str, Any]]) -> Drawn:
    """Peak against depth."""
    figure, (axes,) = draw.figure(height=3.8)
    depths = [row["depth"] for row in rows]
    draw.lines(axes, depths, {way: [r["peaks"][way] for r in rows] for way in rows[0]["peaks"]})
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="peak, inputs of a layer")
    axes.minorticks_off()
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set_yticks(TICKS[:-1], [str(tick) for tick in TICKS[:-1]])
    found = powers(rows)
    title = f"√L segments peak as L^{found[ROOT]:.2f}, plain as L^{found['plain']:.2f}"
    return figure, title, "Peak by depth, both axes logarithmic."


def shares(rows: list[dict[str, Any]]) -> list[tuple[int, float, float, float, float]]:
    """For each depth L: saved by ZOMI's formula, in truth, added work by the formula, in truth."""
    return [
        (
            row["depth"],
            1 - 1 / math.sqrt(row["depth"]),
            1 - row["peaks"][ROOT] / row["peaks"]["plain"],
            2 / math.sqrt(row["depth"]),
            row["flops"][ROOT] / row["flops"]["plain"] - 1,
        )
        for row in rows
    ]


def rates(rows: list[dict[str, Any]]) -> Drawn:
    """ZOMI's two formulas against what was counted."""
    figure, (left, right) = draw.figure(columns=2, height=3.4)
    depths, claimed, saved, more, added = zip(*shares(rows), strict=True)
    percent = [[100 * share for share in part] for part in (claimed, saved, more, added)]
    two = [100 * (1 - 2 / math.sqrt(depth)) for depth in depths]
    draw.lines(left, depths, {"1 - √L/L": percent[0], "counted": percent[1], "1 - 2√L/L": two})
    draw.lines(right, depths, {"2√L/L": percent[2], "counted": percent[3]})
    left.set_ylabel("peak saved, %")
    right.set(ylabel="operations added, %", ylim=(0, None))
    for panel in (left, right):
        panel.set_xlabel("layers")
    title = (
        f"At {depths[-1]} layers {saved[-1]:.0%} is saved where the formula says "
        f"{claimed[-1]:.0%}, and {added[-1]:.0%} added where it says {more[-1]:.0%}"
    )
    return figure, title, "ZOMI's formulas for bytes and operations against the count, by depth."


def saved(depths: list[int], plain: list[int], checkpointed: list[int]) -> Drawn:
    """Peaks of Q9's model by depth, and what is between them."""
    figure, (left, right) = draw.figure(columns=2, height=3.2)
    gib = [[size / 2**30 for size in sizes] for sizes in (plain, checkpointed)]
    draw.lines(left, depths, {"plain": gib[0], "a checkpoint a block": gib[1]})
    difference = [a - b for a, b in zip(*gib, strict=True)]
    share = [100 * d / a for d, a in zip(difference, gib[0], strict=True)]
    right.plot(depths, share, markersize=4, **draw.LINES[2])
    left.set_ylabel("peak of activations, GiB")
    right.set(ylabel="% of it saved", ylim=(0, 100))
    for panel in (left, right):
        panel.set_xlabel("blocks")
    title = (
        f"From {depths[0]} to {depths[-1]} blocks, {depths[-1] / depths[0]:.0f} times the depth, "
        f"the bytes saved grow {difference[-1] / difference[0]:.1f} times"
    )
    return figure, title, "Q9's model, 1024 wide, 16 x 1024: peak by depth, and the share saved."


def share_saved(both: dict[str, dict[str, int]]) -> float:
    """Of a plain peak by kind, the share that the checkpointed one does without."""
    return 1 - sum(both["checkpointed"].values()) / sum(both["plain"].values())
