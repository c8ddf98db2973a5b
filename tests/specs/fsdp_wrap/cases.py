"""What is trained: models, options and scripts, each in the group of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kit.ranks.shapes import SHAPES, Shape, made, reader
from specs.fsdp_wrap.shapes import detached, dropping_by_keyword, ending, silent, slim, tabled

# For each rank the samples of its micro-batches.
Plan = Sequence[Sequence[int]]

# Of steps one after another: unequal over ranks, micro-batches and steps; in number too, but for
# the first two of two ranks. In the fourth both have as many samples as before, in other steps.
PLANS: dict[int, list[Plan]] = {
    1: [[[3, 2]], [[1, 4]], [[1, 5, 2]], [[4]]],
    2: [[[3, 2], [1, 6]], [[1, 4], [2, 1]], [[1, 5, 2], [2, 1, 3]], [[5], [6]]],
    4: [[[3], [1], [2], [5]], [[2, 1], [1, 4], [3, 3], [1, 2]], [[1], [2], [1], [1]]],
}
# The same number of samples on every rank, as a mean over ranks wants them.
EQUAL: Plan = [[3]] * 4


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Unlike Adam it shows a gradient that is wrong by a factor."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


class Still(torch.optim.SGD):
    """Moves nothing."""

    def step(self, closure: Any = None) -> None:
        pass


def in_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Two groups of parameters; the vectors have a learning rate of their own."""
    every = [*parameters]
    optimizer = momentum([p for p in every if p.ndim > 1])
    optimizer.add_param_group({"params": [p for p in every if p.ndim == 1], "lr": 5e-3})
    return optimizer


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """All shards in one operation, as it takes DTensor milliseconds to think about each; and what
    is no shard in another.
    """
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(type(p), []).append(p)
    groups = [{"params": found} for found in kinds.values()]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


@dataclass(frozen=True)
class Case:
    """One training: `script` is what happens, one thing after another.

    plain      zero_grad, forward, backward and step by hand, with equal samples on every rank
    step       train_step
    stale      gradients of 1000 are there
    train      train mode from now on
    """

    shape: Callable[[], Shape] = SHAPES["odd sizes"]
    wrap: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    script: Sequence[str] = ("plain", "plain")
    make_optimizer: Callable[..., Optimizer] = momentum
    half: bool = False  # two models train side by side, each on half of the ranks
    train: bool = True
    lengths: bool = False  # samples differ in length


BF16, KEPT, CHECKPOINT = (
    {"dtype": torch.bfloat16},
    {"reshard_after_forward": False},
    {"checkpoint": True},
)
STEP, STEPS, LAST = ("step",), ("step",) * 4, {"sync": "last"}
DROP = made(blocks=2, drop=0.4)
CLIP = {"max_norm": 0.2}  # far below every norm

GROUPS: dict[str, dict[str, Case]] = {
    "values": {
        name: Case(shape, script=("plain", "plain") if name == "odd sizes" else ("plain",))
        for name, shape in SHAPES.items()
    },
    "meshes": {
        "all ranks": Case(),
        "meshes of half of the ranks": Case(half=True, script=("plain",)),
    },
    "meshes of steps": {
        "all ranks": Case(script=STEPS[:2]),
        "meshes of half of the ranks": Case(half=True, script=STEP),
    },
    "bfloat16": {
        "odd sizes": Case(wrap=BF16),
        "frozen": Case(SHAPES["frozen"], BF16),
        "blocks that end in float32": Case(ending, BF16),
        "nested": Case(SHAPES["nested"], BF16),
        "only blocks, kept": Case(SHAPES["only blocks"], BF16 | KEPT),
        "eval mode": Case(DROP, BF16, train=False),
    },
    "bfloat16 inputs": {
        "tokens": Case(tabled, BF16, lengths=True),
        "tokens, checkpoint": Case(tabled, BF16 | CHECKPOINT, lengths=True),
    },
    "steps": {
        "one step": Case(script=STEP),
        "four steps, Adam": Case(script=STEPS, make_optimizer=adamw),
    },
    "gradients": {
        "old gradients": Case(script=("stale", "step", "step")),
        "a detached block": Case(detached, script=("stale", "step"), make_optimizer=adamw),
        "kept, and a plain step": Case(wrap=KEPT, script=("step", "step", "plain")),
        "two groups, dropout in eval mode": Case(
            DROP, script=("stale", "step"), make_optimizer=in_groups, train=False
        ),
    },
    "norm": {
        "tied, two groups": Case(SHAPES["tied in the root"], script=STEP, make_optimizer=in_groups),
        "frozen": Case(SHAPES["frozen"], script=STEP),
        "rank 1 has no rows at all": Case(slim, script=STEP),
    },
    "clip": {
        "clipped": Case(script=STEP, step=CLIP),
        "two groups": Case(script=STEPS[:2], step={"max_norm": 1}, make_optimizer=in_groups),
        "clipped to 2, bfloat16": Case(wrap=BF16, script=STEP, step={"max_norm": 2.0}),
        "a norm that is not reached": Case(script=STEP, step={"max_norm": 1e3}),
        "kept, checkpoint": Case(wrap=KEPT | CHECKPOINT, script=STEP, step=CLIP),
        "gradients of 0": Case(silent, script=STEP, step=CLIP),
    },
    "checkpoint and dropout": {
        "train mode after wrap": Case(
            DROP, CHECKPOINT, script=("train", "step", "plain"), train=False
        ),
    },
    "checkpoint": {
        "kept, bfloat16": Case(DROP, CHECKPOINT | KEPT | BF16, script=STEP),
        "nested, bfloat16": Case(SHAPES["nested"], BF16 | CHECKPOINT),
        "eval mode, bfloat16": Case(DROP, CHECKPOINT | BF16, train=False),
        "a frozen block": Case(SHAPES["frozen"], CHECKPOINT, script=STEP),
    },
    "checkpointed shapes": {
        "dropout, keywords and tuples": Case(dropping_by_keyword, CHECKPOINT, script=STEP),
        **{
            name: Case(SHAPES[name], CHECKPOINT, script=STEP)
            for name in ("frozen beginning", "nested", "the root is of the class")
        },
    },
    "tokens": {"samples of unequal length": Case(reader, script=STEPS[:2], lengths=True)},
    "last": {
        "four steps of 2, 2, 3 and 1 micro-batches": Case(script=STEPS, step=LAST),
        "old gradients, and a plain step after it": Case(
            script=("stale", "step", "plain"), step=LAST
        ),
        "two groups, clipped": Case(script=STEPS[:2], step=LAST | CLIP, make_optimizer=in_groups),
        "frozen, checkpoint": Case(SHAPES["frozen"], CHECKPOINT, script=STEPS[:2], step=LAST),
        "kept": Case(wrap=KEPT, script=STEP, step=LAST),
        "bfloat16": Case(wrap=BF16, script=("step", "plain", "step"), step=LAST),
    },
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}
