"""The worlds of accumulate, each as a change of a plain one, and what others are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.laws.precisions import default_dtype
from kit.laws.trace import Planted, PlantedInterrupt, Probe, World
from kit.laws.twists import (
    Pair,
    Twist,
    fails,
    foreign,
    frozen,
    in_unusual_modes,
    insert,
    inside_autocast,
    joins,
    loss_with_a_parameter,
    overwritten_loss,
    put,
    refused,
    stale,
    trained_before,
    unused,
)

Row = tuple[Twist, ...]
Rows = Mapping[str, Row]


def window() -> World:
    return regression(9, 1, 4)


def regression(*sizes: int) -> World:
    """A small model, and micro-batches of so many samples; targets of number n lie around 2 n."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    batches = [(draw.randn(size, 7), draw.randn(size, 5) + 2 * n) for n, size in enumerate(sizes)]
    return World(model, batches, sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


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


def pairs(w: World) -> None:
    """A tuple of micro-batches, in lists and named tuples in turn, as a DataLoader makes them."""
    makers = itertools.cycle([list, Pair._make])
    w.after.append(lambda w: put(batches=(*(next(makers)(b) for b in w.batches),))(w))


def in_float64(w: World) -> None:
    """The model, and data that are numbers of its kind."""
    w.model.double()
    w.batches = [[t.double() if t.is_floating_point() else t for t in b] for b in w.batches]
    w.tags.add("float64")


def in_default_dtype(dtype: torch.dtype) -> Twist:
    """The caller has another default dtype."""
    return lambda w: w.inside.append(lambda: default_dtype(dtype))


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


def inputs_with_a_parameter(w: World) -> None:
    """The inputs are made with a parameter that the optimizer holds."""
    shift = w.extra["prompt"] = nn.Parameter(torch.zeros(7))
    w.after.append(lambda w: put(batches=[(x + shift, y) for x, y in w.batches])(w))


def gradient_of_another(value: float = 1.0) -> Twist:
    """The model has a parameter of another optimizer, which is in the middle of a window."""

    def twist(w: World) -> None:
        theirs = w.model.theirs = nn.Parameter(torch.ones(3))
        theirs.grad, w.foreign = torch.full((3,), value), (*w.foreign, "theirs")

        @contextmanager
        def outer() -> Iterator[None]:
            yield
            w.notes["a gradient of another optimizer"] = theirs.grad

        w.inside.append(outer)

    return twist


def zero_gradients(w: World) -> None:
    """Every gradient is zero, which is not the same as none."""
    w.model.register_forward_hook(lambda _, args, out: out * 0)


def transposed_weights(w: World) -> None:
    """Weights, and so their gradients, lie in memory by columns."""
    for p in w.model.parameters():
        p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data


class Loss(nn.Module):
    """A loss with a mode of its own, and a buffer."""

    calls: Tensor

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss, self.dropout = loss, nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.loss(self.dropout(output), target)
        return result


def loss_in_mode(train: bool) -> Twist:
    """The loss is a module in this mode, and the model is in the other."""

    def twist(w: World) -> None:
        loss = Loss(w.loss_fn).train(train).to(w.device)
        w.model.train(not train)
        put(loss_fn=loss)(w)
        w.notes["loss calls in a buffer of the loss"] = loss.calls

    return lambda w: w.after.append(twist)


def with_autocast_off(w: World) -> None:
    """Inside whatever there is."""
    w.inside.append(lambda: torch.autocast(w.device.type, enabled=False))


def runs_before_the_step(w: World) -> None:
    """A hook of the optimizer runs the model under autocast, as one that logs does."""

    def hook(*_: object) -> None:
        with torch.autocast(w.device.type, torch.bfloat16):
            w.model(w.batches[0][0])

    def watch(w: World) -> None:
        w.optimizer.register_step_pre_hook(hook)

    w.after.append(watch)


MODES: dict[str, Row] = {
    "dropout in train mode": (insert(lambda: nn.Dropout(0.5)),),
    "dropout in eval mode": (insert(lambda: nn.Dropout(0.5), train=False),),
    "one layer in eval mode": (insert(lambda: nn.Dropout(0.5), layer_train=False),),
}
BATCH_NORM: dict[str, Row] = {"batch norm": (norm_first, sizes(3, 5, 2, 4))}
STEPS: dict[str, Row] = {
    "Adam": (put(adam={"lr": 0.01}), trained_before),
    "a group for each parameter": (put(groups=True), trained_before),
    "learning rate 0": (put(sgd={"lr": 0.0, "momentum": 0.9}),),
}
UNUSUAL: dict[str, Row] = {
    "a model in float64": (in_float64, trained_before),
    "a default dtype of float64": (in_default_dtype(torch.float64),),
    "other modes of torch than usual": (in_unusual_modes,),
    "pairs in lists and named tuples": (pairs,),
    "a reentrant checkpoint": (insert(Checkpointed),),
    "gradients of zero, and weight decay": (zero_gradients, trained_before),
}
OLDER: dict[str, Row] = {"stale gradients": (stale, trained_before, put(groups=True))}
LOSSES: dict[str, Row] = {
    "a loss with a parameter": (loss_with_a_parameter, trained_before),
    "inputs made with a parameter": (inputs_with_a_parameter,),
    "a loss in eval mode, a model in train mode": (loss_in_mode(False),),
    "a loss in train mode, a model in eval mode": (loss_in_mode(True),),
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
    "a gradient that another optimizer will step on": (unused, gradient_of_another()),
    "a layer that joins after the window before": (joins, tag("twice")),
}


def failing(**places: int) -> Rows:
    """Errors of all kinds, at such a visit of model, loss, backward pass, step or data."""
    kinds = {"an error": Planted, "Ctrl-C": PlantedInterrupt, "out of memory": OutOfMemory}
    return {
        f"{kind} in the {place} at {at}": (trained_before, fails(place, at, error))
        for place, at in places.items()
        for kind, error in kinds.items()
    }


ERRORS: Rows = {
    **failing(model=3, backward=2, step=1),
    "Ctrl-C in the step, and the next call": (fails("step", 1, PlantedInterrupt), tag("retried")),
    "a foreign parameter, and the model fails": (
        *(foreign, gradient_of_another(), fails("model", 2), tag("foreign")),
    ),
}
IN_AUTOCAST: Row = (inside_autocast(torch.bfloat16), tag("the caller's autocast"))
AUTOCAST: dict[str, Row] = {
    "inside the caller's autocast": IN_AUTOCAST,
    "with autocast off, inside the caller's autocast": (*IN_AUTOCAST, with_autocast_off),
    "inside the caller's autocast, and a hook runs the model before the step": (
        *(*IN_AUTOCAST, runs_before_the_step),
    ),
}
NO_PAIRS: dict[str, tuple[Any, ...]] = {
    "no samples": ((torch.ones(0, 7), torch.ones(0, 5)), "0"),
    "6 inputs and 1 target": ((torch.ones(6, 7), torch.ones(1, 5)), "6", "1"),
    "1 input and 6 targets": ((torch.ones(1, 7), torch.ones(6, 5)), "1", "6"),
    "three tensors": ((torch.ones(2, 7), torch.ones(2, 5), torch.ones(2)),),
    "one tensor of two rows": (torch.ones(2, 7),),
}


def bad(kinds: Mapping[str, tuple[Any, ...]], *places: int) -> Rows:
    """A bad micro-batch of each kind, at these places in turn."""

    def put_there(at: int, value: object) -> Twist:
        return lambda w: w.batches.__setitem__(at, value)

    return {
        f"{kind}, as micro-batch {at + 1}": (
            *refused(put_there(at, batch), mentions=mentions),
            tag("bad micro-batch"),
        )
        for (kind, (batch, *mentions)), at in zip(kinds.items(), itertools.cycle(places))
    }


NOTHING: dict[str, Row] = {"no micro-batch": refused(lambda w: w.batches.clear(), mentions=("0",))}
ACCUMULATE: dict[str, Rows] = {
    "window": {
        "9, 1 and 4 samples": (),
        "one micro-batch, and a loss that is overwritten": (only(0), overwritten_loss),
        "the same micro-batch again": (repeated,),
        "samples of several lengths": (sequences,),
        **OLDER,
        **LOSSES,
    },
    "step": STEPS,
    "modes": MODES | BATCH_NORM,
    "unusual": UNUSUAL,
    "no gradient": NO_GRADIENT,
    "foreign": FOREIGN,
    "errors": {**ERRORS, **failing(loss=3)},
    "autocast": AUTOCAST,
    "bad": {**bad(NO_PAIRS, 0, 1, 2), **NOTHING},
}
