"""What is trained: models, options and scripts, in groups that specs name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kit.ranks.shapes import SHAPES, Shape, made
from specs.fsdp_wrap.shapes import slim, tabled

# For each rank, how many samples each of its micro-batches has.
Plan = Sequence[Sequence[int]]

# One plan for each step; samples differ between ranks, micro-batches and steps.
PLANS: dict[int, list[Plan]] = {
    1: [[[3, 2]], [[1, 4]], [[1, 5, 2]], [[4]]],
    2: [[[3, 2], [1, 6]], [[1, 4], [2, 1]], [[1, 5, 2], [2, 1, 3]], [[5], [6]]],
    4: [[[3], [1], [2], [5]]],
}
EQUAL: Plan = [[3]] * 4  # FSDP alone takes the mean over ranks


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Shows a gradient that is wrong by a factor, as Adam does not."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


class Still(torch.optim.SGD):
    """Moves nothing."""

    def step(self, closure: Any = None) -> None:
        pass


def in_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Matrices, and vectors with another learning rate."""
    every = [*parameters]
    optimizer = momentum([p for p in every if p.ndim > 1])
    optimizer.add_param_group({"params": [p for p in every if p.ndim == 1], "lr": 5e-3})
    return optimizer


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Fused, as DTensor takes milliseconds for each operation: one group of shards, and one of
    whatever an answer has not sharded.
    """
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(type(p), []).append(p)
    groups = [{"params": found} for found in kinds.values()]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


@dataclass(frozen=True)
class Case:
    """One training; `script` lists what happens.

    plain      zero_grad, forward, backward and step by hand, with equal samples on every rank
    step       train_step
    stale      gradients of 1000 are there
    """

    shape: Callable[[], Shape] = SHAPES["odd sizes"]
    wrap: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    script: Sequence[str] = ("plain", "plain")
    make_optimizer: Callable[..., Optimizer] = momentum
    half: bool = False  # two models train side by side, each on half of the ranks
    tokens: bool = False  # inputs are integers


BF16, KEPT, CHECKPOINT = (
    {"dtype": torch.bfloat16},
    {"reshard_after_forward": False},
    {"checkpoint": True},
)
STEP, LAST = ("step",), {"sync": "last"}
CLIP = {"max_norm": 0.2}  # far below every norm

GROUPS: dict[str, dict[str, Case]] = {
    "values": {
        "odd sizes": Case(),
        **{
            name: Case(SHAPES[name], script=("plain",))
            for name in ("frozen", "tied in the root", "nested", "only blocks")
        },
    },
    "meshes": {"meshes of half of the ranks": Case(half=True, script=("plain",))},
    "meshes of steps": {"meshes of half of the ranks": Case(half=True, script=STEP)},
    "bfloat16": {
        "odd sizes": Case(wrap=BF16),
        "frozen": Case(SHAPES["frozen"], BF16),
        "only blocks": Case(SHAPES["only blocks"], BF16),
        "tokens and a float32 buffer": Case(tabled, BF16, tokens=True),
    },
    "steps": {
        "one step": Case(script=STEP),
        "four steps, Adam": Case(script=("step",) * 4, make_optimizer=adamw),
    },
    "gradients": {"old gradients": Case(wrap=KEPT, script=("stale", "step", "step", "plain"))},
    "norm": {
        "tied, two groups": Case(SHAPES["tied in the root"], script=STEP, make_optimizer=in_groups),
        "rank 1 has no rows at all": Case(slim, script=STEP),
    },
    "clip": {
        "clipped, two groups": Case(script=STEP, step=CLIP, make_optimizer=in_groups),
        "a norm that is not reached": Case(script=STEP, step={"max_norm": 1e3}),
    },
    "checkpoint": {
        "dropout": Case(made(blocks=2, drop=0.4), CHECKPOINT, script=("step", "plain")),
        "kept, bfloat16": Case(wrap=CHECKPOINT | KEPT | BF16, script=STEP),
    },
    "checkpointed shapes": {
        "keywords": Case(tabled, CHECKPOINT, script=STEP, tokens=True),
        "frozen beginning": Case(SHAPES["frozen beginning"], CHECKPOINT, script=STEP),
        "nested": Case(SHAPES["nested"], CHECKPOINT, script=STEP),
    },
    "last": {
        "four steps of 2, 2, 3 and 1 micro-batches": Case(script=("step",) * 4, step=LAST),
        "old gradients, and a plain step after it": Case(
            script=("stale", "step", "plain"), step=LAST
        ),
        "clipped, two groups": Case(script=STEP, step=LAST | CLIP, make_optimizer=in_groups),
    },
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}
