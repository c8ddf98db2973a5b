"""The laws of train_step and train: as the oracle does, apart from what is free."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kit.laws.law import Law
from kit.laws.trace import Trace, World
from specs.amp_loop import oracle
from specs.amp_loop.scenarios import TRAIN, TRAIN_STEP

# Gradients after the call are nobody's business, and after an error neither is what was on the way.
FREE = (
    ("kept gradients", lambda want, _: want["outcome"] != "ValueError"),
    ("passes|loss calls|buffers|random|scaler", lambda want, _: _failed(want)),
    ("grad_norm", lambda _, w: "norm beyond float32" in w.tags),
    # What clipping makes of an infinity that no scaler keeps away from the weights.
    ("gradients at|weights|optimizer state", lambda _, w: _clips_an_infinity(w)),
)

CLAUSES = {
    "outcome": ("Raises", "this input is not checked, or an error is kept back"),
    "message": ("Raises", "the message does not say which value was wrong"),
    "kept gradients": ("Raises", "the check comes too late: gradients are changed already"),
    "number of results": ("batches", "one for each batch"),
    "passes forward": ("autocast", "the model runs in another precision, mode, or more than once"),
    "passes back": ("autocast", "backward() runs under autocast"),
    "loss calls": ("autocast", "the loss runs in another precision, or gets the output in 16 bits"),
    "skipped": ("skipped", "ask the scaler whether it skipped: no norm, loss or weight tells"),
    "loss": ("loss", "it is scaled still, of another dtype, or kept with its graph"),
    "grad_norm": ("grad_norm", "it is scaled still, clipped, or not over all that was trained"),
    "gradients at": ("gradients", "they are scaled still, stale, or clipped in another way"),
    "optimizer steps": ("step", "a step too many, or none"),
    "rate": ("scheduler", "the schedule is ahead of the steps, or behind"),
    "weights": ("step", "another step was taken"),
    "optimizer state": ("step", "another step was taken"),
    "optimizer groups": ("scheduler", "the schedule is ahead of the steps, or behind"),
    "scaler": ("skipped", "update() is missing, called twice, or called for something else"),
    "schedule": ("scheduler", "the schedule advances at another time than with a step taken"),
    "buffers": ("untouched", "the model runs more than once, or in another mode"),
    "random state": ("untouched", "a seed is set, or random numbers are drawn"),
}


def _failed(want: Trace) -> bool:
    return bool(want["outcome"] not in ("returns", "ValueError"))


def _clips_an_infinity(w: World) -> bool:
    return "not finite" in w.tags and w.scaler is None and "max_norm" in w.options


def _step(answer: ModuleType, w: World) -> Any:
    return answer.train_step(
        w.model, w.batch, w.loss_fn, w.optimizer, w.grad_scaler, dtype=w.dtype, **w.options
    )


def _train(answer: ModuleType, w: World) -> Any:
    return answer.train(
        w.model,
        w.batches,
        w.loss_fn,
        w.optimizer,
        w.grad_scaler,
        w.scheduler,
        dtype=w.dtype,
        **w.options,
    )


STEP = Law("amp_loop", "train_step", _step, oracle.train_step, TRAIN_STEP, FREE, CLAUSES)
RUN = Law("amp_loop", "train", _train, oracle.train, TRAIN, FREE, CLAUSES)
