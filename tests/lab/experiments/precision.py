"""Lab 1.4's first notebook: float32, float16 with a scaler and bfloat16 on GPT-2 small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import log2
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from kit.memory.stack import by_kind, stacked
from lab import draw
from lab.measure import alternating, books_of, ratio, rehearsed, solution
from lab.models import Gpt, next_token, parameters_of, plain_step
from lab.notebook import Lab
from lab.training import Batch, gpt2_small, loss_on, means, text

ORDER = 2
TITLE = "Precision"
QUESTION = "What do 16 bits save of GPT-2's memory and time, and what becomes of its loss?"
SECONDS = {"quick": 42, "full": 48}
CLAIMS = ("l97-amp", "l97-loss", "lab-amp")

WAYS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LENGTH, BATCH, LARGER = 1024, 4, 16  # at batch 4, float32 is nearest to the article's 8 GB
SMALL = "2 layers, 64 wide, batch 4 x 64"
HELD = 8  # batches that measure the loss after training
Made = tuple[Callable[[], object], nn.Module, Optimizer, list[Any]]


def rehearsal(way: str, batch: int) -> Made:
    """A step of GPT-2 small without values, so without a scaler: its one number weighs nothing."""
    return _rehearsal(gpt2_small()[0], way, batch, LENGTH)


def rehearsal_of_7b(way: str) -> Made:
    """A step of 7 billion parameters on some 20 GB of activations in float32, as in Lesson 97."""
    return _rehearsal(Gpt(40, 4096, words=32000, longest=2048), way, 1, 2048)


def _rehearsal(model: nn.Module, way: str, batch: int, length: int) -> Made:
    x = torch.zeros(batch, length, dtype=torch.int64)
    optimizer = AdamW(model.parameters(), foreach=True)
    step = partial(plain_step, model, (x, x), next_token, optimizer, dtype=WAYS[way])
    return step, model, optimizer, [x]


def learner(
    lab: Lab, way: str, scaler: Any = None
) -> tuple[Callable[[Batch], Any], nn.Module, Optimizer]:
    """What trains on a batch of text: GPT-2 small, on the CPU a model small enough for it."""
    on_gpu, kata = lab.device.type == "cuda", solution("amp_loop")
    with lab.device:
        model = gpt2_small()[0] if on_gpu else Gpt(2, 64, longest=64)
    optimizer = AdamW(model.parameters(), lr=3e-4 if on_gpu else 3e-3, foreach=True)
    scaler = kata.LossScaler() if way == "fp16" and scaler is None else scaler

    def train(batch: Batch) -> Any:
        return kata.train_step(
            model, batch, next_token, optimizer, scaler, dtype=WAYS[way], max_norm=1.0
        )

    return train, model, optimizer


def _texts(lab: Lab, count: int) -> list[Batch]:
    return text(lab.device, count, BATCH, LENGTH if lab.device.type == "cuda" else 64)


def run(lab: Lab) -> None:
    """Peaks at full size; time, losses and the loss scale at a size that the device trains."""
    name, count = lab.sample("model", _named)
    total, limit = _memory(lab, name, f"{name}, {count / 1e6:.0f} million parameters")
    large = _seven_billion(lab)
    speed = _time(lab)
    differ, seed = _losses(lab)
    _scale(lab)
    _claims(lab, total, limit, large, speed)
    worst = max(abs(share) for share in differ.values())
    of = f"{name}, untrained before" if lab.device.type == "cuda" else f"a small GPT ({SMALL})"
    fp16, bf16 = (f"{100 * differ[way]:+.1g}%" for way in ("fp16", "bf16"))
    measured = f"fp16 {fp16}, bf16 {bf16} of the loss"
    when = f"{_steps(lab)} steps of {of}; another seed makes {seed:.1%} in float32 alone"
    # A small model after few steps is not the final one of the article.
    good = "holds" if lab.device.type == "cuda" and not lab.quick else "holds in part"
    verdict = good if worst < 0.005 else "does not hold"
    lab.claim("l97-loss", measured, verdict=verdict, when=when)


def _memory(lab: Lab, name: str, model: str) -> tuple[dict[str, int], float]:
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

    shape = f"{model}, batch {BATCH} x {LENGTH}, AdamW with foreach"
    how = "counted by the allocator" if on_gpu else "a dry run on fake tensors"
    lab.say(
        f"{shape}; {how}. Weights, gradients and AdamW's state stay float32 under autocast, and "
        f"the loss reads the logits as float32. One more sequence takes {limit:.0%} less in "
        "bfloat16 than in float32, and no batch saves more."
    )
    figure, (axes,) = draw.figure(height=2.8)
    draw.stacked_bars(axes, peaks)
    finding = f"float16 saves {saved['fp16']} of the peak of {name}, bfloat16 {saved['bf16']}"
    lab.plot("peaks", figure, finding, f"Bytes at the peak of one step by kind, {shape}.")
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


def _named() -> tuple[str, int]:
    with torch.device("meta"):
        model, name = gpt2_small()
    return name, parameters_of(model)


def _dry(way: str, batch: int) -> dict[str, int]:
    return by_kind(rehearsed(lambda: rehearsal(way, batch)))


def _dry_7b(way: str) -> dict[str, int]:
    rows = stacked(rehearsed(lambda: rehearsal_of_7b(way)))
    return {
        "peak": max(sum(row.values()) for row in rows),
        "waiting": max(row["activations"] for row in rows),
        "waiting at the peak": max(rows, key=lambda row: sum(row.values()))["activations"],
        "parameters": max(row["weights"] for row in rows) // 4,
    }


def _peak(lab: Lab, way: str) -> dict[str, int]:
    train, model, optimizer = learner(lab, way)
    (batch,) = _texts(lab, 1)
    return by_kind(books_of(lambda: train(batch), lab.device, model, optimizer, batch))


def _time(lab: Lab) -> dict[str, float]:
    seconds = lab.sample("seconds", lambda: _seconds(lab))
    found = {way: ratio(seconds["fp32"], own) for way, own in seconds.items()}
    where = f"this CPU, one thread ({SMALL})"
    if lab.device.type == "cuda":
        where = "this GPU, without TF32"
    lab.table(
        f"Speed of a step on {where}",
        ["precision", "times fp32's speed", "spread"],
        [[way, f"{speed:.2f}", f"{spread:.2f}"] for way, (speed, spread) in found.items()],
    )
    return {way: speed for way, (speed, _) in found.items()}


def _seconds(lab: Lab) -> dict[str, list[float]]:
    (batch,) = _texts(lab, 1)
    steps: dict[str, Callable[[], object]] = {}
    for way in WAYS:
        steps[way] = partial(learner(lab, way)[0], batch)
    return alternating(steps, lab.device, rounds=5 if lab.quick else 15, limit=lab.limit)


def _losses(lab: Lab) -> tuple[dict[str, float], float]:
    """By how much the losses after training differ from float32's, and one seed from another."""
    runs = {way: lab.sample(f"train {way}", partial(_train, lab, way)) for way in WAYS}
    other = lab.sample("train fp32, other seed", partial(_train, lab, "fp32", seed=1))
    differ = {way: found["held"] / runs["fp32"]["held"] - 1 for way, found in runs.items()}
    seed = abs(other["held"] / runs["fp32"]["held"] - 1)

    curves = {way: means(found["losses"], 16) for way, found in runs.items()}
    x, wide = curves["fp32"]
    shares = {
        way: [100 * (one / to - 1) for one, to in zip(y, wide, strict=True)]
        for way, (_, y) in curves.items()
    }
    figure, (left, right) = draw.figure(columns=2, height=3.3)
    draw.lines(left, x, {way: y for way, (_, y) in curves.items()})
    draw.lines(right, x, shares)
    left.set_ylabel("training loss, nats per byte")
    right.set_ylabel("training loss above fp32's, %")
    left.set_xlabel("step")
    right.set_xlabel("step")
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


def _train(lab: Lab, way: str, seed: int = 0, scaler: Any = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    if way == "fp16" and scaler is None:
        scaler = solution("amp_loop").LossScaler()
    train, model, _ = learner(lab, way, scaler)
    held, batches = (found := _texts(lab, HELD + _steps(lab)))[:HELD], found[HELD:]
    losses, scales, skipped = list[float](), list[float](), list[bool]()
    for batch in batches:
        scales.append(scaler.get_scale() if scaler else 1.0)  # that of this step
        result = train(batch)
        losses.append(result.loss.item())
        skipped.append(result.skipped)
    after = loss_on(model, held)
    return {"losses": losses, "scales": scales, "skipped": skipped, "held": after}


def _steps(lab: Lab) -> int:
    if lab.device.type == "cuda":
        return 60 if lab.quick else 1000
    return 32 if lab.quick else 300


def _scale(lab: Lab) -> None:
    """The defaults, beside a scale that starts too high and grows often: a long run in short."""
    interval = 6 if lab.quick else 25
    eager = partial(solution("amp_loop").LossScaler, 2.0**24, growth_interval=interval)
    usual = lab.sample("train fp16", partial(_train, lab, "fp16"))
    eagerly = lab.sample("train fp16, eager", lambda: _train(lab, "fp16", scaler=eager()))
    often = f"from 2^24, growing every {interval} steps"
    runs = {"from 2^16, growing every 2,000 steps (the defaults)": usual, often: eagerly}
    figure, (axes,) = draw.figure(height=3.3)
    for (label, found), style in zip(runs.items(), draw.LINES, strict=False):
        steps, scale = range(1, _steps(lab) + 1), [log2(scale) for scale in found["scales"]]
        own = {"color": style["color"], "linestyle": style["linestyle"]}
        axes.step(steps, scale, where="post", label=label, **own)
        lost = [(n, y) for n, y, out in zip(steps, scale, found["skipped"], strict=True) if out]
        label = f"skipped, {len(lost)} of {len(steps)} steps"
        mark = {"marker": style["marker"], "color": style["color"], "label": label}
        axes.plot(*(zip(*lost, strict=True) if lost else ((), ())), linestyle="", **mark)
    axes.set_xlabel("step")
    axes.set_ylabel("log2 of the loss scale")
    axes.legend(fontsize=8, frameon=False)
    growths = [n for n, pair in enumerate(pairwise(eagerly["scales"]), 1) if pair[1] > pair[0]]
    first = min(growths, default=_steps(lab))
    before, after = sum(eagerly["skipped"][:first]), sum(eagerly["skipped"][first:])
    title = (
        f"The defaults skip {sum(usual['skipped'])} of {_steps(lab)} steps; from 2^24 it is "
        f"{before} before the scale first grows, and {after} after"
    )
    lab.plot("scale", figure, title, "Loss scale by step, with marks at the skipped steps.")


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
