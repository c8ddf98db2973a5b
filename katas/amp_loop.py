"""AMP loop: mixed precision without losing a gradient or a byte.

    untouched  modes, hooks, training flags and data stay as they were, after an error too; no seed
               is set
    errors     ValueError unless it says otherwise; each names the offending value and changes
               nothing

Gradients are dense.

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

    loss: Tensor  # a copy of the true loss: float32 scalar, not scaled, without a graph
    grad_norm: Tensor  # 2-norm of the true gradients before clipping: float32 scalar
    skipped: bool  # whether an overflow kept the weights as they were


class Scaler(Protocol):
    """What train_step needs of a scaler."""

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
        loss       loss_fn(output.float(), targets); returned unscaled, float32, a detached copy
        gradients  of this step alone, unscaled before anything reads them
        grad_norm  2-norm over all that `optimizer` holds, before clipping
        skipped    whether the scaler skipped the step, even if its scale stays
        memory     activations in 16 bits; no output during backward(); no copied weights stay

        >>> train_step(model, (x, y), F.mse_loss, optimizer, dtype=torch.bfloat16)

    Args:
        model: from inputs to one output.
        batch: inputs and targets, two tensors of one length above 0, in a tuple or list.
        loss_fn: from output and targets to a scalar.
        optimizer: holds what is trained.
        scaler: needed for float16, None for the others.
        dtype: torch.float32 (no autocast), torch.bfloat16 or torch.float16.
        max_norm: above 0; clips to this norm.

    Raises:
        another dtype, scaler, max_norm or batch.

    Details:
        1. Parameters without a gradient in this step are not stepped.
        2. A parameter that `optimizer` does not hold is neither stepped nor in the norm. Its
           gradient is open.
        3. A huge finite gradient, as 1e30, is no overflow: it has a norm, and is clipped. The
           factor may be torch's; a norm below 1e-12 may be 0.
        4. The caller's autocast changes none of this, and its cache keeps no old weights.
        5. An error in model, loss or optimizer comes through; the scaler counts no step, and the
           next call works.
    """
    raise NotImplementedError


# Part 2


class LossScaler:
    """A dynamic loss scaler that behaves as torch.amp.GradScaler.

        scale     multiplies the scalar loss, a 16-bit one as float32, and keeps its graph
        unscale_  looks for infinities and NaNs, and divides the optimizer's gradients in place
        step      unscales if that was not done, then steps unless something was found
        update    scale x backoff_factor after an overflow; scale x growth_factor after
                  `growth_interval` good updates in a row
        state     plain numbers under GradScaler's keys; each can load the other's

        >>> scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

    Args:
        init_scale: above 0, finite.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: at least 1.

    Raises:
        on options out of range, also in a state.

    Details:
        1. Optimizers share the scale: each is skipped for its own overflow only; one update ends
           the step of all.
        2. A float16 gradient is a ValueError: the model was cast.
        3. Huge finite gradients are no overflow.
        4. unscale_ takes less memory than three times the largest gradient.
        5. A parameter without a gradient is left alone, if another has one.
        6. RuntimeError: a second unscale_ or step for one optimizer between two updates, unscale_
           after its step, update before either.
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
        """Step, unless they overflowed."""
        raise NotImplementedError

    def update(self) -> None:
        """Set the next scale."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
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
    """One train_step a batch, with the same options; results in order.

        batches    taken one at a time
        scheduler  advances after each step that was taken
        memory     does not grow with the number of steps

    Raises:
        as train_step; options before any batch.
    """
    raise NotImplementedError


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Write what the next step needs to a file.

        saved   each argument's state (tensors and plain values), and torch's random state
        atomic  a failed save leaves the folder as it was; `path` plus a suffix is its own

    Args:
        path: string or path.
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
        a scaler or scheduler is only saved or only given; any error: a part refuses its state.
    """
    raise NotImplementedError


# Part 4, the stretch


class MasterWeights:
    """Trains a 16-bit model through a float32 copy of its trainable weights.

        masters  attribute: float32 leaves, one a trainable parameter, in the model's order;
                 `optimizer` is what `make_optimizer` made of them
        step     float32 training with the 16-bit gradients / loss_scale; the model is the masters,
                 rounded in place. Returns False, and moves nothing, if one is infinite or NaN after
                 the division
        memory   between steps, after an error too, with Adam 16 bytes a parameter: 2 + 2 + 4 + 8
        state    the masters and the optimizer's state, copied or not

    Args:
        model: its trainable parameters are float16 or bfloat16.
        make_optimizer: from the list of masters to an optimizer over them.

    Raises:
        a trainable parameter of another dtype (with its name and dtype), or none at all; a
        loss_scale that is not positive and finite; masters of other shapes in a state; any error:
        its optimizer refuses its state.

    Details:
        1. A frozen parameter has no master and may have any dtype. A tied one has one master.
        2. A parameter without a gradient is left alone, its moments too.
        3. Loading copies: steps do not change the loaded state.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop the 16-bit gradients, which `step` leaves."""
        raise NotImplementedError

    def step(self, loss_scale: float = 1.0) -> bool:
        """Step, and round; whether the step was taken."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The "masters", a list, and the "optimizer" state."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, and round the masters into the model."""
        raise NotImplementedError


# untouched stub 52c57022f78d
