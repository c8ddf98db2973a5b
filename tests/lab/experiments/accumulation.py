"""Lab 1.4's second notebook: windows of 1, 4, 8 and 16 micro-batches at one effective batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from kit.memory.stack import by_kind
from lab import draw
from lab.measure import Made, books_at_full_size, ratio, solution
from lab.models import Batch, Gpt, loss_on, next_token, parameters_of, text
from lab.notebook import Lab

ORDER = 3
TITLE = "Accumulation"
QUESTION = "What do micro-batches cost at one effective batch, and do they train the same?"
SECONDS = {"quick": 49, "full": 205}
CLAIMS = ("lab-accumulation",)

WINDOWS = (1, 4, 8, 16)  # micro-batches to a step; with BATCH, of 16, 4, 2 and 1 sequences
BATCH, LENGTH = 16, 512
ARTICLE = 8  # the window at which a micro-batch has the article's 2 sequences
SMALL = "2 layers, 64 wide, sequences of 64 bytes"
MIDDLE = "4 layers, 128 wide, sequences of 128 bytes"  # what a CPU is timed on
# The lowest learning rate that is tried; each further one is the square root rule's for 8 times
# the batch, so that the linear rule's is the second next.
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], float]] = {
    "AdamW": (AdamW, 1.4e-3),
    "SGD": (SGD, 0.14),
}
KNOWS_NOTHING = math.log(256)  # nats per byte


def cut(batch: Batch, window: int) -> list[Batch]:
    """A batch as so many micro-batches."""
    return list(zip(*(part.chunk(window) for part in batch), strict=True))


def make(batch: Batch, window: int, micro_batches: int, model: nn.Module) -> Made:
    """A step on so many of the micro-batches into which a window cuts the batch."""
    optimizer = AdamW(model.parameters(), foreach=True)
    parts = cut(batch, window)[:micro_batches]
    step = partial(solution("gradient_accumulation").accumulate, model, parts, next_token)
    return lambda: step(optimizer), model, optimizer, [batch]


def large() -> nn.Module:
    """A GPT of GPT-2 small's depth, width and words."""
    return Gpt(12, 768, words=50257)


def small(device: torch.device, seed: int = 0) -> nn.Module:
    """What is trained, on every device."""
    torch.manual_seed(seed)
    with device:
        return Gpt(2, 64, longest=64)


def run(lab: Lab) -> None:
    """Peak and time of a window, and what it trains."""
    lab.say(
        f"Every window makes one step on {BATCH} sequences: 1 micro-batch of {BATCH}, or "
        + ", ".join(f"{window} of {BATCH // window}" for window in WINDOWS[1:])
        + ". The large batch is the window of 1."
    )
    total, alone = _memory(lab)
    slower = _time(lab)
    _convergence(lab)
    _rules(lab)

    more, (time, spread) = total[ARTICLE] / alone[ARTICLE] - 1, slower[ARTICLE]
    good = (more < 0.02) + (time < 1.1)
    where = "on this GPU" if lab.device.type == "cuda" else f"on a CPU, with {MIDDLE}"
    lab.claim(
        "lab-accumulation",
        f"{more:+.0%} memory over a micro-batch alone, {time - 1:+.0%} time (spread {spread:.0%}) "
        f"over the large batch, at a window of {ARTICLE}",
        verdict=("does not hold", "holds in part", "holds")[good],
        when="gradients, as large as the weights, stay through later micro-batches; the time "
        f"is that of micro-batches of {BATCH // ARTICLE} {where}",
    )


def _memory(lab: Lab) -> tuple[dict[int, int], dict[int, int]]:
    """Peaks of each window and, of the same size, of a micro-batch alone, in bytes."""
    peaks = {n: lab.sample(f"peak {n}", partial(_peak, lab, n, alone=False)) for n in WINDOWS}
    alone = {n: lab.sample(f"alone {n}", partial(_peak, lab, n, alone=True)) for n in WINDOWS[1:]}
    total, single = ({n: sum(p.values()) for n, p in found.items()} for found in (peaks, alone))
    with torch.device("meta"):
        count = parameters_of(large())
    shape = f"{count / 1e6:.0f} million parameters, {BATCH} x {LENGTH} to a step, AdamW"
    how = "counted by the allocator" if lab.device.type == "cuda" else "a dry run on fake tensors"
    also = ""
    if lab.quick and lab.device.type != "cuda":
        also = " Of each window two micro-batches are run: all later ones are as the second."
    lab.say(f"A GPT of GPT-2 small's shape, {shape}; {how}.{also}")
    bars = {"large batch": peaks[1]}
    for n in WINDOWS[1:]:
        bars[f"window of {n}"] = peaks[n]
        bars[f"{BATCH // n} alone"] = alone[n]
    last = WINDOWS[-1]
    under, *_, over = sorted(total[n] - single[n] for n in single)
    title = (
        f"A window of {last} saves {1 - total[last] / total[1]:.0%} of the large batch's peak; "
        f"windows need {under / 2**30:.2f} to {over / 2**30:.2f} GiB more than a micro-batch"
    )
    lab.bars("peaks", bars, title, f"Bytes at the peak of a step by kind, by window; {shape}.")
    return total, {**single, 1: total[1]}


def _peak(lab: Lab, window: int, *, alone: bool) -> dict[str, int]:
    fewer = lab.quick and lab.device.type != "cuda"
    count = 1 if alone else min(window, 2) if fewer else window

    def made() -> Made:
        x = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        return make((x, x.clone()), window, count, large())

    return by_kind(books_at_full_size(made, lab.device))


def _time(lab: Lab) -> dict[int, tuple[float, float]]:
    """How many times as long as the large batch a step of each window takes, and the spread."""
    seconds = lab.seconds("seconds", lambda: _steps(lab))
    found = {n: ratio(seconds[str(n)], seconds["1"]) for n in WINDOWS}
    where = "this GPU" if lab.device.type == "cuda" else f"this CPU, one thread ({MIDDLE})"
    lab.table(
        f"Time of a step on {where}",
        ["window", "micro-batch", "times the large batch's", "spread"],
        [
            [str(n), str(BATCH // n), f"{x:.2f}", f"{spread:.2f}"]
            for n, (x, spread) in found.items()
        ],
    )
    return found


def _steps(lab: Lab) -> dict[str, Callable[[], object]]:
    on_gpu = lab.device.type == "cuda"
    with lab.device:
        model = large() if on_gpu else Gpt(4, 128, longest=128)
    (batch,) = text(lab.device, 1, BATCH, LENGTH if on_gpu else 128)
    return {str(n): make(batch, n, n, model)[0] for n in WINDOWS}


def _train(lab: Lab, name: str, lr: float, window: int, take: int, seed: int = 0) -> dict[str, Any]:
    """Losses of the steps on `take` sequences each, in `window` micro-batches; and after them."""
    model, count = small(lab.device, seed), 16 if lab.quick else 100
    held, batches = (found := text(lab.device, 8 + count, BATCH, 64))[:8], found[8:]
    steps = [part for batch in batches for part in cut(batch, BATCH // take)]
    micro_batches = [part for batch in steps for part in cut(batch, window)]
    optimizer = OPTIMIZERS[name][0](model.parameters(), lr=lr)
    # Down to 0: at a constant rate SGD's loss jumps, and the last one says little of the run.
    decay = LinearLR(optimizer, 1.0, 0.0, total_iters=len(steps))
    epoch = partial(solution("gradient_accumulation").train_epoch, scheduler=decay)
    results = epoch(model, micro_batches, next_token, optimizer, window=window)
    after = loss_on(model, held)
    losses = [result.loss.item() for result in results]
    # What has diverged is as good as no model; JSON has no number for it.
    known = [min(x, KNOWS_NOTHING) if x == x else KNOWS_NOTHING for x in (*losses, after)]
    return {"losses": known[:-1], "held": known[-1]}


def _convergence(lab: Lab) -> None:
    runs = {
        n: lab.sample(f"train {n}", partial(_train, lab, "AdamW", 4e-3, n, BATCH)) for n in WINDOWS
    }
    gaps = {
        n: max(abs(a / b - 1) for a, b in zip(own["losses"], runs[1]["losses"], strict=True))
        for n, own in runs.items()
    }
    lab.table(
        f"{len(runs[1]['losses'])} steps of AdamW on the same text ({SMALL})",
        ["window", "first loss", "last loss", "held-out loss", "most that any loss is off"],
        [
            [str(n), *(f"{own['losses'][at]:.5f}" for at in (0, -1)), f"{own['held']:.5f}"]
            + [f"{gaps[n]:.0e}" if gaps[n] else "0"]
            for n, own in runs.items()
        ],
    )


def _rules(lab: Lab) -> None:
    """From steps on the article's 2 sequences to steps on 16: where the best learning rate goes."""
    few, scaled = BATCH // ARTICLE, solution("gradient_accumulation").scaled_lr
    figure, panels = draw.figure(columns=2, height=3.6)
    findings = []
    for panel, (name, (_, rate)) in zip(panels, OPTIMIZERS.items(), strict=True):
        rates = [rate]
        while len(rates) < 5:
            rates.append(scaled(rates[-1], few, BATCH, rule="sqrt"))
        held = {take: [_held(lab, name, lr, take) for lr in rates] for take in (few, BATCH)}
        draw.lines(panel, rates, {f"{take} sequences a step": y for take, y in held.items()})
        panel.set_xscale("log")
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("learning rate")
        best = min(range(len(rates) - 2), key=held[few].__getitem__)
        rules = dict(zip(("unchanged", "sqrt", "linear"), held[BATCH][best:], strict=False))
        good = [rule for rule, loss in rules.items() if loss < 1.03 * min(rules.values())]
        findings.append(f"{' or '.join(good)} with {name}")
        lab.say(
            f"{name} is best at {rates[best]:.2g} with {few} sequences a step "
            f"({held[few][best]:.2f} nats). With {BATCH} a step and the rate "
            + ", ".join(f"{rule}: {loss:.2f}" for rule, loss in rules.items())
            + f" (diverged: {KNOWS_NOTHING:.2f}). Seeds: {1 if lab.quick else 3}."
        )
    panels[0].set_ylabel("held-out loss, nats per byte")
    title = f"The best learning rate at {ARTICLE} times the batch: {', '.join(findings)}"
    alt = f"Loss after as many sequences by learning rate, {few} or {BATCH} to a step."
    lab.plot("rules", figure, title, alt)


def _held(lab: Lab, name: str, lr: float, take: int) -> float:
    """The held-out loss in the mean over seeds: one in the quick run, otherwise three."""
    losses = list[float]()
    for seed in range(1 if lab.quick else 3):
        train = partial(_train, lab, name, lr, 1, take, seed)
        losses.append(lab.sample(f"{name} {lr:.2g}, {take} a step, seed {seed}", train)["held"])
    return statistics.mean(losses)
