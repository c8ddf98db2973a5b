"""Q9's program: float32, AMP, checkpointing and both, on LargeModel(32 layers, 1024 wide)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Adam

from kit.laws.toys import mse
from kit.memory.stack import highest, stacked, thin
from lab import draw
from lab.measure import Made, books_at_full_size, ratio, solution
from lab.models import WAYS, train_step
from lab.notebook import Lab

ORDER = 1
TITLE = "Four configurations"
QUESTION = "What do AMP, checkpointing and both save of one training step, and what do they cost?"
SECONDS = {"quick": 24, "full": 22}
CLAIMS = ("q9-amp-half", "q9-amp-twice", "q9-checkpoint-70", "q9-checkpoint-time", "lab-both")


def make(way: str, *, full: bool, layers: int = 32) -> Made:
    """The step of one configuration on the default device, at Q9's size or a laptop's."""
    dtype, checkpoint = WAYS[way]
    width, batch, length = (1024, 16, 1024) if full else (128, 2, 256)
    large_model = solution("checkpointed_model").LargeModel
    model = large_model(layers, width, dropout=0.0, use_checkpoint=checkpoint).train()
    x, optimizer = torch.zeros(batch, length, width), Adam(model.parameters(), foreach=True)
    return partial(train_step, model, (x, x), mse, optimizer, dtype=dtype), model, optimizer, [x]


def run(lab: Lab) -> None:
    """Peaks and timelines at full size, times at a size that the device can run."""
    on_gpu = lab.device.type == "cuda"
    timelines = {w: lab.sample(f"timeline {w}", partial(_timeline, lab, w)) for w in WAYS}
    peaks = {way: highest(rows) for way, rows in timelines.items()}
    total = {way: sum(parts.values()) for way, parts in peaks.items()}
    saved = {way: 1 - size / total["fp32"] for way, size in total.items()}
    shape = "LargeModel, 32 layers 1024 wide, batch 16 x 1024, Adam with foreach"
    how = "the allocator's timeline" if on_gpu else "a dry run on fake tensors"
    lab.say(f"{shape}; by {how}. Weights, gradients and Adam's state stay float32 under AMP.")

    amp, checkpointed, both = (f"{saved[way]:.0%}" for way in ("AMP", "checkpointed", "both"))
    finding = f"AMP saves {amp} of the peak, checkpointing {checkpointed}, both {both}"
    lab.bars("peaks", peaks, finding, f"Bytes at the peak of one step by kind, {shape}.")
    lab.table(
        "Peak of one step, GiB",
        ["configuration", *draw.COLOURS, "peak", "saved"],
        [
            [way, *(f"{parts.get(kind, 0) / 2**30:.2f}" for kind in draw.COLOURS)]
            + [f"{total[way] / 2**30:.2f}", f"{saved[way]:.0%}"]
            for way, parts in peaks.items()
        ],
    )
    figure = draw.stacked_timelines(
        {f"{way}: {_peak(rows)}": rows for way, rows in timelines.items()}, rows=2, height=5.6
    )
    hills = {way: max(row["activations"] for row in rows) for way, rows in timelines.items()}
    lower = {way: f"{hills['fp32'] / hill:.1f} times" for way, hill in hills.items()}
    title = f"The hill of activations is {lower['AMP']} lower with AMP, "
    title += f"{lower['checkpointed']} with checkpointing"
    lab.plot("timelines", figure, title, "Live bytes through one step by kind, four panels.")

    seconds = lab.seconds("seconds", lambda: _steps(lab))
    slower = {way: ratio(found, seconds["fp32"]) for way, found in seconds.items()}
    lab.table(
        "Time of one step"
        if on_gpu
        else f"Time of one step of a small model ({_layers(lab)} layers, 128 wide)",
        ["configuration", "times fp32", "spread"],
        [[way, f"{found:.2f}", f"{spread:.2f}"] for way, (found, spread) in slower.items()],
    )
    _claims(lab, saved, {way: found for way, (found, _) in slower.items()})


def _timeline(lab: Lab, way: str) -> list[dict[str, int]]:
    return thin(stacked(books_at_full_size(partial(make, way, full=True), lab.device)))


def _steps(lab: Lab) -> dict[str, Callable[[], object]]:
    full, layers = lab.device.type == "cuda", _layers(lab)
    with lab.device:
        return {way: make(way, full=full, layers=layers)[0] for way in WAYS}


def _layers(lab: Lab) -> int:
    """Of the model that is timed."""
    return 32 if lab.device.type == "cuda" else 8 if lab.quick else 16


def _peak(rows: list[dict[str, int]]) -> str:
    highest = max(range(len(rows)), key=lambda number: sum(rows[number].values()))
    return f"{sum(rows[highest].values()) / 2**30:.2f} GiB, {highest / len(rows):.0%} into the step"


def _claims(lab: Lab, saved: dict[str, float], slower: dict[str, float]) -> None:
    on_gpu = lab.device.type == "cuda"
    where = "on this CPU; another one may have no 16-bit arithmetic"
    if on_gpu:
        where = "on this GPU, beside float32 without TF32"
    state = "only activations are 16 bits: the larger the batch, the nearer to 50 %"
    lab.claim("q9-amp-half", f"{saved['AMP']:.0%} of the peak", verdict="holds in part", when=state)
    speed = 1 / slower["AMP"]
    verdict = ("holds" if speed > 1.8 else "does not hold") if on_gpu else "not measured"
    lab.claim(
        "q9-amp-twice", f"{speed:.2f} times the speed with bfloat16", verdict=verdict, when=where
    )
    share = f"{saved['checkpointed']:.0%} of the peak"
    weights = (
        "of the peak, with weights, gradients and Adam's state in it; of activations it is more"
    )
    good = saved["checkpointed"] > 0.65
    lab.claim("q9-checkpoint-70", share, verdict="holds" if good else "holds in part", when=weights)
    time, matrix = slower["checkpointed"] - 1, "one more forward pass: at most a third of a step"
    in_range = "holds" if 0.15 < time < 0.36 else "does not hold"
    lab.claim(
        "q9-checkpoint-time", f"{time:+.0%} time", verdict=in_range, when=f"{matrix}; {where}"
    )
    both = f"{saved['both']:.0%} of the peak, {slower['both'] - 1:+.0%} time"
    verdict = "holds" if 0.6 < saved["both"] < 0.75 else "holds in part"
    lab.claim("lab-both", both, verdict=verdict, when=f"the time {where}")
