"""Sharding: bytes of a rank and what it sends, for ZeRO's three stages on up to 1,024 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kit.ranks.simulated import why_no_shards
from lab import draw
from lab.measure import power
from lab.notebook import Lab, NotHere, in_part
from lab.shards import TOKENS, WAYS, WIDTH, formula, rehearse

ORDER = 6
TITLE = "Sharding"
QUESTION = "How much does a rank hold and send with ZeRO-1, 2, 3 and with FSDP's settings?"
SECONDS = {"quick": 46, "full": 170}
CLAIMS = (
    *("q9-zero1", "q9-zero2", "q9-zero3", "q9-zero-free"),
    *("medium-zero-traffic", "medium-zero-linear"),
)

AT = 64  # the number of ranks of ZeRO's paper
STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
Found = dict[str, dict[int, dict[str, Any]]]  # by way and ranks, what rehearse returns


def run(lab: Lab) -> None:
    """Everything is rehearsed on fake tensors: no device has 1,024 ranks."""
    if reason := why_no_shards(torch.device("cpu")):
        raise NotHere(reason)
    layers, ranks = (6, (1, AT, 1024)) if lab.quick else (24, tuple(2**n for n in range(11)))
    found: Found = {way: {} for way in WAYS}
    for way in WAYS:
        for n in ranks if way in STAGES else (AT,):
            found[way][n] = lab.sample(f"{way}, {n}", partial(rehearse, way, n, layers))
    parameters = found["ZeRO-3"][AT]["parameters"]
    lab.say(
        f"A GPT of {layers} blocks {WIDTH} wide, {parameters / 1e6:.0f} million parameters, "
        f"{TOKENS[1]} tokens a rank; the second step of rank 0 of a simulated world. Weights and "
        "gradients are 16 bits, and Adam has 12 bytes a parameter: a float32 copy and two moments. "
        "ZeRO-1 is torch's ZeroRedundancyOptimizer, ZeRO-2 the reference of fsdp_wrap with "
        "reshard_after_forward=False, ZeRO-3 the same with True. FSDP keeps float32 shards and "
        "gathers 16 bits."
    )
    _draw_states(lab, found)
    _draw_settings(lab, found)
    _draw_traffic(lab, found)
    _claim_stages(lab, found)
    _claim_n_times(lab, found)
    _claim_traffic(lab, found)


def _each(found: dict[int, dict[str, Any]], key: str) -> list[float]:
    """Bytes a parameter, for each number of ranks."""
    return [one[key] / one["parameters"] for one in found.values()]


def _draw_states(lab: Lab, found: Found) -> None:
    figure, (left, right) = draw.figure(columns=2, height=4.2)
    ranks = list(found["ZeRO-3"])
    for way, style in zip(STAGES[1:], draw.LINES, strict=False):
        left.plot(ranks, _each(found[way], "states"), label=way, markersize=5, **style)
        said = [formula(way, n) for n in ranks]
        marked = {"color": style["color"], "marker": "+", "linestyle": (0, (1, 3))}
        left.plot(ranks, said, label=f"{way}, formula", markersize=8, **marked)
    zero3 = found["ZeRO-3"]
    lines = {"whole peak": _each(zero3, "peak"), "states, highest": _each(zero3, "states")}
    lines |= {"states between steps": _each(zero3, "rest")}
    lines |= {"formula, 16/N": [formula("ZeRO-3", n) for n in ranks]}
    draw.lines(right, ranks, lines)
    left.set_title("weights, gradients, Adam's state: highest", fontsize=9)
    right.set_title("ZeRO-3", fontsize=9)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", xticks=ranks[:: 1 if len(ranks) < 6 else 2])
        panel.xaxis.set_major_formatter(lambda n, _: f"{n:.0f}")
        panel.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
        panel.set(xlabel="ranks", ylabel="bytes a parameter", ylim=(0.01, 30))
        panel.legend(fontsize=8, frameon=False, loc="lower left")
    less = ", ".join(f"ZeRO-{stage} {_less(found, stage, AT):.1f}" for stage in (1, 2, 3))
    rest = _less(found, 3, AT, "rest")
    title = f"Times less at {AT} ranks: {less} at the highest, {rest:.0f} between steps"
    alt = "Bytes a parameter on rank 0 by number of ranks, measured and by ZeRO's formulas."
    lab.plot("states", figure, title, alt)


def _less(found: Found, stage: int, ranks: int, key: str = "states") -> float:
    """How many times less than data parallelism."""
    return float(found["data parallel"][ranks][key]) / int(found[f"ZeRO-{stage}"][ranks][key])


def _draw_settings(lab: Lab, found: Found) -> None:
    bars = {way: found[way][AT]["kinds"] for way in WAYS}
    sizes = {way: sum(kinds.values()) for way, kinds in bars.items()}
    least = min(sizes, key=lambda way: sizes[way])
    share = sizes[least] / sizes["data parallel"]
    title = f"{AT} ranks: {least} peaks lowest, at {share:.0%} of data parallelism"
    if sum(bars[least][kind] for kind in ("weights", "temporary")) > sizes[least] / 2:
        title += "; gathered blocks and buffers are most of it"
    alt = f"Bytes at the peak by kind, rank 0 of {AT}, eight settings."
    lab.bars("settings", bars, title, alt)


def _draw_traffic(lab: Lab, found: Found) -> None:
    figure, (axes,) = draw.figure(height=3.4)
    ranks = [n for n in found["ZeRO-3"] if n > 1]
    draw.lines(axes, ranks, {way: [_sent(found, way, n, "sent") for n in ranks] for way in STAGES})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:.0f}")
    axes.set_ylim(0, 3.9)
    axes.legend(fontsize=8, frameon=False, loc="lower right", ncols=2)
    axes.set(xlabel="ranks", ylabel="numbers sent a parameter and step")
    more = ", ".join(f"{way} {_times(found, way):.2f}" for way in STAGES[1:])
    title = f"Numbers sent, times data parallelism's at {AT} ranks: {more}"
    lab.plot("traffic", figure, title, "Numbers that a rank sends in a step, by number of ranks.")
    columns = ["way", "numbers sent a parameter", "bytes sent a parameter"]
    rows = [
        [way, f"{_sent(found, way, AT, 'sent'):.2f}", f"{_sent(found, way, AT, 'sent bytes'):.2f}"]
        for way in WAYS
    ]
    lab.table(f"What a rank of {AT} sends in a step", columns, rows)
    lab.say(
        "Every collective call is counted, and sent around a ring: of n numbers an all-reduce "
        "sends 2n(N-1)/N, a reduce-scatter or an all-gather half of that, a broadcast too on "
        "average. FSDP reduces gradients in float32 though it gathers 16 bits."
    )


def _sent(found: Found, way: str, ranks: int, key: str) -> float:
    one = found[way][ranks]
    return float(one[key]) / int(one["parameters"])


def _times(found: Found, way: str, key: str = "sent") -> float:
    return _sent(found, way, AT, key) / _sent(found, "data parallel", AT, key)


def _claim_stages(lab: Lab, found: Found) -> None:
    most = max(found["ZeRO-3"])
    for stage, said in ((1, 4), (2, 8)):
        less, at_most = (_less(found, stage, n) for n in (AT, most))
        plain = formula("float32", AT) / _sent(found, f"ZeRO-{stage}, float32", AT, "states")
        few, right, right_most = (16 / formula(f"ZeRO-{stage}", n) for n in (8, AT, most))
        verdict = "holds" if less > 0.9 * said else "holds in part"
        rest = "the largest parameter stays whole" if stage == 1 else "whole gradients of a block"
        lab.claim(
            f"q9-zero{stage}",
            f"{less:.1f} times less at {AT} ranks, {at_most:.1f} at {most:,}; the formula says "
            f"{right:.1f} and {right_most:.1f}",
            verdict=verdict if less > said / 2 else "does not hold",
            when=f"many ranks (at 8 the formula says {few:.1f}), weights and gradients of 16 bits "
            f"({plain:.1f} times in float32), without activations; above the formula: {rest}",
        )


def _claim_n_times(lab: Lab, found: Found) -> None:
    few, many = (1, 4) if lab.quick else (1, 16)
    grown = {
        n: lab.sample(f"{n} times as deep", partial(rehearse, "ZeRO-3", n, 2 * n))
        for n in (few, many)
    }
    states, peak = (grown[many][key] / grown[few][key] for key in ("states", "peak"))
    rest, highest = (_less(found, 3, AT, key) for key in ("rest", "states"))
    lab.claim(
        "q9-zero3",
        f"at {AT} ranks {rest:.0f} times less between steps and {highest:.0f} times at the highest;"
        f" a model {many} times as deep on {many} ranks: {states:.2f} times the states and "
        f"{peak:.2f} times the peak of one rank",
        verdict=in_part(less > 0.9 * AT for less in (rest, highest)),
        when="of what is kept; the blocks that are gathered, and the gradients of one, are as "
        "large on any number of ranks, and so are activations",
    )
    powers = [
        power(found["ZeRO-3"], [one[key] for one in found["ZeRO-3"].values()])
        for key in ("rest", "states", "peak")
    ]
    lab.claim(
        "medium-zero-linear",
        f"from 1 to {max(found['ZeRO-3']):,} ranks the states between steps go as N^{powers[0]:.2f}"
        f", at their highest as N^{powers[1]:.2f}, the whole peak as N^{powers[2]:.2f}",
        verdict=in_part(abs(grown + 1) < 0.05 for grown in powers),
        when="what a rank keeps falls as 1/N, so what more ranks save is less each time; the peak "
        "ends at the gathered blocks",
    )


def _claim_traffic(lab: Lab, found: Found) -> None:
    one, two, three = (_times(found, way) for way in STAGES[1:])
    lab.claim(
        "q9-zero-free",
        f"ZeRO-1 sends {one:.2f} times what data parallelism sends, ZeRO-2 {two:.2f} times",
        verdict=in_part(share < 1.05 for share in (one, two)),
        when="in numbers sent; time needs real ranks. An all-reduce is a reduce-scatter and an "
        "all-gather, and ZeRO-2 makes these two; torch's ZeRO-1 sums whole gradients first",
    )
    in_bytes = _times(found, "ZeRO-3", "sent bytes")
    lab.claim(
        "medium-zero-traffic",
        f"{three - 1:+.0%} numbers, {in_bytes - 1:+.0%} bytes with gradients reduced in float32",
        verdict="holds" if 1.4 < three < 1.6 else "does not hold",
        when="gathers and reductions have one dtype: weights are gathered twice and gradients "
        "reduced once, where data parallelism's all-reduce is as much as two of these",
    )
