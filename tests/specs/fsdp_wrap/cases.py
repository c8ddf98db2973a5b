"""What is trained: models, options and scripts, each in the group of one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kit.ranks.shapes import SHAPES, Shape, made, reader
from specs.fsdp_wrap.shapes import (
    any_names,
    detached,
    dropping_by_keyword,
    dropping_in_eval_mode,
    dropping_twice,
    ending,
    single_rows,
    timed,
)

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


def after_an_empty_group(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The same two groups, and one before them that has no parameters."""
    optimizer = in_groups(parameters)
    optimizer.param_groups.insert(0, optimizer.param_groups[0] | {"params": []})
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
    evaluate   a forward under no_grad, and one more between the next backward and its step
    stale      gradients of 1000 are there
    freeze     the head requires no gradient from now on
    thaw       every parameter requires one
    train      train mode from now on
    fails      train_step where loss_fn raises in the micro-batch number `at` of three, or
               backward through it
    """

    shape: Callable[[], Shape] = SHAPES["odd sizes"]
    wrap: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    script: Sequence[str] = ("plain", "plain")
    make_optimizer: Callable[..., Optimizer] = momentum
    half: bool = False  # two models train side by side on half of the ranks; a third is on all
    train: bool = True
    lengths: bool = False  # samples differ in length
    at: int = 1
    fails_in: str = "loss_fn"  # or "backward"
    infinite: bool = False  # backward gives head.bias an infinite gradient
    counted: bool = True  # how often blocks run is compared
    looks: bool = False  # loss_fn calls the model under no_grad
    loss_dtype: torch.dtype = torch.float32
    scale: float = 1.0  # of the loss: 0 as of a hinge that is met
    cause: str = ""  # what a failure most likely means, whatever differs


BF16, KEPT, CHECKPOINT = (
    {"dtype": torch.bfloat16},
    {"reshard_after_forward": False},
    {"checkpoint": True},
)
STEP, STEPS, LAST = ("step",), ("step",) * 4, {"sync": "last"}
DROP = made(blocks=2, drop=0.4)
CLIP = {"max_norm": 0.2}  # far below every norm
EVALUATE = ("evaluate", "plain") * 2

GROUPS: dict[str, dict[str, Case]] = {
    "values": {"a model of odd sizes": Case()},
    "shapes": {
        name: Case(shape, script=("plain",))
        for name, shape in [
            *[row for row in SHAPES.items() if row[0] not in ("odd sizes", "a block twice")],
            ("a detached block", detached),
        ]
    },
    "meshes": {
        "all ranks": Case(),
        "all ranks, a block at two places": Case(SHAPES["a block twice"], script=("plain",)),
        "meshes of half of the ranks": Case(half=True, script=("plain",)),
    },
    "meshes of steps": {
        "all ranks": Case(script=STEPS[:2]),
        "meshes of half of the ranks, then one of all": Case(half=True, script=STEP),
        "the same, clipped": Case(half=True, script=STEP, step=CLIP),
    },
    "evaluation": {
        name: Case(DROP, wrap, script=EVALUATE, train=False)
        for name, wrap in {
            "given back": {},
            "kept": KEPT,
        }.items()
    },
    "evaluation with options": {
        "checkpoint, bfloat16": Case(DROP, CHECKPOINT | BF16, script=EVALUATE, train=False)
    },
    "bfloat16": {
        "odd sizes": Case(wrap=BF16),
        "frozen": Case(SHAPES["frozen"], BF16),
        "nested": Case(SHAPES["nested"], BF16),
        "only blocks, kept": Case(SHAPES["only blocks"], BF16 | KEPT),
    },
    "one step": {"one step": Case(script=STEP)},
    "steps": {
        "Adam, a loss in float64": Case(
            script=STEPS, make_optimizer=adamw, loss_dtype=torch.float64
        ),
    },
    "gradients": {
        "old gradients, the head frozen later": Case(script=("stale", "step", "freeze", "step")),
        "a detached block": Case(detached, script=("stale", "step"), make_optimizer=adamw),
        "kept, evaluated before it": Case(wrap=KEPT, script=("step", "evaluate", "step", "plain")),
        "groups, one empty, dropout in eval mode, a forward in the loss": Case(
            DROP,
            script=("stale", "step"),
            make_optimizer=after_an_empty_group,
            looks=True,
            train=False,
        ),
    },
    "norm": {
        "tied, two groups": Case(SHAPES["tied in the root"], script=STEP, make_optimizer=in_groups),
        "frozen, trained later": Case(SHAPES["frozen"], script=("step", "thaw", "step")),
        "a rank without rows": Case(single_rows, script=STEP),
    },
    "clip": {
        "clipped": Case(script=STEP, step=CLIP),
        "two groups": Case(script=STEPS[:2], step={"max_norm": 1}, make_optimizer=in_groups),
        "clipped to 2, bfloat16": Case(wrap=BF16, script=STEP, step={"max_norm": 2.0}),
        "a norm that is not reached": Case(script=STEP, step={"max_norm": 1e3}),
        "max_norm inf, kept, checkpoint": Case(
            wrap=KEPT | CHECKPOINT, script=STEP, step={"max_norm": math.inf}
        ),
        "max_norm None, an infinite gradient": Case(
            script=STEP, infinite=True, make_optimizer=Still
        ),
    },
    "any norm": {
        "an infinite gradient": Case(script=STEP, step=CLIP, infinite=True, make_optimizer=Still),
        "a norm of 0": Case(
            script=STEP,
            step=CLIP,
            scale=0.0,
            make_optimizer=adamw,
            cause="the factor is 0 / 0, or there is no step",
        ),
    },
    "checkpoint and dropout": {
        "train mode after wrap": Case(
            DROP, CHECKPOINT, script=("train", "step", "plain"), train=False
        ),
        "eval mode, dropout on, buffers that the model fills": Case(
            dropping_in_eval_mode,
            CHECKPOINT,
            script=STEP,
            train=False,
            cause="the recomputation has another dropout mask, or old buffers; or the class's "
            "forward is checkpointed, and not the object's own",
        ),
    },
    "checkpoint": {
        "kept, bfloat16": Case(DROP, CHECKPOINT | KEPT | BF16, script=STEP),
        "nested, bfloat16": Case(SHAPES["nested"], BF16 | CHECKPOINT),
        "a frozen block": Case(SHAPES["frozen"], CHECKPOINT, script=STEP),
    },
    "checkpointed shapes": {
        name: Case(SHAPES[name], CHECKPOINT, script=STEP)
        for name in (
            "keywords and tuples",
            "frozen beginning",
            "nested",
            "the root is of the class",
        )
    }
    | {
        "keywords of any name, a block without parameters": Case(
            any_names, CHECKPOINT, script=STEP
        ),
        "a block that keeps nothing, at the end of another": Case(
            ending,
            CHECKPOINT,
            script=("plain", "step"),
            counted=False,
            cause="a second run goes to its end (early_stop=False) when the gradients of what is "
            "there have come already, so they are lost",
        ),
        "dropout, by keyword": Case(dropping_by_keyword, CHECKPOINT, script=STEP),
        "dropout, a block at two places": Case(
            dropping_twice,
            CHECKPOINT,
            script=STEP,
            cause="a block of two names is checkpointed under one of them, or draws another mask",
        ),
    },
    "float64 inputs": {
        "named tuples": Case(timed, script=("plain",)),
        "named tuples, checkpoint": Case(timed, CHECKPOINT, script=STEP),
    },
    "tokens": {"samples of unequal length": Case(reader, script=STEPS[:2], lengths=True)},
    "errors": {
        "in the first micro-batch": Case(script=("step", "fails", "plain", "step")),
        "in the second, kept": Case(
            wrap=KEPT, script=("stale", "fails", "step", "fails", "plain"), at=2
        ),
        "checkpoint, clipped, in backward": Case(
            DROP, CHECKPOINT, CLIP, script=("fails", "step"), at=2, fails_in="backward"
        ),
    },
    "last": {"four steps": Case(script=STEPS, step=LAST)},
    "last with options": {
        "old gradients, and a plain step after it": Case(
            script=("stale", "step", "plain"), step=LAST
        ),
        "two groups, clipped": Case(script=STEPS[:2], step=LAST | CLIP, make_optimizer=in_groups),
        "frozen, checkpoint": Case(SHAPES["frozen"], CHECKPOINT, script=STEPS[:2], step=LAST),
        "kept, a forward in the loss": Case(wrap=KEPT, script=STEP, step=LAST, looks=True),
        # In the first micro-batch: torch keeps the whole gradients of those before it.
        "an error, bfloat16": Case(wrap=BF16, script=("fails", "plain", "step"), step=LAST),
    },
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}
