"""Segments: what checkpointing saves and costs by their number, by depth, and at the very best."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from lab import checkpointed_gpt2, segment_plots
from lab.chains import WAYS, Point, chain, flops_of, measured, plain
from lab.measure import alternating, peak_of, ratio, rehearsed
from lab.notebook import Lab, in_part, needs
from lab.segment_plots import GRAPHS, ROOT

ORDER = 4
TITLE = "Segments"
QUESTION = "How many segments are best, what does depth change, and how far is it from the optimum?"
SECONDS = {"quick": 44, "full": 65}
CLAIMS = (
    *("zomi-root", "zomi-twice", "zomi-rate"),
    *("q9-checkpoint-depth", "lab-checkpoint", "l97-checkpoint-time"),
)

DEPTH = 36
NUMBERS = (1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36)
SETTINGS = {
    "run_in_segments": NUMBERS,
    "checkpoint_sequential": NUMBERS,
    "segment_size": (1, 2, 3, 4, 6, 9, 12, 18),
    "optimal schedule": (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 36),
}
QUICK = {
    "run_in_segments": (1, 2, 4, 6, 9, 12, 18, 36),
    "checkpoint_sequential": (1, 2, 4, 6, 9, 12, 18, 36),
    "segment_size": (1, 3, 6, 12),
    "optimal schedule": (2, 4, 6, 10, 24),
}
DEPTHS = (4, 9, 16, 25, 36, 49, 64, 100)  # squares: sqrt(L) segments of sqrt(L) layers


def run(lab: Lab) -> None:
    """Exact bytes and runs of short chains, times of wider ones, and two models at full size."""
    lab.say(
        f"A chain of {DEPTH} equal layers, forward and backward with gradients in place. ZOMI's "
        "layer is relu(linear(x)) and keeps one activation; Q9's block is four times as wide "
        "inside. Bytes are counted in inputs of a layer, work in runs of a layer: plain is 1."
    )
    trade = {kind: lab.sample(kind, partial(_trade, lab, kind)) for kind in GRAPHS}
    points = {
        kind: {way: [Point(*point) for point in found] for way, found in both["ways"].items()}
        for kind, both in trade.items()
    }
    insides = {kind: float(both["inside"]) for kind, both in trade.items()}
    lab.plot("trade", *segment_plots.trade(points, insides, DEPTH))
    lab.say(
        "The lower bound is for schedules that keep inputs or graphs of whole layers until they "
        "are used; the optimal schedule, for those that keep inputs, and one layer's graph at a "
        "time. Torch's checkpoint_sequential rounds the size of its segments down and leaves the "
        "rest to the last, which keeps everything. Where the number divides the depth, torch needs "
        "less, because its second run stops before the output."
    )
    timed = lab.sample("seconds", lambda: _seconds(lab))
    lab.plot("segments", *segment_plots.segments(points["ZOMI's layer"], timed, DEPTH))
    _table_of_rates(lab, timed)
    depths = lab.sample("by depth", lambda: [_at_depth(lab, depth) for depth in _depths(lab)])
    lab.plot("depth", *segment_plots.by_depth(depths))
    lab.plot("rates", *segment_plots.rates(depths))
    wide = segment_plots.lowest(points["Q9's block"]["run_in_segments"])
    _claim_zomi(lab, depths, timed, wide.setting)
    sizes = (8, 16, 32) if lab.quick else (8, 16, 32, 64)
    _claim_q9(lab, lab.sample("Q9 at full size", lambda: [*map(_q9, sizes)]))
    _claim_gpt2(lab)


def _chain(lab: Lab, depth: int, *, simple: bool = True, wide: bool = False) -> tuple[Any, Tensor]:
    """On the cpu narrow for bytes, which repeat exactly, and wider for times."""
    if lab.device.type == "cuda":
        return chain(depth, 1024, (16, 1024), lab.device, simple=simple)
    width, batch = (128, (2, 256)) if wide else (16, (2, 512))
    return chain(depth, width, batch, lab.device, simple=simple)


def _trade(lab: Lab, kind: str) -> dict[str, Any]:
    simple = GRAPHS[kind] == 1
    model, x = _chain(lab, DEPTH, simple=simple)
    plain(model, x)()  # gradients are in place from here on
    ways = {
        way: measured(model, x, {setting: WAYS[way](model, x, setting) for setting in settings})
        for way, settings in (QUICK if lab.quick else SETTINGS).items()
    }
    one, x = _chain(lab, 1, simple=simple)
    plain(one, x)()
    return {"ways": ways, "inside": peak_of(plain(one, x), lab.device, [one, x]) / x.nbytes}


def _seconds(lab: Lab) -> dict[str, Any]:
    model, x = _chain(lab, DEPTH, wide=True)
    steps = {"plain": plain(model, x)}
    for n in (2, 6, 36) if lab.quick else NUMBERS[1:]:
        steps[f"{n} segments"] = WAYS["run_in_segments"](model, x, n)
    for way in list(WAYS)[1:]:
        steps[f"{way}, 6"] = WAYS[way](model, x, 6)
    found = alternating(steps, lab.device, rounds=5 if lab.quick else 20, limit=lab.limit)
    peaks = {name: peak_of(step, lab.device, [model, x]) for name, step in steps.items()}
    flops = {name: flops_of(step) for name, step in steps.items()}
    return {"seconds": found, "peaks": peaks, "flops": flops}


def _table_of_rates(lab: Lab, timed: dict[str, Any]) -> None:
    """ZOMI's own measure: bytes saved for each second lost."""
    seconds, peaks, flops = timed["seconds"], timed["peaks"], timed["flops"]
    rows = []
    for name, found in seconds.items():
        saved = peaks["plain"] - peaks[name]
        lost = statistics.median(a - b for a, b in zip(found, seconds["plain"], strict=True))
        middle, spread = ratio(found, seconds["plain"])
        rate = f"{saved / 2**20 / lost:.0f}" if lost > 0 else "no time lost"
        rows.append(
            [name, f"{peaks[name] / 2**20:.2f}", f"{saved / peaks['plain']:.0%}"]
            + [f"{flops[name] / flops['plain']:.2f}", f"{middle:.2f} ± {spread:.2f}"]
            + [rate if saved else ""]
        )
    columns = ["way", "peak, MiB", "saved", "operations", "time", "MiB saved for a second lost"]
    lab.table(f"{DEPTH} of ZOMI's layers; operations and time: times the plain step", columns, rows)


def _depths(lab: Lab) -> tuple[int, ...]:
    return DEPTHS[::2] if lab.quick else DEPTHS


def _at_depth(lab: Lab, depth: int) -> dict[str, Any]:
    model, x = _chain(lab, depth)
    root, logarithm = math.isqrt(depth), math.ceil(math.log2(depth))
    steps = {
        "plain": plain(model, x),
        "a checkpoint a layer": WAYS["segment_size"](model, x, 1),
        ROOT: WAYS["run_in_segments"](model, x, root),
        "optimal, log L snapshots": WAYS["optimal schedule"](model, x, logarithm),
    }
    steps["plain"]()  # gradients are in place from here on
    points = dict(zip(steps, measured(model, x, dict(enumerate(steps.values()))), strict=True))
    return {
        "depth": depth,
        "peaks": {name: point.peak for name, point in points.items()},
        "runs": {name: point.runs for name, point in points.items()},
        "flops": {name: flops_of(steps[name]) for name in ("plain", ROOT)},
    }


def _claim_zomi(lab: Lab, depths: list[dict[str, Any]], timed: dict[str, Any], wide: int) -> None:
    powers = segment_plots.powers(depths)
    last = depths[-1]
    lab.claim(
        "zomi-root",
        f"the peak grows as L^{powers[ROOT]:.2f}, plain as L^{powers['plain']:.2f}; at "
        f"{last['depth']} layers it is {last['peaks'][ROOT]:.0f} activations instead of "
        f"{last['peaks']['plain']:.0f}",
        verdict="holds" if abs(powers[ROOT] - 0.5) < 0.1 else "does not hold",
        when="layers are equal and keep one activation each; where they keep more inside, other "
        f"numbers are best: {wide} segments for {DEPTH} of Q9's blocks, not {math.isqrt(DEPTH)}",
    )
    root = math.isqrt(DEPTH)
    flops, seconds = timed["flops"], timed["seconds"]
    work = flops[f"{root} segments"] / flops["plain"]
    slower, spread = ratio(seconds[f"{root} segments"], seconds["plain"])
    runs = next(row["runs"][ROOT] for row in depths if row["depth"] == DEPTH)
    twice = runs > 1.75
    lab.claim(
        "zomi-twice",
        f"a layer runs forward {runs:.2f} times; a step has {work:.2f} times the operations and "
        f"takes {slower:.2f} ± {spread:.2f} times the time",
        verdict="holds" if work > 1.8 else "holds in part" if twice else "does not hold",
        when="of the forward pass alone, without the last segment; it is "
        f"{(work - 1) / (runs - 1):.0%} of a plain step's operations, and backward runs once",
    )
    shares = segment_plots.shares(depths)
    off = [abs(said - found) for _, said, found, _, _ in shares]
    extra = [abs(said - found) for *_, said, found in shares]
    _, claimed, got, more, counted = shares[-1]
    good = [max(off) < 0.05, max(extra) < 0.05]
    lab.claim(
        "zomi-rate",
        f"{last['depth']} layers: {got:.0%} saved where the formula says {claimed:.0%}, "
        f"{counted:.0%} more operations where it says {more:.0%}",
        verdict=in_part(good),
        when="the peak has √L checkpoints and a segment of √L layers, so 1 - 2√L/L is nearer; "
        f"operations added go from {shares[0][-1]:.0%} at {shares[0][0]} layers to {counted:.0%}",
    )


def _q9(depth: int) -> dict[str, int]:
    """Peaks of forward and backward of Q9's model at full size, without memory."""

    def make(way: str) -> Any:
        model, x = chain(depth, 1024, (16, 1024), torch.device("cpu"), simple=False)
        step = plain(model, x) if way == "plain" else WAYS["segment_size"](model, x, 1)
        return step, model, SGD(model.parameters()), [x]  # the optimizer makes no step

    ways = ("plain", "checkpointed")
    peaks = {way: rehearsed(partial(make, way)).reading.above_baseline for way in ways}
    return {"depth": depth, **peaks}


def _claim_q9(lab: Lab, rows: list[dict[str, int]]) -> None:
    saved = [row["plain"] - row["checkpointed"] for row in rows]
    depths = [row["depth"] for row in rows]
    peaks = [[row[way] for row in rows] for way in ("plain", "checkpointed")]
    lab.plot("q9", *segment_plots.saved(depths, *peaks))
    steps = [
        (after - before) / (n - m)
        for (m, before), (n, after) in itertools.pairwise(zip(depths, saved, strict=True))
    ]
    mean = statistics.mean(steps)
    even = max(steps) < 1.05 * min(steps)
    fixed = steps[-1] * depths[-1] - saved[-1]
    lab.claim(
        "q9-checkpoint-depth",
        f"from {depths[0]} to {depths[-1]} blocks one more saves {mean / 2**20:.0f} MiB (the same "
        f"within {max(steps) / min(steps) - 1:.1%}); of the peak of activations that is "
        f"{saved[0] / rows[0]['plain']:.0%} to {saved[-1] / rows[-1]['plain']:.0%}",
        verdict="holds" if even else "holds in part",
        when=f"bytes, with a checkpoint a block, less {fixed / 2**20:.0f} MiB at any depth for the "
        "block that is being recomputed; the share saved levels off",
    )


def _claim_gpt2(lab: Lab) -> None:
    needs("transformers")
    batches = (4,) if lab.quick else (1, 4, 16)
    measure = {n: partial(checkpointed_gpt2.peaks, n, lab.device) for n in batches}
    peaks = {n: lab.sample(f"GPT-2 medium, batch {n}", measure[n]) for n in batches}
    bars = {f"{way}, batch {n}": kinds for n, both in peaks.items() for way, kinds in both.items()}
    found = [f"{segment_plots.share_saved(both):.0%} at batch {n}" for n, both in peaks.items()]
    title = f"Checkpointing GPT-2 medium saves {', '.join(found)} of 512 tokens"
    lab.bars(
        "gpt2", bars, title, "Bytes at the peak of a step of GPT-2 medium by kind, 512 tokens."
    )
    time_it = partial(checkpointed_gpt2.seconds, rounds=4 if lab.quick else 15, limit=lab.limit)
    timed = lab.sample("GPT-2 times", lambda: time_it(lab.device))
    seconds, flops = timed["seconds"], timed["flops"]
    rows, extra, spreads = [], {}, {}
    for way, found in seconds.items():
        slower, spread = ratio(found, seconds["plain"])
        extra[way], spreads[way] = slower - 1, spread
        rows.append([way, f"{slower:.2f} ± {spread:.2f}", f"{flops[way] / flops['plain']:.2f}"])
    size = "GPT-2 medium" if lab.device.type == "cuda" else "a GPT-2 of 4 blocks 256 wide"
    lab.table(f"A step of {size}, times plain", ["blocks", "time", "operations"], rows)

    saved, time = segment_plots.share_saved(peaks[4]), extra["checkpointed"]
    good = [0.3 <= saved <= 0.5, 0.2 <= time <= 0.3]
    held = peaks[4]["plain"]["activations"] / sum(peaks[4]["plain"].values())
    where = f"time of {size} on {'this GPU' if lab.device.type == 'cuda' else 'this CPU'}"
    lab.claim(
        "lab-checkpoint",
        f"{saved:.0%} of the peak, {time:+.0%} ± {spreads['checkpointed']:.0%} time",
        verdict=in_part(good),
        when=f"4 sequences of 512 tokens, AdamW: activations are {held:.0%} of the plain "
        f"peak, and they alone grow with the tokens; {where}",
    )
    kept = extra["matrix products kept"]
    # Some choice of what is kept takes as long as claimed, as far as the spread can tell.
    between = kept - spreads["matrix products kept"] <= 0.2 and time >= 0.1
    verdict = "holds" if 0.1 <= time <= 0.2 else "holds in part" if between else "does not hold"
    if max(spreads.values()) > 0.12:  # wider than the range that is claimed
        verdict, where = "not measured", "the machine was busy: the times spread too far to tell"
    lab.claim(
        "l97-checkpoint-time",
        f"{time:+.0%} ± {spreads['checkpointed']:.0%} with all recomputed, {kept:+.0%} ± "
        f"{spreads['matrix products kept']:.0%} with matrix products kept",
        verdict=verdict,
        when="recomputing a block costs a forward pass, "
        f"{flops['checkpointed'] / flops['plain'] - 1:.0%} of a step's operations; less if some "
        f"results are kept; {where}",
    )
