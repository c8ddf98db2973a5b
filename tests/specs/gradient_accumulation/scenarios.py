"""The worlds that accumulate is put into, and what those of the others are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.laws.trace import PlantedInterrupt, Probe, World
from kit.laws.twists import (
    Pair,
    Twist,
    fails,
    foreign,
    frozen,
    insert,
    inside_autocast,
    joins,
    loss_with_a_parameter,
    overwritten_loss,
    put,
    refused,
    stale,
    tied,
    trained_before,
    unused,
)

Row = tuple[Twist, ...]
Rows = Mapping[str, Row]


def regression(*sizes: int) -> World:
    """A small model, and micro-batches of so many samples; targets of number n lie around 2 n."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    batches = [(draw.randn(size, 7), draw.randn(size, 5) + 2 * n) for n, size in enumerate(sizes)]
    return World(model, batches, sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


def window() -> World:
    return regression(9, 1, 4)


def sizes(*numbers: int) -> Twist:
    """Micro-batches of so many samples."""
    return lambda w: put(batches=regression(*numbers).batches)(w)


def only(*numbers: int) -> Twist:
    """These micro-batches only."""
    return lambda w: put(batches=[w.batches[n] for n in numbers])(w)


def tag(*names: str) -> Twist:
    return lambda w: w.tags.update(names)


def sequences(w: World) -> None:
    """Samples are sequences of several lengths; output and target cannot change places."""
    shapes = ((3, 2), (1, 9), (2, 4), (2, 3), (4, 1), (1, 5), (2, 2))[: len(w.batches)]
    w.batches = [
        (draw.randn(*shape, 7), draw.randn(*shape, 5) + 2 * n) for n, shape in enumerate(shapes)
    ]
    w.loss = lambda out, y: ((out - y).square() * y.abs()).flatten(1).mean(1).mean()


def repeated(w: World) -> None:
    """The last micro-batch three times, and not all in a row; the pair is the same object."""
    w.after.append(lambda w: put(batches=[w.batches[-1], *w.batches, w.batches[-1]])(w))


def norm_first(w: World) -> None:
    """Behind a layer with a bias, that bias would have a gradient of rounding errors."""
    assert isinstance(w.model, nn.Sequential)
    w.model.insert(0, nn.BatchNorm1d(7))


def dropout(**mode: bool) -> Row:
    return (insert(lambda: nn.Dropout(0.5), **mode),)


def pairs(w: World) -> None:
    """A tuple of micro-batches, in lists and named tuples in turn, as a DataLoader makes them."""
    makers = itertools.cycle([list, Pair._make])
    w.after.append(lambda w: put(batches=(*(next(makers)(b) for b in w.batches),))(w))


def in_float64(w: World) -> None:
    """The model, and data that are numbers of its kind."""
    w.model.double()
    w.batches = [[t.double() if t.is_floating_point() else t for t in b] for b in w.batches]
    w.tags.add("float64")


class OutOfMemory(torch.OutOfMemoryError):
    """As an allocator has it: known by its kind, or by its words."""

    def __str__(self) -> str:
        return "CUDA out of memory"


class Checkpointed(nn.Tanh):
    """Runs again in the backward pass, in the older way that libraries still have."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


def kept_losses(w: World) -> None:
    """The loss keeps what it returns, as one that logs does."""
    inner, kept = w.loss, list[Tensor]()

    def loss(*args: Tensor) -> Tensor:
        kept.append(inner(*args))
        return kept[-1]

    @contextmanager
    def outer() -> Iterator[None]:
        yield
        w.notes["losses that the loss function kept"] = [x.detach() for x in kept]

    w.loss = loss
    w.inside.append(outer)


def infinite_loss(w: World) -> None:
    """Of the second micro-batch."""
    inputs, targets = w.batches[1]
    w.batches[1] = (inputs, targets * math.inf)


def only_the_loss(w: World) -> None:
    """The model has nothing to train."""
    loss_with_a_parameter(w)
    inner, w.model = w.loss, nn.Sequential(Probe(), nn.Tanh())
    w.loss = lambda out, y: inner(out[:, :5], y)


def refilled(w: World) -> None:
    """The next window comes in the same tensors."""

    def visit(place: str) -> None:
        for tensor in itertools.chain(*w.batches) if place == "next window" else ():
            tensor[:, 1:] = tensor[:, :1]

    w.visits, w.tags = visit, {*w.tags, "twice"}


def with_autocast_off(w: World) -> None:
    """Inside whatever there is."""
    w.inside.append(lambda: torch.autocast(w.device.type, enabled=False))


def gradient_of_another(w: World) -> None:
    """The model has a parameter of another optimizer, which is in the middle of a window."""
    theirs = w.model.theirs = nn.Parameter(torch.ones(3))
    theirs.grad, w.foreign = torch.ones(3), ("theirs",)


MODES: dict[str, Row] = {
    "dropout in train mode": dropout(),
    "dropout in eval mode": dropout(train=False),
    "one layer in eval mode": dropout(layer_train=False),
}
BATCH_NORM: dict[str, Row] = {
    "batch norm": (norm_first, sizes(3, 5, 2, 4)),
    "batch norm in eval mode": (insert(lambda: nn.BatchNorm1d(13), train=False),),
}
STEPS: dict[str, Row] = {
    "Adam": (put(adam={"lr": 0.01}), trained_before),
    "a group for each parameter": (put(groups=True), trained_before),
    "pairs in lists and named tuples": (pairs,),
    "a model in float64": (in_float64, trained_before),
    "learning rate 0": (put(sgd={"lr": 0.0, "momentum": 0.9}),),
    "a reentrant checkpoint": (insert(Checkpointed),),
}
OLDER: dict[str, Row] = {
    "stale gradients": (stale, trained_before, put(groups=True)),
}
OWN_LOSS: dict[str, Row] = {
    "a loss with a parameter": (loss_with_a_parameter, trained_before),
    "a model without parameters": (only_the_loss,),
}
LOSSES: dict[str, Row] = {
    "a loss that is logged": (kept_losses,),
    "a loss of 0, and below, with a gradient": (
        put(loss=lambda out, y: (out - out.detach()).mean() - len(out) // 2),
    ),
    "an infinite loss": (infinite_loss,),
}
NO_GRADIENT: dict[str, Row] = {"a parameter without a gradient": (unused,)}
FOREIGN: dict[str, Row] = {
    "a frozen parameter": (frozen, stale, tag("frozen")),
    "a foreign parameter": (foreign, tag("foreign")),
    "a gradient that another optimizer will step on": (unused, gradient_of_another),
    "a layer that joins after the window before": (joins, tag("twice")),
}


def failing(place: str, *numbers: int, tags: Iterable[str] = ()) -> dict[str, Row]:
    """An error at each of these visits of model, loss, step or data; others at the last."""
    rows: dict[str, Row] = {
        f"the {place} fails at {n}": (trained_before, fails(place, n), tag(*tags)) for n in numbers
    }
    others = {"Ctrl-C": PlantedInterrupt, "out of memory": OutOfMemory}
    return rows | {
        f"{name} in the {place}": (trained_before, fails(place, numbers[-1], error), tag(*tags))
        for name, error in others.items()
    }


ERRORS = {
    **failing("model", 3),
    **failing("step", 1),
    "the backward pass fails at 2": (trained_before, fails("backward", 2)),
    "Ctrl-C in the backward pass": (trained_before, fails("backward", 3, PlantedInterrupt)),
    "the model fails, and the next call": (stale, fails("model", 2), tag("retried")),
    "Ctrl-C in the step, and the next call": (
        fails("step", 1, PlantedInterrupt),
        tag("retried"),
    ),
    "a foreign parameter, and the model fails": (foreign, fails("model", 2), tag("foreign")),
}
IN_AUTOCAST: Row = (inside_autocast(torch.bfloat16), tag("the caller's autocast"))
AUTOCAST = {
    "inside the caller's autocast": IN_AUTOCAST,
    "inside the caller's autocast, and the backward pass fails": (
        *IN_AUTOCAST,
        fails("backward", 2),
    ),
    "with autocast off, inside the caller's autocast": (*IN_AUTOCAST, with_autocast_off),
}
NO_PAIRS: dict[str, tuple[Any, ...]] = {
    "no samples": ((torch.ones(0, 7), torch.ones(0, 5)), "0"),
    "6 inputs and 1 target": ((torch.ones(6, 7), torch.ones(1, 5)), "6", "1"),
    "1 input and 6 targets": ((torch.ones(1, 7), torch.ones(6, 5)), "1", "6"),
    "three tensors": ((torch.ones(2, 7), torch.ones(2, 5), torch.ones(2)),),
    "one tensor of two rows": (torch.ones(2, 7),),
}


def bad(kinds: Mapping[str, tuple[Any, ...]], *places: int, tags: Iterable[str] = ()) -> Rows:
    """A bad micro-batch of each kind, at these places in turn."""

    def put_there(at: int, value: object) -> Twist:
        return lambda w: w.batches.__setitem__(at, value)

    return {
        f"{kind}, as micro-batch {at + 1}": (
            *refused(put_there(at, batch), mentions=mentions),
            tag("bad micro-batch", *tags),
        )
        for (kind, (batch, *mentions)), at in zip(kinds.items(), itertools.cycle(places))
    }


UNDER: dict[str, Row] = {
    f"{what} under the caller's {name}": (*row, put(inside=[mode]), tag("early"))
    for name, mode in {"no_grad": torch.no_grad, "inference mode": torch.inference_mode}.items()
    for what, row in {
        "the model fails": (fails("model"),),
        **bad({"three tensors": NO_PAIRS["three tensors"]}, 0),
    }.items()
}
NOTHING: dict[str, Row] = {"no micro-batch": refused(lambda w: w.batches.clear(), mentions=("0",))}
ACCUMULATE: dict[str, Rows] = {
    "window": {
        "9, 1 and 4 samples": (),
        "one micro-batch, and a loss that is overwritten": (only(0), overwritten_loss),
        "micro-batches of one size, the last smaller": (sizes(3, 3, 3, 3, 2),),
        "12 micro-batches": (sizes(*range(1, 13)),),
        "the same micro-batch again": (repeated,),
        "nothing but the same micro-batch": (only(1, 1),),
        "the same tensors, filled anew": (refilled,),
        "samples of several lengths": (sequences,),
        "tied weights": (tied,),
        **LOSSES,
    },
    "step": STEPS,
    "older": OLDER | OWN_LOSS,
    "modes": MODES | BATCH_NORM,
    "no gradient": NO_GRADIENT,
    "foreign": FOREIGN,
    "errors": ERRORS | failing("loss", 3) | UNDER,
    "autocast": AUTOCAST,
    "bad": {**bad(NO_PAIRS, 0, 1, 2), **NOTHING},
}
