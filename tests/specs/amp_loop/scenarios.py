"""The worlds that train_step and train are put into."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.toys import mse
from kit.laws.trace import PlantedInterrupt, Probe, World
from kit.laws.twists import (
    Twist,
    as_they_are,
    fails,
    foreign,
    frozen,
    gradient,
    huge,
    in_precisions,
    insert,
    inside_autocast,
    loss_with_a_parameter,
    option,
    put,
    refused,
    stale,
    tied,
    trained_before,
    unused,
)


def one_step() -> World:
    """A small model, far off on 11 rows, so that gradients are large."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    batch = draw.randn(11, 7), 4 * draw.randn(11, 5)
    return World(model, [batch], sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


def many_steps() -> World:
    """Seven batches of unequal length, a schedule, and momentum."""
    world = one_step()
    world.batches = [(draw.randn(n, 7), 4 * draw.randn(n, 5)) for n in (3, 5, 2, 4, 1, 6, 2)]
    world.gamma = 0.5
    return world


def matrix_loss(out: Tensor, y: Tensor) -> Tensor:
    """A loss that ends in a matrix product, which autocast computes in 16 bits."""
    error = (out - y).square().reshape(1, -1)
    return (torch.ones_like(error) @ error.T).sum() / error.numel()


class Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def large_inputs(w: World) -> None:
    """Inputs of 2**20 are infinite in float16; the model itself brings them down."""
    w.model = nn.Sequential(Times(2.0**-20), *w.model.children())
    w.batches = [(x * 2.0**20, y) for x, y in w.batches]


def in_lists(w: World) -> None:
    """As DataLoader makes them."""
    w.batches = [list(batch) for batch in w.batches]


def infinite_target(w: World) -> None:
    w.batches[0][1][0, 0] = math.inf
    w.tags = {*w.tags, "not finite"}


INF, NAN, HALF = math.inf, math.nan, option(max_norm=0.5)
IN_EACH_PRECISION: dict[str, dict[str, tuple[Twist, ...]]] = {
    "autocast": {
        "a plain step": (),
        "a loss that ends in a matrix product": (put(loss=matrix_loss),),
        "inputs of 2**20": (large_inputs,),
    },
    "gradients": {
        "in the middle of training": (trained_before,),
        "stale gradients": (stale,),
        "a loss with a parameter": (loss_with_a_parameter, HALF),
    },
    "max_norm": {
        "clipped": (HALF,),
        "max_norm that nothing reaches": (option(max_norm=1e4),),
        "max_norm inf": (option(max_norm=INF),),
        "gradients of zero": (option(max_norm=1.0), put(loss=lambda out, y: mse(out, y) * 0)),
    },
    "grad_norm": {
        "a group for each parameter": (put(groups=True), HALF),
        "tied weights": (tied, HALF),
    },
    "skipped": {
        "an infinite gradient": (gradient(INF), trained_before),
        "a NaN gradient": (gradient(NAN), trained_before),
        "an infinite gradient, clipped": (gradient(-INF), option(max_norm=1.0)),
        "an infinite gradient, Adam": (gradient(INF), put(adam={"lr": 0.01}), trained_before),
        "an infinite target": (infinite_target,),
        "an infinite loss with finite gradients": (put(loss=lambda out, y: mse(out, y) + INF),),
        "learning rate 0": (put(sgd={"lr": 0.0, "momentum": 0.9}),),
        "Adam": (put(adam={"lr": 0.01}),),
    },
    "a list": {"pairs in lists": (in_lists,)},
    "no gradient": {
        "a parameter without a gradient": (unused,),
        "a parameter without a gradient, clipped": (unused, HALF),
    },
    "foreign parameters": {
        "a frozen parameter": (frozen, HALF),
        "a foreign parameter": (foreign, HALF),
    },
    "huge gradients": {
        "a gradient of 1e30": (huge(1e30),),
        "a gradient of 1e30, clipped": (huge(1e30), option(max_norm=3.0), put(sgd={"lr": 0.5})),
    },
    "the caller's autocast": {
        "inside bfloat16": (inside_autocast(torch.bfloat16),),
        "inside float16 without cache": (inside_autocast(torch.float16, cache=False),),
    },
    "the caller's mode": {
        "dropout in train mode": (insert(lambda: nn.Dropout(0.5)),),
        "dropout in eval mode": (insert(lambda: nn.Dropout(0.5), train=False),),
        "one layer in eval mode": (insert(lambda: nn.Dropout(0.5), layer_train=False),),
        "batch norm": (insert(lambda: nn.BatchNorm1d(13)),),
        "batch norm in eval mode": (insert(lambda: nn.BatchNorm1d(13), train=False),),
    },
    "errors": {
        "the model fails": (trained_before, fails("model")),
        "Ctrl-C in the model": (trained_before, fails("model", 1, PlantedInterrupt)),
        "the loss fails": (trained_before, foreign, fails("loss")),
        "the optimizer fails": (trained_before, fails("step", 2)),
    },
}
IN_FLOAT16: dict[str, dict[str, tuple[Twist, ...]]] = {
    "a large scale": {
        "a scale of 65536": (put(scaler={"init_scale": 65536.0}, loss=lambda out, y: out.mean()),),
        "a loss of 1e37": (put(loss=lambda out, y: mse(out, y) + 1e37),),
        "a scale that grows": (put(scaler={"init_scale": 64.0, "growth_interval": 1}),),
        "a scale that grows next": (put(scaler={"init_scale": 64.0, "growth_interval": 2}),),
    },
    "skipped in float16": {
        "gradients of 3e38, whose norm is not finite": (
            huge(3e38),
            put(scaler={"init_scale": 1.0}),
        ),
    },
}
NO_PAIRS: dict[str, tuple[object, ...]] = {
    "no rows": ((torch.ones(0, 7), torch.ones(0, 5)), "0"),
    "6 inputs and 1 target": ((torch.ones(6, 7), torch.ones(1, 5)), "6", "1"),
    "1 input and 6 targets": ((torch.ones(1, 7), torch.ones(6, 5)), "1", "6"),
    "three tensors": ((torch.ones(2, 7), torch.ones(2, 5), torch.ones(2)),),
    "one tensor of two rows": (torch.ones(2, 7),),
    "lists of numbers": (([1.0, 2.0], [1.0, 2.0]),),
    "tensors without rows": ((torch.ones(()), torch.ones(())),),
    "a tensor and None": ((torch.ones(2, 7), None),),
    "a dict": ({"x": torch.ones(2, 7), "y": torch.ones(2, 5)},),
}


def _no_pairs(at: int) -> dict[str, tuple[Twist, ...]]:
    """A batch at this place that is no pair of tensors of one length."""

    def put_there(value: object) -> Twist:
        return lambda w: w.batches.__setitem__(at, value)

    return {
        f"a batch of {name}": refused(put_there(batch), mentions=mentions)
        for name, (batch, *mentions) in NO_PAIRS.items()
    }


def _settings(
    dtype: object = torch.float32, scaler: object = None, *mentions: str, **options: object
) -> tuple[Twist, ...]:
    return refused(put(dtype=dtype, scaler=scaler), option(**options), mentions=mentions)


BAD_OPTIONS = {
    "dtype float64": _settings(torch.float64, None, "float64"),
    "dtype int8": _settings(torch.int8, None, "int8"),
    "dtype as a word": _settings("float16", None, "float16"),
    "float16 without a scaler": _settings(torch.float16, None, "float16"),
    "a scaler with bfloat16": _settings(torch.bfloat16, {"init_scale": 2.0}, "bfloat16"),
    "a scaler with float32": _settings(torch.float32, {"init_scale": 2.0}, "float32"),
    **{
        f"max_norm {value}": _settings(torch.float32, None, str(value), max_norm=value)
        for value in (-2.5, 0.0, math.nan, -math.inf)
    },
}
TRAIN_STEP = {
    **in_precisions(one_step, IN_EACH_PRECISION),
    **in_precisions(one_step, IN_FLOAT16, "fp16"),
    **as_they_are(one_step, {"no pairs": _no_pairs(0), "options": BAD_OPTIONS}),
}
TRAIN = {
    **in_precisions(
        many_steps,
        {
            "batches": {
                "a plain run": (),
                "a clipped run": (HALF,),
                "no batches": (lambda w: w.batches.clear(),),
                "dropout": (insert(lambda: nn.Dropout(0.5)),),
                "dropout in eval mode": (insert(lambda: nn.Dropout(0.5), train=False),),
                "no schedule": (put(gamma=None),),
            },
            "errors": {
                "the model fails at the third batch": (fails("model", 3),),
                "Ctrl-C at the third batch": (fails("model", 3, PlantedInterrupt),),
            },
        },
    ),
    **in_precisions(
        many_steps,
        {"overflows": {f"at batch {n}": (gradient(INF, n),) for n in (1, 2, 4, 7)}},
        "fp16",
    ),
    **as_they_are(many_steps, {"bad batches": _no_pairs(3) | BAD_OPTIONS}),
}
