"""The laws of a window: as the oracle does, apart from what is free."""

from functools import partial

import torch

from kit.laws import trace
from kit.laws.law import Law
from specs.gradient_accumulation import oracle
from specs.gradient_accumulation.scenarios import epoch, regression
from specs.gradient_accumulation.tokens import tokens


def _broke_off(want, w):
    return want["outcome"] not in ("returns", "ValueError")


# What was on the way when an error came is nobody's business, nor are gradients of others.
_ON_THE_WAY = "passes|loss calls|random|steps taken at"
FREE = (
    ("kept gradients", lambda _, w: "foreign" in w.tags),
    # Gradients in 16 bits are rounded where a share is multiplied in; the weights show the step.
    ("passes back|gradients|kept|optimizer state", lambda _, w: "the caller's autocast" in w.tags),
    # Of a model in 16 bits the loss is exact, as a number of float32.
    ("gradients|kept|weights|optimizer state", lambda _, w: "16 bits" in w.tags),
    ("passes|loss calls|random", lambda _, w: "no labels" in w.tags),
    (_ON_THE_WAY, lambda want, w: _broke_off(want, w) or "retried" in w.tags),
)
WINDOW_FREE = (*FREE, ("kept gradients", _broke_off))
EPOCH_FREE = (
    *FREE,
    (_ON_THE_WAY, lambda _, w: "bad micro-batch" in w.tags),  # windows may be taken bit by bit
    ("grad_norm", lambda _, w: "norm beyond float32" in w.tags),
    # A scaler calls a fused optimizer after an overflow too; or it is not asked to.
    ("optimizer steps|gradients at|rate at|steps taken at", lambda _, w: "fused" in w.tags),
    ("scaler", lambda _, w: "the step fails" in w.tags),
    # Whether an epoch in float32 leaves the caller's autocast on, nothing says.
    (
        "passes|loss calls|loss|grad_norm",
        lambda _, w: "the caller's autocast" in w.tags and w.dtype == torch.float32,
    ),
)
_LOSS = "another divisor or dtype, or with its graph"
MEANINGS = trace.MEANINGS | {
    "number of results": "one for each window, a short last one too",
    "passes forward": "a pass too many or too few, or in another mode, precision or order",
    "passes back": "backward passes are joined, missing, or under autocast",
    "gradients at": "another divisor or clipping, perhaps of some only; or stale gradients are in "
    "it",
    "loss": _LOSS,
    "result": _LOSS,
    "kept gradients": "gradients are of another loss, left over, or cleared at another moment",
    "steps taken at": "micro-batches are read ahead of the step",
}


def rounding(w):
    """16 bits are rounded at every operation; where the share is multiplied in is free."""
    dtype = torch.bfloat16 if "the caller's autocast" in w.tags else w.dtype
    return {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}.get(dtype, 1e-4)


def clauses(gradients, step, passes, autocast, kept):
    """What each observable is about in the contract; nothing where it is what the spec is about."""
    return {
        "number of results": "windows",
        "output for": autocast,
        "optimizer steps|weights|optimizer state": step,
        "steps taken at": "data",
        "passes|loss calls": passes,
        "random state": "untouched",
        "gradients at|loss": gradients,
        "result": "Returns",
        "skipped": 5,
        "grad_norm": "clipping",
        "rate|optimizer groups|schedule": "scheduler",
        "kept gradients": kept,
        "scaler": 4,
    }


def law(call, wanted, base, free, of_contract, meanings=MEANINGS, kind=Law):
    return kind(
        *("gradient_accumulation", wanted.__name__, call, wanted, base, free),
        clauses=of_contract,
        meanings=meanings,
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
OF_TOKENS = clauses("divisor", "", "window", 4, "window")
ACCUMULATED = law(
    _accumulate, oracle.accumulate, partial(regression, 9, 1, 4), WINDOW_FREE, A_WINDOW
)
TOKENS = law(_tokens, oracle.accumulate_tokens, tokens, WINDOW_FREE, OF_TOKENS)
EPOCH = law(_epoch, oracle.train_epoch, epoch, EPOCH_FREE, clauses("", "", "", 1, "end"))
