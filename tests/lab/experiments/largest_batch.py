"""MEDIUM's experiment: the largest batch within a budget, samples a second, and padding."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lab import draw
from lab.largest import largest_batch
from lab.measure import CPU, Made, alternating, fits, ratio, rehearsed
from lab.models import WAYS, parameters_of
from lab.notebook import Lab, in_part, needs
from lab.strangers import Trained

ORDER = 5
TITLE = "Largest batch and throughput"
QUESTION = "How large a batch fits in a budget, and how many samples a second does it train?"
SECONDS = {"quick": 42, "full": 125}
CLAIMS = ("medium-batch", "medium-speed", "medium-padding")

MODELS = ("ViT", "GPT-2")
DEVICE_BYTES = 40 * 2**30  # one A100 of the article's machine
BYTES_A_PARAMETER = 34  # the same for each of the 1.26 billion parameters of the article's ViT
SIZES = (8, 16, 32, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 160, 192, 224, 255, 256)
WIDE = 256  # a multiple of every tile: nothing is padded
Search = dict[str, Any]  # "largest", "budget" in bytes, and the "tries": [batch, whether it fitted]


def run(lab: Lab) -> None:
    """The search on each model, throughput at what it found, and padding."""
    _padding(lab)
    needs("transformers")
    found: dict[str, dict[str, Search]] = {}
    speed: dict[str, dict[str, list[float]]] = {}
    for name in MODELS:
        with _collector_skips_libraries():
            found[name] = {
                way: lab.sample(f"{name} {way}", partial(_search, lab, name, way)) for way in WAYS
            }
        speed[name] = lab.sample(f"{name} speed", partial(_speed, lab, name, found[name]))
    _largest(lab, found, speed)
    articles = found["ViT"]
    if lab.device.type != "cuda" and not lab.quick:
        articles = {w: lab.sample(f"article's ViT {w}", partial(_dry_search, w)) for w in WAYS}
        _tries(lab, "The article's ViT, by a dry run", articles)
    growth = {name: _growth(searches) for name, searches in found.items()}
    _claims(lab, {**growth, "ViT": _growth(articles)}, speed)


@contextmanager
def _collector_skips_libraries() -> Iterator[None]:
    """Each try ends with a collection, which would look through all of torch and transformers."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _search(lab: Lab, name: str, way: str) -> Search:
    gc.collect()
    on_gpu = lab.device.type == "cuda"
    trained = Trained(name, way, lab.device, full=on_gpu, small=lab.quick)
    budget = BYTES_A_PARAMETER * parameters_of(trained.model)
    if on_gpu:
        budget = DEVICE_BYTES // (4 if lab.quick else 1)

    def try_one(size: int) -> bool:
        step, model, optimizer, batch = trained.made(size)
        # The first step makes Adam's state within the budget; for later ones it is known.
        fitted = fits(step, lab.device, budget, [model, optimizer, *batch])
        optimizer.zero_grad()  # a step that failed leaves gradients
        return fitted

    return _searched(try_one, budget)


def _dry_search(way: str) -> Search:
    """The article's own shape within one A100, on fake tensors."""

    def made(size: int) -> Made:
        return Trained("ViT", way, CPU, full=True, small=False).made(size)

    return _searched(lambda n: rehearsed(partial(made, n)).peak <= DEVICE_BYTES, DEVICE_BYTES)


def _searched(fits: Callable[[int], bool], budget: int) -> Search:
    tries = list[tuple[int, bool]]()

    def noted(size: int) -> bool:
        tries.append((size, fits(size)))
        return tries[-1][1]

    return {"largest": largest_batch(noted), "budget": budget, "tries": tries}


def _speed(lab: Lab, name: str, found: dict[str, Search]) -> dict[str, list[float]]:
    """Samples a second, of each way at its largest batch."""
    gc.collect()  # the models of the search: checkpointed ones refer to themselves
    on_gpu = lab.device.type == "cuda"
    sizes = {way: search["largest"] for way, search in found.items() if search["largest"]}

    def step_of(way: str) -> Callable[[], object]:
        return Trained(name, way, lab.device, full=on_gpu, small=lab.quick).made(sizes[way])[0]

    # On a GPU one after another: the models together would need four times the memory.
    seconds = dict[str, list[float]]()
    for ways in [[way] for way in sizes] if on_gpu else [[*sizes]]:
        steps = {way: step_of(way) for way in ways}
        seconds |= alternating(steps, lab.device, 5 if lab.quick else 11, lab.limit)
        del steps
        gc.collect()
    return {way: [sizes[way] / second for second in found] for way, found in seconds.items()}


def _growth(found: dict[str, Search]) -> dict[str, float]:
    """How many times fp32's largest batch each way fits; nothing to compare if that is 0."""
    base = found["fp32"]["largest"]
    return {way: search["largest"] / base if base else 0.0 for way, search in found.items()}


def _tries(lab: Lab, title: str, found: dict[str, Search]) -> None:
    marks = {True: "", False: " x"}
    growth = _growth(found)
    lab.table(
        f"{title}: the search; x is out of memory",
        ["configuration", "budget, MiB", "largest batch", "times fp32", "tried"],
        [
            [way, f"{search['budget'] / 2**20:,.1f}", str(search["largest"]), f"{growth[way]:.2f}"]
            + [", ".join(f"{size}{marks[fitted]}" for size, fitted in search["tries"])]
            for way, search in found.items()
        ],
    )


def _largest(
    lab: Lab, found: dict[str, dict[str, Search]], speed: dict[str, dict[str, list[float]]]
) -> None:
    on_gpu = lab.device.type == "cuda"
    how = "the caching allocator" if on_gpu else "the ruler, which refuses what exceeds it"
    share = f", {BYTES_A_PARAMETER} bytes a parameter as in the article's 40 GiB,"
    budget = f"The budget{'' if on_gpu else share} is enforced by {how}."
    lab.say(
        "A ViT and a GPT-2 of the transformers library, random weights, Adam with foreach. "
        f"{budget} The search is lab/largest.py, made to be copied."
    )
    figure, panels = draw.figure(columns=2, rows=2, height=4.4)
    for row, name in enumerate(MODELS):
        batches = {way: float(search["largest"]) for way, search in found[name].items()}
        rates = {way: statistics.median(values) for way, values in speed[name].items()}
        _bars(panels[2 * row], batches, f"{name}: largest batch")
        _bars(panels[2 * row + 1], rates, f"{name}: samples a second")
        _tries(lab, name, found[name])
    parts = []
    for name in MODELS:
        growth = _growth(found[name])
        amp, checkpointed, both = (f"{growth[w]:.1f}" for w in ("AMP", "checkpointed", "both"))
        parts.append(f"{name}: AMP {amp}, checkpointed {checkpointed}, both {both}")
    title = f"Largest batch as a multiple of fp32's. {'; '.join(parts)}"
    lab.plot("batches", figure, title, "Bars: largest batch, and samples a second at it.")


def _bars(axes: Any, bars: dict[str, float], title: str) -> None:
    for number, (name, value) in enumerate(bars.items()):
        style = {"color": draw.LINES[number]["color"], "hatch": ("", "//", "..", "xx")[number]}
        axes.barh(name, value, edgecolor="white", linewidth=0, height=0.7, **style)
        axes.text(value, number, f" {value:,.0f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*bars.values(), 1.0]) * 1.2)
    axes.set_xlabel(title)
    axes.grid(visible=False, axis="y")


def padded(size: int, multiple: int) -> int:
    """The size in elements that hardware works on which computes in multiples of `multiple`."""
    return -(-size // multiple) * multiple


def _products(device: torch.device) -> dict[str, Callable[[], object]]:
    """Products of (rows, inner) and (inner, size) for each of SIZES."""
    on_gpu = device.type == "cuda"
    rows, inner, repeats = (16384, 8192, 10) if on_gpu else (1024, 512, 2)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with device:
        left = torch.randn(rows, inner, dtype=dtype)
        rights = {str(size): torch.randn(inner, size, dtype=dtype) for size in SIZES}

    def multiply(right: torch.Tensor) -> None:
        for _ in range(repeats):
            left @ right

    return {size: partial(multiply, right) for size, right in rights.items()}


def _padding(lab: Lab) -> None:
    seconds = lab.seconds("padding", lambda: _products(lab.device), rounds=40)
    # Time a column, times that of WIDE; from the fastest of all rounds, the least disturbed.
    wide = min(seconds[str(WIDE)]) / WIDE
    waste = {size: min(seconds[str(size)]) / size / wide for size in SIZES}
    figure, (axes,) = draw.figure(height=3.4)
    every = range(min(SIZES), max(SIZES) + 1)
    for multiple, style in ((128, draw.LINES[0]), (16, draw.LINES[2])):
        line = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.2}
        computed = [padded(size, multiple) / size for size in every]
        axes.plot(every, computed, label=f"computed, padded to multiples of {multiple}", **line)
    found = [waste[size] for size in SIZES]
    axes.plot(SIZES, found, "s", color=draw.LINES[1]["color"], markersize=4, label="timed here")
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set(xlabel="columns of the matrix product", ylabel=f"time a column, times that of {WIDE}")
    axes.legend(fontsize=8, frameon=False)
    title = (
        f"Padded to 128, a size of 64 costs {padded(64, 128) / 64:.0f} times its work; "
        f"timed here, {waste[64]:.2f} times"
    )
    worst = max(SIZES[3:], key=lambda size: waste[size])
    lab.say(
        f"Of the products with {SIZES[3]} or more columns, the one with {worst} costs the most "
        f"here: {waste[worst]:.2f} times its share. One with 64 costs {waste[64]:.2f} times, with "
        f"65 {waste[65]:.2f} times."
    )
    lab.plot("padding", figure, title, "Cost of a column against the number of columns.")
    two = (padded(64, 128) / 64) ** 2
    measured = (
        f"computed {padded(64, 128) / 64:.2f} times for one size of 64, {two:.2f} for two; "
        f"timed here {waste[64]:.2f} times"
    )
    verdict = "holds" if waste[64] > 1.7 else "holds in part"
    when = "where the hardware pads to 128, as a TPU does; the time is that of this device"
    lab.claim("medium-padding", measured, verdict=verdict, when=when)


def _claims(
    lab: Lab, growth: dict[str, dict[str, float]], speed: dict[str, dict[str, list[float]]]
) -> None:
    on_gpu = lab.device.type == "cuda"
    good = [1.1 < g["AMP"] < 2.2 and 2 <= g["checkpointed"] > g["AMP"] for g in growth.values()]
    parts = [
        f"{name}: AMP {g['AMP']:.1f} times, checkpointing {g['checkpointed']:.1f} times"
        for name, g in growth.items()
    ]
    when = "the more of the budget weights, gradients and Adam's state take, the less AMP gives"
    lab.claim("medium-batch", "; ".join(parts), verdict=in_part(good), when=when)

    rates = {
        name: {way: ratio(values, of["fp32"])[0] for way, values in of.items()}
        for name, of in speed.items()
        if len(of) == len(WAYS)  # not if nothing fitted
    }
    good = [r["AMP"] > 1.5 for r in rates.values()]
    verdict = in_part(good + [0.7 < r["checkpointed"] < 1 for r in rates.values()])
    parts = [
        f"{name}: AMP {r['AMP']:.2f} times, checkpointing {r['checkpointed']:.2f} times"
        for name, r in rates.items()
    ]
    when = "each at its largest batch"
    if not on_gpu or not rates:
        verdict, when = "not measured", f"{when}; of AMP a CPU cannot tell what a GPU gains"
    lab.claim("medium-speed", "; ".join(parts), verdict=verdict, when=when)
