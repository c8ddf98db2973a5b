"""The laws of a window: as the oracle does, apart from what is free."""

from functools import partial

import torch

from kit.laws.law import Law
from specs.gradient_accumulation import oracle
from specs.gradient_accumulation.scenarios import epoch, regression
from specs.gradient_accumulation.tokens import tokens


def _broke_off(want, w):
    return want["outcome"] not in ("returns", "ValueError")


# What was on the way when an error came is nobody's business, nor are gradients of others.
_ON_THE_WAY = "passes|loss calls|losses that|buffers|random|steps taken at"
FREE = (
    ("kept gradients", lambda _, w: bool({"foreign", "frozen", "early"} & w.tags)),
    ("result", lambda _, w: "float64" in w.tags),
    # Gradients in 16 bits are rounded where a share is multiplied in; the weights show the step.
    ("passes back|gradients|kept|optimizer state", lambda _, w: "the caller's autocast" in w.tags),
    # Of a model in 16 bits the loss is exact, as a number of float32.
    ("gradients|kept|weights|optimizer state", lambda _, w: "16 bits" in w.tags),
    # Whether it is called for a window that is skipped.
    ("optimizer steps|steps taken at|gradients at|rate", lambda _, w: "fused" in w.tags),
    ("passes|loss calls|random", lambda _, w: "no labels" in w.tags),
    (_ON_THE_WAY, lambda want, w: _broke_off(want, w) or "retried" in w.tags),
)
WINDOW_FREE = (*FREE, ("kept gradients", _broke_off))
EPOCH_FREE = (
    *FREE,
    (_ON_THE_WAY, lambda _, w: "bad micro-batch" in w.tags),  # windows may be taken bit by bit
    ("grad_norm", lambda _, w: "norm beyond float32" in w.tags),
    # Whether an epoch in float32 leaves the caller's autocast on, nothing says.
    (
        "passes|loss calls|loss|grad_norm",
        lambda _, w: "the caller's autocast" in w.tags and w.dtype == torch.float32,
    ),
    # What clipping makes of an infinity that no scaler keeps away from the weights.
    (
        "gradients at|weights|optimizer state",
        lambda _, w: "not finite" in w.tags and w.scaler is None and "max_norm" in w.options,
    ),
)


def rounding(w):
    """16 bits are rounded at every operation; where the share is multiplied in is free.

    An epoch may have the loss of a model in float64 in float32.
    """
    if "float64" in w.tags and "window" not in w.options:
        return 1e-12
    dtype = torch.bfloat16 if "the caller's autocast" in w.tags else w.dtype
    return {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}.get(dtype, 1e-4)


def clauses(gradients, step, passes, autocast, kept):
    """What each observable is about in the contract, and what a difference most likely means."""
    loss = "another divisor or dtype, with its graph, the loss's own tensor, or a view of more"
    return {
        "outcome": (
            "Raises",
            "no check refuses this input, an error is kept back, or hooks do not run",
        ),
        "message": ("Raises", "the message does not say which value was wrong"),
        "error": ("Raises", "it is raised anew: another object, or other words"),
        "number of results": ("windows", "one for each window, a short last one too"),
        "output for": (autocast, "the caller's autocast keeps copies of older weights"),
        "optimizer steps": (step, "a step too many, or none"),
        "steps taken at": ("data", "micro-batches are read ahead of the step"),
        "modes when data": ("untouched", "data are taken in another mode than that of the caller"),
        "passes forward": (
            passes,
            "a pass too many or too few, or in another mode or precision, or out of order",
        ),
        "loss calls": (passes, "the loss runs in another precision, or its arguments are others"),
        "passes back": (passes, "backward passes are joined, missing, or under autocast"),
        "random state": ("untouched", "a seed is set, or random numbers are drawn"),
        "gradients at": (
            gradients,
            "another divisor or clipping, perhaps of some only; or stale gradients are in it",
        ),
        "losses that": ("untouched", "what loss_fn has returned is changed in place"),
        "loss": (gradients, loss),
        "result of the call before": (
            "Returns",
            "it is changed by the next call: both have one tensor",
        ),
        "result": ("Returns", loss),
        "skipped": (5, "ask the scaler whether it skipped: no norm, loss or weight tells"),
        "grad_norm": ("clipping", "it is still scaled, clipped, or not over all that was trained"),
        "rate": ("scheduler", "the schedule is ahead of the steps, or behind"),
        "a gradient of another": (step, "it is cleared, but is of another optimizer"),
        "kept gradients": (
            kept,
            "gradients are of another loss, left over, or cleared at another moment",
        ),
        "weights": (step, "another step was taken"),
        "optimizer state": (step, "another step was taken"),
        "optimizer groups": ("scheduler", "the schedule is ahead of the steps, or behind"),
        "scaler": (
            4,
            "update() is missing, called twice or for something else, or an old state is loaded",
        ),
        "schedule": ("scheduler", "the schedule advances at another time than with a step taken"),
        "buffers": ("untouched", "the model runs more than once, or in another mode"),
    }


def law(call, wanted, base, free, found, kind=Law):
    return kind(
        *("gradient_accumulation", wanted.__name__),
        lambda answer, w: oracle.retried(partial(call, answer, w), w),
        lambda w: oracle.retried(partial(wanted, w), w),
        *(base, free),
        clauses={name: clause for name, (clause, _) in found.items()},
        meanings={name: meaning for name, (_, meaning) in found.items()},
        rounding=rounding,
    )


def _accumulate(answer, w):
    return answer.accumulate(w.model, w.batches, w.loss_fn, w.optimizer)


def _tokens(answer, w):
    return answer.accumulate_tokens(w.model, w.batches, w.optimizer, **w.options)


def _epoch(answer, w):
    given = {"dtype": w.dtype, "scaler": w.grad_scaler, "scheduler": w.scheduler}
    return answer.train_epoch(w.model, oracle.data(w), w.loss_fn, w.optimizer, **given, **w.options)


A_WINDOW = clauses("gradients", "step", "passes", 4, "step")
OF_TOKENS = clauses("divisor", "", "window", 4, "")
ACCUMULATED = law(
    _accumulate, oracle.accumulate, partial(regression, 9, 1, 4), WINDOW_FREE, A_WINDOW
)
TOKENS = law(_tokens, oracle.accumulate_tokens, tokens, WINDOW_FREE, OF_TOKENS)
EPOCH = law(_epoch, oracle.train_epoch, epoch, EPOCH_FREE, clauses(*["windows"] * 4, "end"))
