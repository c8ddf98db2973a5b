"""The worlds that train_epoch is put into."""

from __future__ import annotations

import math

import torch

from kit.laws.toys import mse
from kit.laws.trace import World
from kit.laws.twists import (
    fails,
    foreign,
    frozen,
    gradient,
    huge,
    inside_autocast,
    joins,
    loss_with_a_matrix_product,
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
    OWN_LOSS,
    STEPS,
    UNUSUAL,
    bad,
    dropout,
    failing,
)
from specs.gradient_accumulation.twists import (
    Row,
    Rows,
    gradient_of_another,
    in_float64,
    norm_first,
    only,
    only_the_loss,
    regression,
    repeated,
    sequences,
    sizes,
    tag,
    targets_in_bfloat16,
    transposed_weights,
)

INF, NAN, HALF = math.inf, math.nan, option(max_norm=0.5)
IN_BFLOAT16 = put(dtype=torch.bfloat16)
DISABLED = put(scaler={"enabled": False})
RETRIED = tag("retried")


def epoch() -> World:
    """Seven micro-batches in windows of three: the last window has one."""
    world = regression(3, 5, 2, 4, 1, 6, 2)
    world.options, world.gamma = {"window": 3}, 0.5
    return world


def _settings(
    dtype: object = torch.float32, scaler: object = None, *mentions: str, **options: object
) -> Row:
    return refused(put(dtype=dtype, scaler=scaler), option(**options), mentions=mentions)


def trained_in_turn(w: World) -> None:
    """The second window trains the first weight, and the others train the first bias."""

    def visit(place: str) -> None:
        visits.append(place)
        if place == "data" and visits.count(place) in (4, 7):
            for p in (weight, bias):
                p.requires_grad_(not p.requires_grad)

    visits = list[str]()
    weight, bias, *_ = w.model.parameters()
    weight.requires_grad_(False)
    w.visits = visit


def nothing_to_train(w: World) -> None:
    """The optimizer holds nothing that the model has."""
    unused(w)
    w.foreign = (*dict(w.model.named_parameters()),)
    w.tags.add("foreign")


def heard_schedule(w: World) -> None:
    """`fails("schedule", n)`: it raises as one does that is at its end."""

    def hear(w: World) -> None:
        assert w.scheduler is not None
        step = w.scheduler.step
        w.scheduler.step = lambda: (w.visits("schedule"), step())  # type: ignore[method-assign]

    w.after.append(hear)


BAD_OPTIONS: dict[str, Row] = {
    **{f"window {n}": _settings(torch.float32, None, str(n), window=n) for n in (0, -3)},
    **{
        f"max_norm {value}": _settings(torch.float32, None, str(value), max_norm=value)
        for value in (-2.5, 0.0, NAN, -INF)
    },
}
BAD_PRECISIONS: dict[str, Row] = {
    "dtype float64": _settings(torch.float64, None, "float64"),
    "float16 without a scaler": _settings(torch.float16, None, "float16"),
    "float16, a disabled scaler": _settings(torch.float16, {"enabled": False}, "float16"),
    "a scaler with bfloat16": _settings(torch.bfloat16, {"init_scale": 2.0}, "bfloat16"),
    "a scaler with float32": _settings(torch.float32, {"init_scale": 2.0}, "float32"),
}
BAD_BATCHES = {
    name: (norm_first, sizes(3, 5, 2, 4, 3, 6, 2), *row)
    for name, row in (
        *bad(NO_PAIRS, 3, 5, 6).items(),
        *bad(NO_PAIRS, 0, 2, 1, tags=["early"]).items(),
    )
}
FLOAT32: dict[str, Rows] = {
    "windows": {
        "seven micro-batches in windows of 3": (),
        **{f"windows of {n}": (option(window=n),) for n in (4, 10)},
        "windows of 1, and a loss that is overwritten": (option(window=1), overwritten_loss),
        "small last micro-batch": (sizes(4, 4, 4, 4, 4, 1), option(window=2)),
        "the same micro-batch again": (repeated,),
        "samples of several lengths": (sequences,),
        "a list": (tag("list"),),
        **LOSSES,
        **STEPS,
        **OLDER,
        **OWN_LOSS,
    },
    "modes": MODES | {"batch norm": BATCH_NORM["batch norm"]},
    "unusual": UNUSUAL | {"a model in float64, clipped": (HALF, in_float64)},
    "data": {"six micro-batches": (only(*range(6)),)},
    "clipping": {
        "a loss with a parameter, clipped": (loss_with_a_parameter, HALF),
        "max_norm that nothing reaches": (option(max_norm=10_000),),
        "max_norm 1, and transposed weights": (option(max_norm=1), transposed_weights),
        "max_norm inf": (option(max_norm=INF),),
        "gradients of zero": (option(max_norm=1.0), put(loss=lambda out, y: mse(out, y) * 0)),
        "a group for each parameter, clipped": (HALF, put(groups=True)),
    },
    "scheduler": {
        "no schedule": (put(gamma=None),),
        "an infinite gradient, clipped": (gradient(INF, 4), option(max_norm=1.0)),
        "a schedule over windows of one": (option(window=1), HALF),
    },
    "end": {
        "stale gradients, a window of 10": (stale, option(window=10)),
        "a loss with a parameter, windows of 2": (loss_with_a_parameter, option(window=2)),
    },
    "others": {
        "a parameter without a gradient, clipped": (unused, HALF),
        "a frozen parameter": (frozen, stale, HALF),
        "parameters that are trained in turn": (trained_in_turn,),
        "a layer that joins after the first window": (joins, HALF),
        "a foreign parameter": (foreign, HALF, tag("foreign")),
        "a gradient that another optimizer will step on": (unused, gradient_of_another(), HALF),
        "nothing that is held has a gradient": (nothing_to_train, HALF),
    },
    "autocast of the caller": {
        **AUTOCAST,
        "in bfloat16, inside the caller's autocast": (IN_BFLOAT16, *IN_AUTOCAST),
        "in bfloat16, inside the caller's autocast, and the backward pass fails": (
            *(IN_BFLOAT16, *IN_AUTOCAST, fails("backward", 5)),
        ),
        "in bfloat16, inside the caller's autocast, and the loss fails": (
            *(IN_BFLOAT16, *IN_AUTOCAST, fails("loss", 5)),
        ),
    },
    "errors": {
        **failing("model", 4),
        **failing("loss", 5),
        **failing("step", 1, 3),
        **failing("data", 4, 6),
        "the schedule fails at 2": (trained_before, heard_schedule, fails("schedule", 2)),
        "the backward pass fails at 5": (trained_before, fails("backward", 5)),
        "the step fails, and the next epoch": (fails("step", 2), RETRIED),
        "the data fail at once": (stale, fails("data", 2), tag("early")),
        "the model fails, a loss with a parameter": (loss_with_a_parameter, fails("model", 5)),
        "the model fails, a foreign parameter": (
            *(foreign, gradient_of_another(), fails("model", 5), tag("foreign")),
        ),
        **BAD_BATCHES,
    },
    "options": BAD_OPTIONS | {name: (*row, tag("early")) for name, row in NOTHING.items()},
    "precisions": BAD_PRECISIONS | {"float32, a disabled scaler": (DISABLED, HALF)},
}
SIXTEEN_BITS: dict[str, Rows] = {
    "autocast": {
        "a plain epoch": (),
        "a loss that ends in a matrix product": (loss_with_a_matrix_product,),
        "a loss with a parameter": (loss_with_a_parameter, HALF),
        "samples of several lengths": (sequences,),
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
BFLOAT16: dict[str, Rows] = {
    "not skipped": {
        "an infinite gradient": (gradient(INF, 4),),
        "an infinite gradient, a disabled scaler": (gradient(INF, 4), DISABLED),
    },
}
FLOAT16: dict[str, Rows] = {
    "scaler": {
        "clipped": (HALF, sizes(4, 1, 6)),
        "clipped, a group for each parameter": (HALF, put(groups=True), trained_before),
        "max_norm that nothing reaches": (option(max_norm=1e4),),
        "a parameter without a gradient": (unused, HALF),
        "a foreign parameter": (foreign, HALF, tag("foreign")),
    },
    "growing": {
        "a scale that grows in every window": (
            put(scaler={"init_scale": 64.0, "growth_interval": 1}),
        ),
        "a scale that grows after two windows": (
            put(scaler={"init_scale": 64.0, "growth_interval": 2}),
            option(window=2),
        ),
        "a scale that falls a little": (
            put(scaler={"init_scale": 64.0, "backoff_factor": 0.9}),
            gradient(INF, 4),
        ),
        "a scale of 65536": (put(scaler={"init_scale": 65536.0}, loss=lambda out, y: out.mean()),),
        "two infinite gradients in a window": (gradient(INF, 4), gradient(INF, 6)),
    },
    "skipped": {
        "an infinite gradient at 1, clipped": (gradient(INF, 1), option(max_norm=1.0)),
        "an infinite gradient at 6": (gradient(INF, 6), trained_before),
        "a NaN gradient at 7": (gradient(NAN, 7), trained_before),
        "an infinite gradient at 1, and dropout": (*dropout(), gradient(INF, 1)),
        "an infinite gradient of another optimizer": (gradient_of_another(INF), HALF),
        "learning rate 0": (put(sgd={"lr": 0.0, "momentum": 0.9}),),
        "a fused optimizer, which the scaler always calls": (
            put(sgd={"lr": 0.02, "momentum": 0.9, "fused": True}),
            *(gradient(INF, 4), trained_before, tag("fused")),
        ),
        "an infinite loss with finite gradients": (put(loss=lambda out, y: mse(out, y) + INF),),
        "a gradient of 1e25, whose square is no float32": (huge(1e25), tag("norm beyond float32")),
    },
    "errors in 16 bits": {
        "the data fail at 6": (trained_before, fails("data", 6)),
        "the step fails": (trained_before, fails("step", 2)),
        "the step fails, and the next epoch": (fails("step", 2), RETRIED),
        "the model fails, and the next epoch": (fails("model", 5), RETRIED),
        "the schedule fails, and the next epoch": (heard_schedule, fails("schedule", 2), RETRIED),
    },
}
