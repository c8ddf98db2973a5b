"""AMP loop: mixed precision without losing a gradient or a byte.

    untouched  modes, hooks, requires_grad and data, after an error too; no seed is set
    errors     ValueError unless stated otherwise; each names the bad value and changes nothing

Sources: Micikevicius et al. (arXiv 1710.03740); torch.amp.
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

    loss: Tensor  # float32 scalar, not scaled, detached
    grad_norm: Tensor  # float32 scalar: 2-norm of the unscaled gradients, before clipping
    skipped: bool  # whether an overflow skipped the step


class Scaler(Protocol):
    """The methods of a scaler that may be called."""

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
    """One training step of a float32 model, under autocast in `dtype`.

        autocast   on for forward pass and loss, off for the backward pass
        loss       loss_fn(model(inputs).float(), targets); returned unscaled, float32, detached
        gradients  of this step alone, unscaled before anything reads them
        grad_norm  2-norm over the optimizer's parameters only, before clipping
        skipped    whether the scaler skipped the step, even if its scale stays
        memory     activations in 16 bits; output freed before backward(); no copies of weights kept

        >>> train_step(model, (x, y), F.mse_loss, optimizer, dtype=torch.bfloat16)

    Args:
        batch: a tuple or list of two tensors, inputs and targets, of equal length above 0.
        scaler: required for float16, None otherwise.
        dtype: torch.float32 (no autocast), torch.bfloat16 or torch.float16.
        max_norm: above 0; a larger norm is clipped to it, as clip_grad_norm_ does.

    Raises:
        any other batch, scaler, dtype or max_norm.

    Details:
        1. Parameters that get no gradient in this step are not stepped.
        2. A huge finite gradient, such as 1e30, is no overflow: it is clipped like any other.
        3. Forward and backward pass are the same inside an autocast of the caller.
        4. An error in model, loss or optimizer reaches the caller, and the next call works.
    """
    raise NotImplementedError


# Part 2


class LossScaler:
    """A dynamic loss scaler that behaves like torch.amp.GradScaler.

        scale     multiplies the scalar loss, a 16-bit one in float32, and keeps its graph
        unscale_  divides the optimizer's gradients in place; an infinity or NaN in them is an
                  overflow, a huge finite number is not
        step      calls unscale_ if that was not done, then steps unless there was an overflow
        update    scale x backoff_factor after an overflow; scale x growth_factor after
                  `growth_interval` updates in a row without one
        state     plain numbers under GradScaler's keys

        >>> scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

    Details:
        1. Several optimizers may share a scaler: each skips for its own overflow only, and one
           update ends the step for all.
        2. A float16 gradient raises ValueError: the model was cast.
        3. unscale_ allocates less than three times the largest gradient.
        4. Parameters without a gradient are left alone.
        5. RuntimeError: a second unscale_ or step for one optimizer before update, unscale_ after
           its step, update without either.
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
        """The scaled loss."""
        raise NotImplementedError

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale in place."""
        raise NotImplementedError

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless the gradients overflowed."""
        raise NotImplementedError

    def update(self) -> None:
        """Set the next scale."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
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
    """One train_step per batch, with the same options.

        batches    fetched one at a time
        scheduler  advances after each step that was not skipped
        memory     does not grow with the number of steps

    Returns:
        the results, in order.
    """
    raise NotImplementedError


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Write all that the next step needs to a file.

        saved  each argument's state (tensors and plain values), and torch's random state

    Details:
        1. A failed save leaves an earlier file at `path` as it was, and no new file.
    """
    raise NotImplementedError


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Restore what save_checkpoint wrote.

        resume  the next steps give the same bits as without the stop

    Raises:
        a scaler or scheduler that is only saved or only given; any error if a part refuses its
        state.
    """
    raise NotImplementedError


# Part 4, the stretch


class MasterWeights:
    """Trains a 16-bit model through a float32 copy of its trainable weights.

        masters  attribute: float32 leaves, one per trainable parameter, in the model's order;
                 attribute `optimizer`: make_optimizer(masters)
        step     divides the 16-bit gradients by loss_scale in float32, steps the masters, and
                 rounds them into the weights in place; returns False and changes nothing if a
                 divided gradient is infinite or NaN
        memory   between steps, with Adam 16 bytes per parameter: 2 + 2 + 4 + 8
        state    the masters and the optimizer's state

    Raises:
        no trainable parameter; one that is neither float16 nor bfloat16 (message: its name and
        dtype); a state with masters of other shapes, or one that the optimizer refuses.

    Details:
        1. A frozen parameter has no master and may have any dtype; a tied one has one master.
        2. A parameter without a gradient is left alone.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop the 16-bit gradients, which `step` keeps."""
        raise NotImplementedError

    def step(self, loss_scale: float = 1.0) -> bool:
        """Step and round; whether the step was taken."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The "masters", a list, and the "optimizer" state."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, and round the masters into the weights."""
        raise NotImplementedError


# untouched stub 220e1443a33d
