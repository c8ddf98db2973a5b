"""AMP loop: train in mixed precision without losing a gradient or a byte.

Four parts: one step in any precision, the dynamic loss scaler written by hand, many steps that can
be stopped and resumed to the same bits, and master weights for a model that is 16-bit throughout.

Sources: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740); torch.amp.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (batch, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to a scalar


class StepResult(NamedTuple):
    """What one training step did."""

    loss: Tensor  # the true loss: float32 scalar, not scaled, without a graph
    grad_norm: Tensor  # 2-norm of the true gradients before clipping: float32 scalar
    skipped: bool  # whether an overflow kept the weights as they were


class Scaler(Protocol):
    """What train_step needs of a loss scaler; torch.amp.GradScaler and LossScaler have it."""

    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: Optimizer) -> None: ...
    def step(self, optimizer: Optimizer) -> object: ...
    def update(self) -> None: ...
    def get_scale(self) -> float: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


# Part 1


def train_step(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    *,
    dtype: torch.dtype,
    max_norm: float | None = None,
) -> StepResult:
    """One training step of a float32 model, computed in `dtype` where that is safe.

    The forward pass and the loss run under autocast on the device of the inputs, the backward pass
    outside it. Weights, gradients and optimizer state are float32 throughout. The loss is computed
    from the output in float32: a float16 loss times a scale of 65536 is infinite, and so is the
    first gradient behind it. Gradients from before the step do not count, and a parameter that gets
    none in this step is not stepped. An error in the model or the loss leaves autocast as it was.

    The gradient norm, and clipping, are over the gradients of the parameters that `optimizer`
    holds, after unscaling. A gradient that is huge but finite is no overflow.

    Args:
        model: from inputs to one output tensor (batch, ...); its gradients are dense.
        batch: a pair (tuple or list) of inputs and targets with the same first dimension, on the
            model's device.
        loss_fn: from the output and the targets to a scalar.
        optimizer: holds the parameters to be trained; others are not stepped.
        scaler: needed for float16, and None for any other dtype. Without one no step is skipped.
        dtype: torch.float32 (no autocast), torch.bfloat16 or torch.float16.
        max_norm: clip the gradients to this norm; None leaves them.

    Raises:
        ValueError: another dtype; float16 without a scaler, or a scaler without float16; a
            max_norm that is not positive; a batch that is not a pair, is empty, or whose parts
            differ in length. Names the value, and nothing has been changed.
    """
    _check_step(batch, scaler, dtype, max_norm)
    inputs, targets = batch
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    optimizer.zero_grad()
    mixed = dtype != torch.float32
    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):
        output = model(inputs)
        loss = loss_fn(output.float(), targets)

    # Outside autocast: backward runs each operation in the dtype that its forward had.
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        # Unscale before anything looks at the gradients: scaled ones are 65536 times too long,
        # and clipping those would leave a step of next to nothing.
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    grad_norm = get_total_norm(gradients)
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, grad_norm)

    if scaler is None:
        optimizer.step()
        return StepResult(loss.detach().float(), grad_norm, skipped=False)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    # The scale falls after an overflow and at no other time. The norm would not tell: it is
    # infinite for finite gradients too, when their squares leave float32.
    return StepResult(loss.detach().float(), grad_norm, skipped=scaler.get_scale() < scale)


def _check_step(
    batch: Batch, scaler: Scaler | None, dtype: torch.dtype, max_norm: float | None
) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
    if (scaler is not None) != (dtype == torch.float16):
        # bfloat16 has the exponents of float32: nothing underflows that a scale could save.
        raise ValueError(f"a scaler is for float16, and only for it: {scaler} with {dtype}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    inputs, targets = batch  # a ValueError unless it is a pair
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise ValueError(f"as many inputs as targets, and some: {len(inputs)}, {len(targets)}")


# Part 2


class LossScaler:
    """A dynamic loss scaler: as large a scale as the gradients bear, found by trial.

    Multiplying the loss lifts small gradients over float16's smallest number (6e-8). When a
    gradient overflows, the step is skipped and the scale falls; after `growth_interval` good steps
    in a row it grows. It behaves as torch.amp.GradScaler does, for any number of optimizers between
    two updates, and the two can read each other's state.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` good steps in a row; a growth
            that would leave float32 does not happen.
        backoff_factor: multiplies the scale at an update when any optimizer saw an overflow.
        growth_interval: in updates.

    Raises:
        ValueError: init_scale not positive and finite, growth_factor not above 1, backoff_factor
            not between 0 and 1, growth_interval below 1; names the value.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise ValueError(f"init_scale must be positive, not {init_scale}")
        if not growth_factor > 1:
            raise ValueError(f"growth_factor must be above 1, not {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, not {backoff_factor}")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, not {growth_interval}")
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        # Since the last update, by id of the optimizer: did its gradients overflow, has it stepped.
        self._overflow: dict[int, bool] = {}
        self._stepped: set[int] = set()

    def get_scale(self) -> float:
        """The scale now."""
        return self._scale

    def scale(self, outputs: Tensor) -> Tensor:
        """`outputs` (a tensor of any dtype) times the scale, with its graph."""
        # A tensor, because a float16 loss times a Python number stays float16, and overflows.
        return outputs * torch.tensor(self._scale, device=outputs.device)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer`'s parameters by the scale, in place, and look for
        infinities and NaNs in every one of them.

        Raises:
            RuntimeError: called twice for one optimizer since the last update, or after its step.
            ValueError: a gradient is float16: the model was cast, not autocast. Nothing is divided.
        """
        if id(optimizer) in self._overflow:
            raise RuntimeError("unscale_() was called for this optimizer since the last update()")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("a gradient is float16: keep the model in float32, under autocast")
        for grad in grads:
            grad.mul_(1.0 / self._scale)
        # The sum stays on the device; only bool() waits for it, once for all gradients.
        bad = sum(grad.isfinite().logical_not().sum() for grad in grads)
        self._overflow[id(optimizer)] = bool(bad)

    def step(self, optimizer: Optimizer) -> None:
        """Step `optimizer`, unless one of its gradients is infinite or NaN; unscale first if that
        has not been done.

        Raises:
            RuntimeError: called twice for one optimizer since the last update.
        """
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called for this optimizer since the last update()")
        if id(optimizer) not in self._overflow:
            self.unscale_(optimizer)
        if not self._overflow[id(optimizer)]:
            optimizer.step()
        self._stepped.add(id(optimizer))

    def update(self) -> None:
        """Set the scale for the next step: lower after an overflow, higher after a run without.

        Raises:
            RuntimeError: no optimizer was unscaled or stepped since the last update.
        """
        if not self._overflow:
            raise RuntimeError("update() has nothing to go by: unscale_() or step() comes first")
        if any(self._overflow.values()):
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                grown = self._scale * self._growth_factor
                if grown <= torch.finfo(torch.float32).max:
                    self._scale = grown
                self._good_steps = 0
        self._overflow.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers under the keys of torch.amp.GradScaler: scale, growth_factor,
        backoff_factor, growth_interval and _growth_tracker (good steps in a row so far)."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._scale = state_dict["scale"]
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._good_steps = state_dict["_growth_tracker"]


# Part 3


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_fn: LossFn,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
    *,
    dtype: torch.dtype,
    max_norm: float | None = None,
) -> list[StepResult]:
    """One train_step for each batch; the results in order.

    Batches are taken one at a time. The scheduler advances once after each step that was taken and
    stays where it is after a skipped one. But for the results, memory does not grow with the number
    of steps.

    Raises:
        ValueError: as train_step, before the step with the bad value.
    """
    results = []
    for batch in batches:
        result = train_step(
            model, batch, loss_fn, optimizer, scaler, dtype=dtype, max_norm=max_norm
        )
        # A skipped step has used no learning rate, so the schedule must not use one up.
        if scheduler is not None and not result.skipped:
            scheduler.step()
        results.append(result)
    return results


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Write all that the next step depends on to the file `path`, the random state included.

    A save that fails leaves the file that was there before, and nothing else.
    """
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler else None,
        "scheduler": scheduler.state_dict() if scheduler else None,
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all(),  # one for each GPU, so often none
    }
    # Write beside it, then rename: a rename happens whole or not at all.
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Bring everything back to where save_checkpoint found it, so that training goes on to the same
    bits as if it had never stopped; the caller gives the batches from there on.

    Raises:
        ValueError: a scaler or a scheduler was saved and none is given, or the other way round;
            names it, and nothing has been changed.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, given in (("scaler", scaler), ("scheduler", scheduler)):
        if (state[name] is None) != (given is None):
            raise ValueError(f"the checkpoint has {name} {state[name]}, and {given} was given")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"])  # dropout goes on from the same draw
    torch.cuda.set_rng_state_all(state["cuda_random"])


# Part 4


class MasterWeights:
    """Trains a 16-bit model through a float32 copy of its trainable weights.

    bfloat16 has 8 bits of precision: 1.0 + 0.003 is 1.0 again, and such an update would be lost for
    ever. The copy adds the updates up until they are large enough to show in 16 bits.

    Bytes a trainable parameter, with Adam: 2 (weight) + 2 (gradient) + 4 (master) + 8 (moments).
    Float32 gradients exist only during a step. Frozen parameters get no copy, tied ones get one.

    Args:
        model: its trainable parameters are all float16 or bfloat16.
        make_optimizer: from the list of float32 masters, in the order of the model's trainable
            parameters, to an optimizer over them.

    Attributes:
        masters: the float32 leaf tensors, in that order.
        optimizer: what `make_optimizer` made of them.

    Raises:
        ValueError: a trainable parameter has another dtype (names the parameter and the dtype), or
            there is none.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, p in trainable.items():
            if p.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(f"{name} must be float16 or bfloat16, not {p.dtype}")
        self._weights = list(trainable.values())
        self.masters = [p.detach().float().requires_grad_() for p in self._weights]
        self.optimizer = make_optimizer(self.masters)  # a ValueError if there are none

    def zero_grad(self) -> None:
        """Drop the 16-bit gradients."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, loss_scale: float = 1.0) -> bool:
        """Step the masters with the 16-bit gradients divided by `loss_scale`, and round them into
        the model. Returns whether the step was taken: not if a gradient is infinite or NaN.

        The 16-bit gradients stay until zero_grad. A parameter without a gradient is left alone.

        Raises:
            ValueError: loss_scale is not positive and finite; names it.
        """
        if not 0 < loss_scale < math.inf:
            raise ValueError(f"loss_scale must be positive and finite, not {loss_scale}")
        for weight, master in zip(self._weights, self.masters, strict=True):
            if weight.grad is not None:
                # Widen first: divided in 16 bits, what the scale has saved would underflow now.
                master.grad = weight.grad.float() / loss_scale
        grads = [master.grad for master in self.masters if master.grad is not None]
        taken = all(bool(grad.isfinite().all()) for grad in grads)
        if taken:
            self.optimizer.step()
            for weight, master in zip(self._weights, self.masters, strict=True):
                weight.copy_(master)
        self.optimizer.zero_grad()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The "masters" (a list) and the "optimizer" state; the model is the masters, rounded."""
        return {"masters": self.masters, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, and round the masters into the model.

        Raises:
            ValueError: another number of masters; names both, and nothing has been changed.
        """
        saved = state_dict["masters"]
        if len(saved) != len(self.masters):
            raise ValueError(f"{len(saved)} masters were saved, and there are {len(self.masters)}")
        for weight, master, value in zip(self._weights, self.masters, saved, strict=True):
            master.copy_(value)
            weight.copy_(master)
        self.optimizer.load_state_dict(state_dict["optimizer"])
