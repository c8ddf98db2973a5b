"""AMP loop: mixed precision without losing a gradient or a byte.

    untouched  modes, hooks, requires_grad and data, after an error too; no seed is set
    errors     ValueError unless stated otherwise; each names the bad value and changes nothing

Sources: Micikevicius et al. (arXiv 1710.03740); torch.amp.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
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
    _check_options(scaler, dtype, max_norm)
    _check_batch(batch)
    inputs, targets = batch
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    optimizer.zero_grad()
    mixed = dtype != torch.float32
    # Inside an autocast of the caller its cache goes on: with weights in another dtype, or from
    # before the last step.
    torch.clear_autocast_cache()
    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):
        # float(): the gradient of the loss is the scale, which overflows float16. The output has
        # no name: a local variable would keep it alive through the backward pass.
        loss = loss_fn(model(inputs).float(), targets)

    # Outside autocast, the caller's too: backward runs each operation in the dtype of its forward.
    with _outside_autocast(inputs.device.type):
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        # Unscale before anything looks at the gradients: they are 65536 times too long, and
        # clipping them now would leave almost nothing of the step.
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    grad_norm = _total_norm(gradients, loss.device)
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, grad_norm)

    loss = loss.detach().float()
    if scaler is None:
        optimizer.step()
        return StepResult(loss, grad_norm.float(), skipped=False)
    return StepResult(loss, grad_norm.float(), skipped=not _step(scaler, optimizer))


def _total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    # In float64: the square of 1e30 overflows float32.
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in gradients]
    none = torch.zeros((), dtype=torch.float64, device=device)  # if nothing has a gradient
    total: Tensor = torch.linalg.vector_norm(torch.stack([none, *norms]))
    return total


def _step(scaler: Scaler, optimizer: Optimizer) -> bool:
    """Step and update the scaler; whether the optimizer has stepped."""
    stepped = False

    def note(stepping: Optimizer, *_: object) -> None:
        nonlocal stepped
        # A fused optimizer is called after an overflow too, and skips inside its kernel.
        stepped = not getattr(stepping, "found_inf", False)

    hook = optimizer.register_step_post_hook(note)
    try:
        scaler.step(optimizer)
    finally:
        hook.remove()
        scaler.update()  # after an error too, or the scaler would refuse the next unscale_
    return stepped


def _outside_autocast(device: str) -> AbstractContextManager[Any]:
    # Only if the caller has one: in a nested autocast, even one that is off, checkpointed blocks
    # keep the 16-bit weights that they cast in the backward pass, those of all blocks at once.
    off = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if off else nullcontext()


def _check_options(scaler: Scaler | None, dtype: torch.dtype, max_norm: float | None) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
    if (scaler is not None) != (dtype == torch.float16):
        # bfloat16 has the exponents of float32: nothing underflows that a scale could save.
        raise ValueError(f"a scaler is for float16, and only for it: {scaler} with {dtype}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")


def _check_batch(batch: Batch) -> None:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"batch must be a pair of tensors, not {type(batch).__name__}")
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part) for part in batch]
    if not all(isinstance(part, Tensor) for part in batch):
        raise ValueError(f"batch must be two tensors, not {shapes}")
    if len(batch[0]) != len(batch[1]) or len(batch[0]) == 0:
        raise ValueError(f"as many inputs as targets, and at least one: {shapes}")


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
        """The scaled loss."""
        return outputs.float() * self._scale  # widened first: a float16 loss would overflow

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale in place."""
        if id(optimizer) in self._overflow:
            raise RuntimeError("unscale_() was called for this optimizer since the last update()")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("a gradient is float16: keep the model in float32, under autocast")
        # An infinity or NaN stays in a sum, which takes no copy.
        sums = [grad.div_(self._scale).sum() for grad in grads]
        finite = _all_finite(sums)
        if not finite:  # or the sum of huge finite numbers has overflowed; extremes never do
            extremes = [x for grad in grads if grad.numel() for x in grad.aminmax()]
            finite = _all_finite(extremes)
        self._overflow[id(optimizer)] = not finite

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless the gradients overflowed."""
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called for this optimizer since the last update()")
        if id(optimizer) not in self._overflow:
            self.unscale_(optimizer)
        if not self._overflow[id(optimizer)]:
            optimizer.step()
        self._stepped.add(id(optimizer))

    def update(self) -> None:
        """Set the next scale."""
        if not self._overflow:
            raise RuntimeError("update() has nothing to go by: unscale_() or step() comes first")
        if any(self._overflow.values()):
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._good_steps = 0
        self._overflow.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._scale = state_dict["scale"]
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._good_steps = state_dict["_growth_tracker"]


def _all_finite(numbers: list[Tensor]) -> bool:
    """Looks at all together: each look waits for the device."""
    return not numbers or bool(torch.stack(numbers).isfinite().all())


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
    """Write all that the next step needs to a file.

        saved  each argument's state (tensors and plain values), and torch's random state

    Details:
        1. A failed save leaves an earlier file at `path` as it was, and no new file.
    """
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler else None,
        "scheduler": scheduler.state_dict() if scheduler else None,
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all(),  # one for each GPU, so often none
    }
    # Write a second file beside it, then rename: a rename happens completely or not at all.
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
    """Restore what save_checkpoint wrote.

        resume  the next steps give the same bits as without the stop

    Raises:
        a scaler or scheduler that is only saved or only given; any error if a part refuses its
        state.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, given in (("scaler", scaler), ("scheduler", scheduler)):
        if (state[name] is None) != (given is None):
            raise ValueError(f"the checkpoint has {name} {state[name]}, and {given} was given")
    every = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    parts: dict[str, Any] = {name: part for name, part in every.items() if part is not None}
    before = {name: part.state_dict() for name, part in parts.items()}
    # A model copies into its weights, so these are saved: as many bytes as the gradients will take.
    # The other parts replace their state by new objects.
    before["model"] = copy.deepcopy(before["model"])
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except BaseException:
        # A model loads what fits before it refuses the rest, and the optimizer comes after it.
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise
    torch.set_rng_state(state["random"])  # dropout continues with the same draws
    torch.cuda.set_rng_state_all(state["cuda_random"][: torch.cuda.device_count()])


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
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, p in trainable.items():
            if p.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(f"{name} must be float16 or bfloat16, not {p.dtype}")
        if not trainable:
            raise ValueError(f"{type(model).__name__} has no trainable parameter")
        self._weights = list(trainable.values())
        self.masters = [p.detach().float().requires_grad_() for p in self._weights]
        self.optimizer = make_optimizer(self.masters)

    def zero_grad(self) -> None:
        """Drop the 16-bit gradients, which `step` keeps."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, loss_scale: float = 1.0) -> bool:
        """Step and round; whether the step was taken."""
        try:
            for weight, master in zip(self._weights, self.masters, strict=True):
                if weight.grad is not None:
                    # Widen first: in 16 bits the division would underflow.
                    master.grad = weight.grad.float() / loss_scale
            grads = [master.grad for master in self.masters if master.grad is not None]
            if not all(bool(grad.isfinite().all()) for grad in grads):
                return False
            self.optimizer.step()
            for weight, master in zip(self._weights, self.masters, strict=True):
                weight.copy_(master)
            return True
        finally:
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The "masters", a list, and the "optimizer" state."""
        return {"masters": self.masters, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, and round the masters into the weights."""
        saved = state_dict["masters"]
        shapes = [[tuple(m.shape) for m in masters] for masters in (saved, self.masters)]
        if shapes[0] != shapes[1]:
            # Not only how many: copy_ would broadcast one number over a whole master.
            raise ValueError(f"masters of shapes {shapes[0]}, but the model has {shapes[1]}")
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for weight, master, value in zip(self._weights, self.masters, saved, strict=True):
            master.copy_(value)
            weight.copy_(master)
