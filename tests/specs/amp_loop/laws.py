"""train_step and train as slow and obvious code, and the laws that compare answers with it."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn

from kit.laws import draw
from kit.laws.again import retried
from kit.laws.law import Law
from kit.laws.trace import Probe, World


def laid_otherwise(grad):
    """A copy; a matrix is stored by columns, like a transposed weight's gradient."""
    return grad.t().contiguous().t() if grad.dim() == 2 else grad.clone()


def held(optimizer):
    """The parameters of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def one_step():
    """A small model with large errors on 11 rows, so that gradients are large."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    model[0].eval()  # seen by whoever sets the mode of the whole model
    batch = draw.randn(11, 7), 4 * draw.randn(11, 5)
    return World(model, [batch], sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


def many_steps():
    """Five batches of unequal length, a schedule, and momentum."""
    world = one_step()
    world.batches = [(draw.randn(n, 7), 4 * draw.randn(n, 5)) for n in (3, 5, 2, 4, 1)]
    world.gamma = 0.5
    return world


Step = namedtuple("Step", "loss grad_norm skipped")


def train_step(w):
    """Forward, backward, unscale, norm, clip, step, update: one after the other."""
    if w.refused_at is not None:
        raise ValueError("the contract refuses this")
    scaler = w.grad_scaler
    for p in held(w.optimizer):
        p.grad = None
    torch.clear_autocast_cache()
    with torch.autocast(w.device.type, w.dtype, enabled=w.dtype != torch.float32):
        loss = w.loss_fn(w.model(w.batch[0]).float(), w.batch[1])
    with torch.autocast(w.device.type, enabled=False):
        (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(w.optimizer)
    gradients = [p.grad for p in held(w.optimizer) if p.grad is not None]
    # In float64 no square of a float32 overflows.
    norm = torch.stack([g.double().norm() for g in gradients]).norm()
    max_norm = w.options.get("max_norm")
    if max_norm is not None and norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    if not scaler:
        w.optimizer.step()
        return Step(loss.detach().float(), norm.float(), False)
    taken = []
    # A fused optimizer is called after an overflow too, and skips by itself.
    note = lambda optimizer, *_: taken.append(not getattr(optimizer, "found_inf", False))  # noqa: E731
    hook = w.optimizer.register_step_post_hook(note)
    try:
        scaler.step(w.optimizer)
    finally:
        hook.remove()
        scaler.update()
    return Step(loss.detach().float(), norm.float(), True not in taken)


def train(w):
    """One step per batch; the schedule advances unless a step is skipped."""
    results = []
    for batch in Stream(w):
        w.batch = batch
        results.append(train_step(w))
        if w.scheduler and not results[-1].skipped:
            w.scheduler.step()
    return results


@dataclass
class Stream:
    """The batches, noting when one is asked for; it has no len()."""

    w: World
    __len__ = None

    def __iter__(self):
        for batch in self.w.batches:
            self.w.losses.append("a batch")
            self.w.visits("batch")
            yield batch


def call_train_step(answer, w):
    parts = w.model, w.batch, w.loss_fn, w.optimizer, w.grad_scaler
    return retried(lambda: answer.train_step(*parts, dtype=w.dtype, **w.options), w)


def call_train(answer, w):
    parts = w.model, Stream(w), w.loss_fn, w.optimizer, w.grad_scaler, w.scheduler
    return answer.train(*parts, dtype=w.dtype, **w.options)


# Nothing is asked of gradients after a step, or of a step that an error has ended.
FREE = (
    ("kept gradients", lambda want, w: want["outcome"] != "ValueError"),
    ("loss calls", lambda want, w: want["outcome"] != "returns"),
    ("passes|buffers|random", lambda want, w: "this scenario" in want["outcome"]),
    ("scaler", lambda want, w: "scenario in its step" in want["outcome"]),
    # What clipping makes of an infinity is open; where nothing skips the step, weights show it.
    ("gradients at", lambda want, w: "not finite" in w.tags),
    ("weights|optimizer state", lambda want, w: "not finite" in w.tags and not w.scaler),
)
CLAUSES = {
    "outcome|message|kept gradients": "Raises",
    "number of results": "batches",
    ".* the error|.* the next call": 4,
    "passes|loss calls": "autocast",
    "skipped|scaler": "skipped",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "gradients at": "gradients",
    "optimizer steps|weights|optimizer state": "step",
    "rate|schedule|optimizer groups": "scheduler",
    "buffers|random state": "untouched",
}
STEP = Law(
    "amp_loop",
    "train_step",
    call_train_step,
    lambda w: retried(lambda: train_step(w), w),
    one_step,
    FREE,
    CLAUSES,
)
RUN = Law(
    "amp_loop", "train", call_train, train, many_steps, FREE, {"loss calls": "batches"} | CLAUSES
)
