"""AMP loop: train in mixed precision without losing a gradient or a byte.

Four parts: one step in any precision, the dynamic loss scaler written by hand, many steps that can
be stopped and resumed to the same bits, and master weights for a model that is 16-bit throughout.

Sources: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740); torch.amp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
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
    raise NotImplementedError


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
        raise NotImplementedError

    def get_scale(self) -> float:
        """The scale now."""
        raise NotImplementedError

    def scale(self, outputs: Tensor) -> Tensor:
        """`outputs` (a tensor of any dtype) times the scale, with its graph."""
        raise NotImplementedError

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer`'s parameters by the scale, in place, and look for
        infinities and NaNs in every one of them.

        Raises:
            RuntimeError: called twice for one optimizer since the last update, or after its step.
            ValueError: a gradient is float16: the model was cast, not autocast. Nothing is divided.
        """
        raise NotImplementedError

    def step(self, optimizer: Optimizer) -> None:
        """Step `optimizer`, unless one of its gradients is infinite or NaN; unscale first if that
        has not been done.

        Raises:
            RuntimeError: called twice for one optimizer since the last update.
        """
        raise NotImplementedError

    def update(self) -> None:
        """Set the scale for the next step: lower after an overflow, higher after a run without.

        Raises:
            RuntimeError: no optimizer was unscaled or stepped since the last update.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers under the keys of torch.amp.GradScaler: scale, growth_factor,
        backoff_factor, growth_interval and _growth_tracker (good steps in a row so far)."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop the 16-bit gradients."""
        raise NotImplementedError

    def step(self, loss_scale: float = 1.0) -> bool:
        """Step the masters with the 16-bit gradients divided by `loss_scale`, and round them into
        the model. Returns whether the step was taken: not if a gradient is infinite or NaN.

        The 16-bit gradients stay until zero_grad. A parameter without a gradient is left alone.

        Raises:
            ValueError: loss_scale is not positive and finite; names it.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The "masters" (a list) and the "optimizer" state; the model is the masters, rounded."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, and round the masters into the model.

        Raises:
            ValueError: another number of masters; names both, and nothing has been changed.
        """
        raise NotImplementedError


# untouched stub aeaba4d18c97
