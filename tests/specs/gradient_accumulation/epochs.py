"""The worlds that train_epoch is put into."""

from __future__ import annotations

import math

import torch
from torch import nn

from kit.laws.toys import mse
from kit.laws.trace import Probe, World
from kit.laws.twists import (
    fails,
    foreign,
    frozen,
    gradient,
    huge,
    inside_autocast,
    joins,
    loss_with_a_parameter,
    option,
    overwritten_loss,
    put,
    refused,
    stale,
    trained_before,
    unused,
)
from specs.gradient_accumulation.scenarios import (
    AUTOCAST,
    BATCH_NORM,
    IN_AUTOCAST,
    LOSSES,
    MODES,
    NO_PAIRS,
    NOTHING,
    OLDER,
    STEPS,
    UNUSUAL,
    Row,
    Rows,
    bad,
    failing,
    gradient_of_another,
    in_float64,
    norm_first,
    only,
    regression,
    sequences,
    sizes,
    tag,
    transposed_weights,
)

INF, NAN, HALF = math.inf, math.nan, option(max_norm=0.5)
IN_BFLOAT16 = put(dtype=torch.bfloat16)
RETRIED = tag("retried")


def epoch() -> World:
    """Seven micro-batches in windows of three: the last window has one."""
    world = regression(3, 5, 2, 4, 1, 6, 2)
    world.options, world.gamma = {"window": 3}, 0.5
    world.after.append(_heard_schedule)
    return world


def _heard_schedule(w: World) -> None:
    """A schedule can fail too, as one does that is at its end."""
    if w.scheduler is not None:
        step = w.scheduler.step
        w.scheduler.step = lambda: (w.visits("schedule"), step())  # type: ignore[method-assign]


def _settings(
    dtype: object = torch.float32, scaler: object = None, *mentions: str, **options: object
) -> Row:
    return refused(put(dtype=dtype, scaler=scaler), option(**options), mentions=mentions)


def nothing_to_train(w: World) -> None:
    """The optimizer holds nothing that the model has."""
    unused(w)
    w.foreign = (*dict(w.model.named_parameters()),)
    w.tags.add("foreign")


def only_the_loss(w: World) -> None:
    """The model has nothing to train."""
    loss_with_a_parameter(w)
    inner, w.model = w.loss, nn.Sequential(Probe(), nn.Tanh())
    w.loss = lambda out, y: inner(out[:, :5], y)


def targets_in_bfloat16(w: World) -> None:
    w.batches = [(x, y.bfloat16()) for x, y in w.batches]


EPOCHS: dict[str, Rows] = {
    "windows": {
        "seven micro-batches in windows of 3": (),
        "windows of 10": (option(window=10),),
        "windows of 1, and a loss that is overwritten": (option(window=1), overwritten_loss),
        "samples of several lengths": (sequences,),
        "a list": (tag("list"),),
        **STEPS,
        **OLDER,
        **LOSSES,
        **MODES,
        **BATCH_NORM,
    },
    "unusual": {
        **UNUSUAL,
        "a model in float64, clipped": (HALF, in_float64),
        **AUTOCAST,
        "in bfloat16, inside the caller's autocast": (IN_BFLOAT16, *IN_AUTOCAST),
        "in bfloat16, inside the caller's autocast, and the backward pass fails": (
            *(IN_BFLOAT16, *IN_AUTOCAST, fails("backward", 5)),
        ),
    },
    "data": {"six micro-batches": (only(*range(6)),)},
    "clipping": {
        "a loss with a parameter, clipped": (loss_with_a_parameter, HALF),
        "max_norm 1, and transposed weights": (option(max_norm=1), transposed_weights),
        "max_norm inf": (option(max_norm=INF),),
        "gradients of zero": (option(max_norm=1.0), put(loss=lambda out, y: mse(out, y) * 0)),
        "a group for each parameter, clipped": (HALF, put(groups=True)),
    },
    "scheduler": {
        "no schedule": (put(gamma=None),),
        "an infinite gradient, clipped": (gradient(INF, 4), option(max_norm=1.0)),
    },
    "end": {
        "a loss with a parameter, windows of 2": (loss_with_a_parameter, option(window=2)),
    },
    "others": {
        "a parameter without a gradient, clipped": (unused, HALF),
        "a frozen parameter": (frozen, stale, HALF),
        "a layer that joins after the first window": (joins, HALF),
        "a foreign parameter": (foreign, HALF, tag("foreign")),
        "a gradient that another optimizer will step on": (unused, gradient_of_another(), HALF),
        "nothing that is held has a gradient": (nothing_to_train, HALF),
    },
    "errors": {
        **failing(model=4, loss=5, backward=5, step=3, schedule=2, data=6),
        "the step fails, and the next epoch": (fails("step", 2), RETRIED),
        "the data fail at once": (stale, fails("data", 2), tag("early")),
        "the model fails, a foreign parameter": (
            *(foreign, gradient_of_another(), fails("model", 5), tag("foreign")),
        ),
        **{
            name: (norm_first, sizes(3, 5, 2, 4, 3, 6, 2), *row)
            for name, row in bad(NO_PAIRS, 3, 5, 6).items()
        },
    },
    "options": {
        "window 0": _settings(torch.float32, None, "0", window=0),
        "window -3": _settings(torch.float32, None, "-3", window=-3),
        **{
            f"max_norm {value}": _settings(torch.float32, None, str(value), max_norm=value)
            for value in (-2.5, 0.0, NAN)
        },
        **{name: (*row, tag("early")) for name, row in NOTHING.items()},
    },
    "precisions": {
        "dtype float64": _settings(torch.float64, None, "float64"),
        "float16 without a scaler": _settings(torch.float16, None, "float16"),
        "float16, a disabled scaler": _settings(torch.float16, {"enabled": False}, "float16"),
        "a scaler with bfloat16": _settings(torch.bfloat16, {"init_scale": 2.0}, "bfloat16"),
        "a scaler with float32": _settings(torch.float32, {"init_scale": 2.0}, "float32"),
        "float32, a disabled scaler": (put(scaler={"enabled": False}), HALF),
    },
    "not skipped": {"an infinite gradient in bfloat16": (IN_BFLOAT16, gradient(INF, 4))},
}
SIXTEEN_BITS: dict[str, Rows] = {
    "autocast": {
        "a plain epoch": (),
        "targets in bfloat16": (targets_in_bfloat16,),
        "a model without parameters": (only_the_loss,),
        **{
            f"inside the caller's autocast to {str(dtype)[6:]}": (
                inside_autocast(dtype),
                tag("the caller's autocast"),
            )
            for dtype in (torch.bfloat16, torch.float16)
        },
    },
}
FLOAT16: dict[str, Rows] = {
    "scaler": {
        "clipped, a group for each parameter": (HALF, put(groups=True)),
        "a parameter without a gradient": (unused, HALF),
        "a foreign parameter": (foreign, HALF, tag("foreign")),
        "a scale that grows in every window": (
            put(scaler={"init_scale": 64.0, "growth_interval": 1}),
        ),
        "a scale that falls a little": (
            put(scaler={"init_scale": 64.0, "backoff_factor": 0.9}),
            gradient(INF, 4),
        ),
    },
    "skipped": {
        "an infinite gradient at 1, clipped": (gradient(INF, 1), option(max_norm=1.0)),
        "a NaN gradient at 7": (gradient(NAN, 7), trained_before),
        "an infinite gradient at 1, and dropout": (*MODES["dropout in train mode"], gradient(INF)),
        "an infinite gradient of another optimizer": (gradient_of_another(INF), HALF),
        "learning rate 0": STEPS["learning rate 0"],
        "a fused optimizer, which the scaler always calls": (
            put(sgd={"lr": 0.02, "momentum": 0.9, "fused": True}),
            *(gradient(INF, 4), trained_before, tag("fused")),
        ),
        "an infinite loss with finite gradients": (put(loss=lambda out, y: mse(out, y) + INF),),
        "a gradient of 1e25, whose square is no float32": (huge(1e25), tag("norm beyond float32")),
    },
    "errors in 16 bits": {
        "the step fails, and the next epoch": (fails("step", 2), RETRIED),
        "the model fails, and the next epoch": (fails("model", 5), RETRIED),
    },
}
