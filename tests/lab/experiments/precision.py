"""Lab 1.4's first notebook: float32, float16 with a scaler and bfloat16 on GPT-2 small."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from kit.memory.stack import by_kind, highest, stacked
from lab import draw
from lab.measure import Made, books_of, ratio, rehearsed, solution
from lab.models import Batch, Gpt, loss_on, next_token, parameters_of, plain_step, text
from lab.notebook import Lab, needs
from lab.strangers import gpt

ORDER = 2
TITLE = "Precision"
QUESTION = "What do 16 bits save of GPT-2's memory and time, and what becomes of its loss?"
SECONDS = {"quick": 42, "full": 48}
CLAIMS = ("l97-amp", "l97-loss", "lab-amp")

WAYS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LENGTH, BATCH, LARGER = 1024, 4, 16  # at batch 4, float32 is nearest to the article's 8 GB
SMALL = "2 layers, 64 wide, batch 4 x 64"
HELD = 8  # batches that measure the loss after training


def rehearsal(model: nn.Module, way: str, batch: int, length: int) -> Made:
    """A step without values, so without a scaler: its one number weighs nothing."""
    x = torch.zeros(batch, length, dtype=torch.int64)
    optimizer = AdamW(model.parameters(), foreach=True)
    step = partial(plain_step, model, (x, x), next_token, optimizer, dtype=WAYS[way])
    return step, model, optimizer, [x]


def learner(lab: Lab, way: str) -> tuple[Callable[[Batch], Any], nn.Module, Optimizer]:
    """What trains on a batch of text: GPT-2 small, on the CPU a model small enough for it."""
    on_gpu, kata = lab.device.type == "cuda", solution("amp_loop")
    with lab.device:
        model = gpt(12, 768)[0] if on_gpu else Gpt(2, 64, longest=64)
    optimizer = AdamW(model.parameters(), lr=3e-4 if on_gpu else 3e-3, foreach=True)
    scaler = kata.LossScaler() if way == "fp16" else None

    def train(batch: Batch) -> Any:
        return kata.train_step(
            model, batch, next_token, optimizer, scaler, dtype=WAYS[way], max_norm=1.0
        )

    return train, model, optimizer


def _texts(lab: Lab, count: int) -> list[Batch]:
    return text(lab.device, count, BATCH, LENGTH if lab.device.type == "cuda" else 64)


def run(lab: Lab) -> None:
    """Peaks at full size; time and losses at a size that the device trains."""
    needs("transformers")
    total, limit = _memory(lab)
    large = _seven_billion(lab)
    speed = _time(lab)
    differ, seed = _losses(lab)
    _claims(lab, total, limit, large, speed)
    worst = max(abs(share) for share in differ.values())
    of = "GPT-2 small, untrained before" if lab.device.type == "cuda" else f"a small GPT ({SMALL})"
    fp16, bf16 = (f"{100 * differ[way]:+.1g}%" for way in ("fp16", "bf16"))
    measured = f"fp16 {fp16}, bf16 {bf16} of the loss"
    when = f"{_steps(lab)} steps of {of}; another seed makes {seed:.1%} in float32 alone"
    # A small model after few steps is not the final one of the article.
    good = "holds" if lab.device.type == "cuda" and not lab.quick else "holds in part"
    verdict = good if worst < 0.005 else "does not hold"
    lab.claim("l97-loss", measured, verdict=verdict, when=when)


def _memory(lab: Lab) -> tuple[dict[str, int], float]:
    on_gpu, pairs = lab.device.type == "cuda", [(way, BATCH) for way in WAYS]
    pairs += [("fp32", LARGER), ("bf16", LARGER)]
    dry = {(way, n): lab.sample(f"dry run {way} {n}", partial(_dry, way, n)) for way, n in pairs}
    peaks = {way: dry[way, BATCH] for way in WAYS}
    if on_gpu:
        peaks = {way: lab.sample(f"peak {way}", partial(_peak, lab, way)) for way in WAYS}
    total = {way: sum(parts.values()) for way, parts in peaks.items()}
    saved = {way: f"{1 - size / total['fp32']:.0%}" for way, size in total.items()}
    # Between two batches all else cancels: what is left is a sequence's own share.
    sizes = {key: sum(parts.values()) for key, parts in dry.items()}
    wide, narrow = (sizes[way, LARGER] - sizes[way, BATCH] for way in ("fp32", "bf16"))
    limit = 1 - narrow / wide

    with torch.device("meta"):
        count = parameters_of(gpt(12, 768)[0])
    shape = f"GPT-2 small, {count / 1e6:.0f} million parameters, batch {BATCH} x {LENGTH}, AdamW "
    shape += "with foreach"
    how = "counted by the allocator" if on_gpu else "a dry run on fake tensors"
    lab.say(
        f"{shape}; {how}. Weights, gradients and AdamW's state stay float32 under autocast, and "
        f"the loss reads the logits as float32. One more sequence takes {limit:.0%} less in "
        "bfloat16 than in float32, and no batch saves more."
    )
    finding = f"float16 saves {saved['fp16']} of the peak of GPT-2 small, bfloat16 {saved['bf16']}"
    lab.bars("peaks", peaks, finding, f"Bytes at the peak of one step by kind, {shape}.")
    return total, limit


def _seven_billion(lab: Lab) -> dict[str, dict[str, int]]:
    large = {way: lab.sample(f"7B {way}", partial(_dry_7b, way)) for way in ("fp32", "bf16")}
    waiting = "most that waits for the backward pass"
    rows = [
        [f"{what}, GB", *(f"{found[key] / 1e9:.1f}" for found in large.values())]
        for what, key in (("peak", "peak"), (waiting, "waiting"))
    ]
    count = f"{large['fp32']['parameters'] / 1e9:.1f} billion parameters"
    lab.table(f"A GPT of {count}, batch 1 x 2048, in a dry run", ["", *large], rows)
    lab.say("Autocast keeps 16-bit copies of the weights until the backward pass has used them.")
    return large


def _dry(way: str, batch: int) -> dict[str, int]:
    return by_kind(rehearsed(lambda: rehearsal(gpt(12, 768)[0], way, batch, LENGTH)))


def _dry_7b(way: str) -> dict[str, int]:
    """A step of 7 billion parameters on some 20 GB of activations in float32, as in Lesson 97."""
    wide = partial(Gpt, 40, 4096, words=32000, longest=2048)
    rows = stacked(rehearsed(lambda: rehearsal(wide(), way, 1, 2048)))
    return {
        "peak": sum(highest(rows).values()),
        "waiting": max(row["activations"] for row in rows),
        "waiting at the peak": highest(rows)["activations"],
        "parameters": max(row["weights"] for row in rows) // 4,
    }


def _peak(lab: Lab, way: str) -> dict[str, int]:
    train, model, optimizer = learner(lab, way)
    (batch,) = _texts(lab, 1)
    return by_kind(books_of((partial(train, batch), model, optimizer, batch), lab.device))


def _time(lab: Lab) -> dict[str, float]:
    (batch,) = _texts(lab, 1)
    seconds = lab.seconds(
        "seconds", lambda: {way: partial(learner(lab, way)[0], batch) for way in WAYS}
    )
    found = {way: ratio(seconds["fp32"], own) for way, own in seconds.items()}
    on_gpu = lab.device.type == "cuda"
    where = "this GPU, without TF32" if on_gpu else f"this CPU, one thread ({SMALL})"
    lab.table(
        f"Speed of a step on {where}",
        ["precision", "times fp32's speed", "spread"],
        [[way, f"{speed:.2f}", f"{spread:.2f}"] for way, (speed, spread) in found.items()],
    )
    return {way: speed for way, (speed, _) in found.items()}


def _losses(lab: Lab) -> tuple[dict[str, float], float]:
    """By how much the losses after training differ from float32's, and one seed from another."""
    runs = {way: lab.sample(f"train {way}", partial(_train, lab, way)) for way in WAYS}
    other = lab.sample("train fp32, other seed", partial(_train, lab, "fp32", seed=1))
    differ = {way: found["held"] / runs["fp32"]["held"] - 1 for way, found in runs.items()}
    seed = abs(other["held"] / runs["fp32"]["held"] - 1)

    curves = {way: _means(found["losses"]) for way, found in runs.items()}
    x, wide = curves["fp32"]
    shares = {
        way: [100 * (one / to - 1) for one, to in zip(y, wide, strict=True)]
        for way, (_, y) in curves.items()
    }
    figure, (left, right) = draw.figure(columns=2, height=3.3)
    draw.lines(left, x, {way: y for way, (_, y) in curves.items()})
    draw.lines(right, x, shares)
    left.set(ylabel="training loss, nats per byte", xlabel="step")
    right.set(ylabel="training loss above fp32's, %", xlabel="step")
    worst = 100 * max(abs(share) for share in differ.values())
    title = f"After {_steps(lab)} steps 16 bits have changed the loss by {worst:.1g}% at most, "
    alt = "Left: training loss by step in three precisions. Right: its distance from float32's."
    lab.plot("losses", figure, title + f"another seed of the weights by {seed:.1%}", alt)
    rows = [[way, f"{runs[way]['held']:.4f}", f"{100 * differ[way]:+.1g}%"] for way in WAYS]
    lab.table(
        f"Loss after training, on {HELD} other batches of the same text",
        ["precision", "nats per byte", "from fp32"],
        [*rows, ["fp32, another seed", f"{other['held']:.4f}", f"{seed:.1%} either way"]],
    )
    return differ, seed


def _means(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most 16 points of a noisy curve: the middle of each stretch, and its mean."""
    size = -(-len(values) // 16)
    starts = range(0, len(values), size)
    parts = [values[start : start + size] for start in starts]
    middles = [start + (len(part) + 1) / 2 for start, part in zip(starts, parts, strict=True)]
    return middles, [statistics.mean(part) for part in parts]


def _train(lab: Lab, way: str, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    train, model, _ = learner(lab, way)
    held, batches = (found := _texts(lab, HELD + _steps(lab)))[:HELD], found[HELD:]
    losses = [train(batch).loss.item() for batch in batches]
    return {"losses": losses, "held": loss_on(model, held)}


def _steps(lab: Lab) -> int:
    if lab.device.type == "cuda":
        return 60 if lab.quick else 1000
    return 32 if lab.quick else 300


def _claims(
    lab: Lab,
    total: dict[str, int],
    limit: float,
    large: dict[str, dict[str, int]],
    speed: dict[str, float],
) -> None:
    on_gpu = lab.device.type == "cuda"
    fast = f"{speed['fp16']:.2f} and {speed['bf16']:.2f} times as fast with fp16 and bf16"
    fast = fast if on_gpu else "no GPU, so no say in its speed"
    wide, narrow = (large[way]["peak"] for way in ("fp32", "bf16"))
    in_step = max(found["waiting at the peak"] for found in large.values()) == 0
    where = "the peak is in AdamW's step; " if in_step else ""
    lab.claim(
        "l97-amp",
        f"{wide / 1e9:.0f} to {narrow / 1e9:.0f} GB ({1 - narrow / wide:.0%}) at 7B; {fast}",
        verdict=_verdict(1 - narrow / wide, 0.5, speed["fp16"] / 2 if on_gpu else None),
        when=f"{where}only activations are 16 bits, not weights, gradients and AdamW's state",
    )
    wide, narrow = total["fp32"], max(total["fp16"], total["bf16"])
    lab.claim(
        "lab-amp",
        f"{wide / 1e9:.1f} to {narrow / 1e9:.1f} GB ({1 - narrow / wide:.0%}); {fast}",
        verdict=_verdict(1 - narrow / wide, 1 - 4.5 / 8, speed["fp16"] / 2.2 if on_gpu else None),
        when=f"batch {BATCH} x {LENGTH}; the larger the batch, the nearer to {limit:.0%}",
    )


def _verdict(saved: float, claimed: float, speed: float | None) -> str:
    """By the shares of what is claimed; `speed` is None where the device has no say in it."""
    shares = [saved / claimed] + ([] if speed is None else [speed])
    if speed is not None and min(shares) > 0.9:
        return "holds"
    return "holds in part" if max(shares) > 0.5 else "does not hold"
