"""The scenarios of accumulate, and what those of the others are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from kit.laws.trace import PlantedInterrupt, World
from kit.laws.twists import (
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
    tied,
    trained_before,
    unused,
)
from specs.gradient_accumulation.twists import (
    Checkpointed,
    OutOfMemory,
    Row,
    Rows,
    gradient_of_another,
    in_default_dtype,
    in_float64,
    infinite_loss,
    inputs_with_a_parameter,
    kept_losses,
    loss_in_mode,
    norm_first,
    only,
    only_the_loss,
    pairs,
    refilled,
    regression,
    repeated,
    runs_before_the_step,
    sequences,
    sizes,
    tag,
    transposed_weights,
    with_autocast_off,
    zero_gradients,
)


def window() -> World:
    return regression(9, 1, 4)


def dropout(**mode: bool) -> Row:
    return (insert(lambda: nn.Dropout(0.5), **mode),)


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
    "learning rate 0": (put(sgd={"lr": 0.0, "momentum": 0.9}),),
}
UNUSUAL: dict[str, Row] = {
    "a model in float64": (in_float64, trained_before),
    **{
        f"a default dtype of {str(dtype)[6:]}": (in_default_dtype(dtype),)
        for dtype in (torch.bfloat16, torch.float64)
    },
    "other modes of torch than usual": (in_unusual_modes,),
    "pairs in lists and named tuples": (pairs,),
    "a reentrant checkpoint": (insert(Checkpointed),),
    "gradients of zero, and weight decay": (zero_gradients, trained_before),
    "transposed weights": (transposed_weights, trained_before),
}
OLDER: dict[str, Row] = {
    "stale gradients": (stale, trained_before, put(groups=True)),
}
OWN_LOSS: dict[str, Row] = {
    "a loss with a parameter": (loss_with_a_parameter, trained_before),
    "a model without parameters": (only_the_loss,),
    "inputs made with a parameter": (inputs_with_a_parameter,),
    "a loss in eval mode, a model in train mode": (loss_in_mode(False),),
    "a loss in train mode, a model in eval mode": (loss_in_mode(True),),
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
    "a gradient that another optimizer will step on": (unused, gradient_of_another()),
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
    "a foreign parameter, and the model fails": (
        *(foreign, gradient_of_another(), fails("model", 2), tag("foreign")),
    ),
}
IN_AUTOCAST: Row = (inside_autocast(torch.bfloat16), tag("the caller's autocast"))
AUTOCAST = {
    "inside the caller's autocast": IN_AUTOCAST,
    "inside the caller's autocast, and the backward pass fails": (
        *IN_AUTOCAST,
        fails("backward", 2),
    ),
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
    "unusual": UNUSUAL,
    "no gradient": NO_GRADIENT,
    "foreign": FOREIGN,
    "errors": ERRORS | failing("loss", 3),
    "autocast": AUTOCAST,
    "bad": {**bad(NO_PAIRS, 0, 1, 2), **NOTHING},
}
