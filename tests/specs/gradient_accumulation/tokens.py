"""The worlds of accumulate_tokens, and what those of accumulate_on_ranks are made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.trace import Probe, World
from kit.laws.twists import Twist, option, put, refused, stale, trained_before
from specs.gradient_accumulation.scenarios import (
    AUTOCAST,
    ERRORS,
    FOREIGN,
    MODES,
    NO_GRADIENT,
    NOTHING,
    OLDER,
    STEPS,
    UNUSUAL,
    Row,
    Rows,
    bad,
    tag,
)

CLASSES = 5
Shapes = Sequence[tuple[int, int, int]]
# Samples, length, labelled tokens: 12, 6, 3 and 1, and as many tokens without a label.
UNEQUAL: Shapes = ((3, 4, 12), (2, 5, 6), (1, 9, 3), (4, 3, 1))


def labelled(shapes: Shapes, ignore_index: int = -100, seed: int = 5) -> list[Any]:
    """Micro-batches of (samples, length) with so many labels at random places.

    Micro-batch n has tokens from n to n + 3 only, so that no two have similar gradients. Targets
    are a slice of a wider tensor, which view(-1) does not take.
    """
    generator = draw.generator(seed)
    classes = torch.tensor([label for label in range(CLASSES) if label != ignore_index])
    batches = []
    for number, (samples, length, labels) in enumerate(shapes):
        inputs = draw.randint(4, (samples, length), generator=generator) + number % 5
        targets = torch.full((samples * length,), ignore_index)
        places = torch.randperm(samples * length, generator=generator)[:labels]
        targets[places] = classes[draw.randint(len(classes), (labels,), generator=generator)]
        batches.append([inputs, F.pad(targets.view(samples, length), (1, 0))[:, 1:]])
    return batches


def language_model() -> nn.Sequential:
    """From (samples, length) to logits (samples, length, 5), each token by itself."""
    draw.seed(4)
    return nn.Sequential(nn.Embedding(8, 6), Probe(), nn.Tanh(), nn.Linear(6, CLASSES))


def tokens() -> World:
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    return World(language_model(), labelled(UNEQUAL), sgd=sgd)


def of(*shapes: tuple[int, int, int], ignore_index: int = -100) -> Twist:
    return lambda w: put(batches=labelled(shapes, ignore_index))(w)


def adapter(w: World) -> None:
    """A parameter that is no part of the model is trained with it."""
    shift = w.extra["adapter"] = nn.Parameter(torch.zeros(CLASSES))
    shift.grad = torch.full_like(shift, 1000.0)
    w.model.register_forward_hook(lambda _, args, logits: logits + shift)


def refilled(w: World) -> None:
    """The next window comes in the same tensors."""

    def visit(place: str) -> None:
        for tensor in itertools.chain(*w.batches) if place == "next window" else ():
            tensor[:, 1:] = tensor[:, :1]

    w.visits, w.tags = visit, {*w.tags, "twice"}


def transposed(w: World) -> None:
    """Logits lie in memory as a convolution leaves them."""
    w.model.register_forward_hook(lambda _, args, logits: logits.mT.contiguous().mT)


def masked(w: World) -> None:
    """The last class is padding: no target, and the model never gives it a chance."""
    mask = torch.zeros(CLASSES)
    mask[-1] = -torch.inf
    w.model.register_forward_hook(lambda _, args, logits: logits + mask.to(logits.device))


def in_sixteen_bits(dtype: torch.dtype, cost: float = 1e4) -> Row:
    """A label costs `cost` and some 0.6, or little if it is the last class.

    Seven times 10,000 is no number of float16.
    """

    def twist(w: World) -> None:
        w.model.to(dtype)
        surprise = torch.tensor([-cost] * (CLASSES - 1) + [0.6], dtype=dtype)
        w.model.register_forward_hook(lambda _, args, out: out + surprise.to(out.device))

    return (twist, tag("16 bits"))


def no_labels(at: int) -> Row:
    """Micro-batch `at` of four has no label."""
    shapes, padding = [*UNEQUAL[:at], (2, 3, 0), *UNEQUAL[at:3]], CLASSES - 1
    chosen = (of(*shapes, ignore_index=padding), option(ignore_index=padding))
    return (*chosen, masked, stale, tag("no labels"))


def rows(one: float, other: float) -> Tensor:
    """Where the two rows of the model in the steps by hand have moved."""
    return torch.tensor([[one, -one], [-other, other]])


def ids(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


NO_TOKENS: dict[str, tuple[Any, ...]] = {
    "no samples": ((ids(0, 3), ids(0, 3)), "0"),
    "no length": ((ids(3, 0), ids(3, 0)), "0"),
    "a dimension more": ((ids(2, 3), ids(2, 3, 1)),),
    "another length": ((ids(2, 5), ids(2, 4)), "5", "4"),
    "as many elements": ((ids(2, 6), ids(6, 2)), "2", "6"),
    "one target for all": ((ids(4, 3), ids(1, 3)), "4", "1"),
    "three tensors": ((ids(2, 3), ids(2, 3), ids(2, 3)),),
    "one tensor of two rows": (ids(2, 3),),
}
TOKENS: dict[str, Rows] = {
    "divisor": {
        "12, 6, 3 and 1 labelled tokens": (),
        "2,049 of 2,400 tokens labelled": (of((4, 600, 2049), (1, 4, 4)),),
        "the same tensors, filled anew": (refilled, tag("no labels")),
    },
    "16 bits": {
        "a model in float16": in_sixteen_bits(torch.float16),
        "a model in bfloat16": in_sixteen_bits(torch.bfloat16, 50.0),
    },
    "ignore_index": {
        f"ignore_index {n}, {len(window)} of the micro-batches": (
            of(*window, ignore_index=n),
            option(ignore_index=n),
        )
        for n in (0, -1, 255)
        for window in (UNEQUAL, UNEQUAL[1:2])
    },
    "window": STEPS | OLDER | MODES | {"an adapter": (adapter, trained_before)},
    "unusual": UNUSUAL,
    "no labels": {
        "no label in the first micro-batch": no_labels(0),
        "no label in the last micro-batch": no_labels(3),
        "one label in all": (of((2, 3, 0), (1, 4, 1), (3, 2, 0)), tag("no labels")),
    },
    "strides": {
        "logits transposed": (transposed,),
        "as many places as classes": (of((1, 5, 3), (3, 5, 8)), transposed),
    },
    "others": {**NO_GRADIENT, **FOREIGN, **ERRORS, **AUTOCAST},
    "bad": {
        **bad(NO_TOKENS, 0, 1, 3),
        **NOTHING,
        "no label in any place": refused(of((2, 3, 0), (1, 5, 0)), mentions=("0",)),
    },
}
