"""The laws of a window: an answer does what the oracle does, apart from what is free."""

from functools import partial

import torch

from kit.laws import trace
from kit.laws.law import Law
from specs.gradient_accumulation import oracle
from specs.gradient_accumulation.scenarios import epoch, regression
from specs.gradient_accumulation.tokens import tokens

_UNDERWAY = "passes|loss calls|random|steps taken at"  # when an error came
FREE = (
    # Gradients of a 16-bit model are rounded where its share is multiplied in; the loss is not.
    ("gradients|kept|weights|optimizer state", lambda _, w: "16 bits" in w.tags),
    ("passes|loss calls|random", lambda _, w: "no labels" in w.tags),
)
EPOCH_FREE = (
    ("kept gradients", lambda _, w: "foreign" in w.tags),
    # A scaler may call a fused optimizer after an overflow, which then skips the step itself.
    ("optimizer steps|gradients at|rate at|steps taken at", lambda _, w: "fused" in w.tags),
    (_UNDERWAY, lambda _, w: {"planted", "bad micro-batch"} & w.tags),
)
_LOSS = "another divisor or dtype, or with its graph"
MEANINGS = trace.MEANINGS | {
    "number of results": "one for each window, a short last one too",
    "passes forward": "a pass too many or too few, or in another mode, precision or order",
    "passes back": "backward passes are joined, missing, or under autocast",
    "gradients at": "another divisor or clipping, perhaps of some only; or old gradients are added",
    "loss": _LOSS,
    "result": _LOSS,
    "kept gradients": "gradients are of another loss, left over, or cleared at the wrong time",
    "steps taken at": "micro-batches are read ahead of the step",
}


def rounding(w):
    """16 bits are rounded at every operation; where the share is multiplied in is free."""
    return {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}.get(w.dtype, 1e-4)


def clauses(gradients, step, passes, kept):
    """The clause that each observable is about; "" means that of the spec."""
    return {
        "number of results": "windows",
        "optimizer steps|weights|optimizer state": step,
        "steps taken at": "data",
        "passes|loss calls": passes,
        "random state": "untouched",
        "gradients at|loss": gradients,
        "result": "Returns",
        "skipped": 4,
        "grad_norm": "clipping",
        "rate|optimizer groups|schedule": "scheduler",
        "kept gradients": kept,
        "scaler": 3,
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


A_WINDOW = clauses("gradients", "step", "passes", "step")
OF_TOKENS = clauses("divisor", "", "window", "window")
ACCUMULATED = law(_accumulate, oracle.accumulate, partial(regression, 9, 1, 4), (), A_WINDOW)
TOKENS = law(_tokens, oracle.accumulate_tokens, tokens, FREE, OF_TOKENS)
EPOCH = law(_epoch, oracle.train_epoch, epoch, EPOCH_FREE, clauses("", "", "", "end"))
