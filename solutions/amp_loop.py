"""AMP loop: mixed precision without losing a gradient or a byte.

    untouched  modes, hooks, training flags and data stay as they were, after an error too; no seed
               is set
    errors     ValueError unless it says otherwise; each names the offending value and changes
               nothing

Gradients are dense.

Sources: Micikevicius et al. (arXiv 1710.03740); torch.amp.
"""

from __future__ import annotations

import copy
import math
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
    _check_options(scaler, dtype, max_norm)
    _check_batch(batch)
    inputs, targets = batch
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    optimizer.zero_grad()
    mixed = dtype != torch.float32
    # An autocast of the caller keeps its cache: copies of weights in another dtype, or from before
    # the last step. Without one, leaving ours clears it anyway.
    torch.clear_autocast_cache()
    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):
        # float(): the gradient of the loss is the scale, infinite in float16. No name for the
        # output: it would live through the backward pass.
        loss = loss_fn(model(inputs).float(), targets)

    # Outside autocast, the caller's too: backward runs each operation in the dtype that its
    # forward had.
    with _outside_autocast(inputs.device.type):
        (loss if scaler is None else scaler.scale(loss)).backward()
    torch.clear_autocast_cache()  # only now: checkpointed layers have cast once more
    if scaler is not None:
        # Unscale before anything looks at the gradients: scaled ones are 65536 times too long,
        # and clipping those would leave a step of next to nothing.
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    grad_norm = _total_norm(gradients, loss.device)
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, grad_norm)

    # A copy: the loss may be part of a batch, or lie where the next one is written.
    loss = loss.detach().to(torch.float32, copy=True)
    if scaler is None:
        optimizer.step()
        return StepResult(loss, grad_norm.float(), skipped=False)
    stepped = _step(scaler, optimizer)
    scaler.update()
    return StepResult(loss, grad_norm.float(), skipped=not stepped)


def _step(scaler: Scaler, optimizer: Optimizer) -> bool:
    """Step through the scaler; whether the optimizer has stepped."""
    stepped = False

    def note(stepping: Optimizer, *_: object) -> None:
        nonlocal stepped
        # A fused optimizer is called after an overflow too, and skips by itself.
        stepped = not getattr(stepping, "found_inf", False)

    hook = optimizer.register_step_post_hook(note)
    try:
        scaler.step(optimizer)
    except BaseException:
        # Left between unscale_ and update, the scaler would refuse the next step.
        state = scaler.state_dict()
        scaler.update()
        scaler.load_state_dict(state)
        raise
    finally:
        hook.remove()
    return stepped


def _total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    # In float64: the square of 1e30 is no float32.
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in gradients]
    nothing = torch.zeros((), dtype=torch.float64, device=device)  # where nothing has a gradient
    total: Tensor = torch.linalg.vector_norm(torch.stack([nothing, *norms]))
    return total


def _outside_autocast(device: str) -> AbstractContextManager[Any]:
    # Without an autocast of the caller nothing is entered: checkpointed blocks, which run again in
    # the backward pass, would leave copies of their weights in it, those of all blocks at once.
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
        self._set(init_scale, growth_factor, backoff_factor, growth_interval, 0)
        # Since the last update, by id of the optimizer: did its gradients overflow, has it stepped.
        self._overflow: dict[int, bool] = {}
        self._stepped: set[int] = set()

    def _set(
        self,
        scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        good_steps: int,
    ) -> None:
        """Check all, then set all."""
        if not 0 < scale < math.inf:
            raise ValueError(f"the scale must be positive and finite, not {scale}")
        if not growth_factor > 1:
            raise ValueError(f"growth_factor must be above 1, not {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, not {backoff_factor}")
        if not growth_interval >= 1:
            raise ValueError(f"growth_interval must be at least 1, not {growth_interval}")
        self._scale = scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = good_steps

    def get_scale(self) -> float:
        """The scale now."""
        return self._scale

    def scale(self, outputs: Tensor) -> Tensor:
        """The scaled loss."""
        # Widened first: a float16 loss times 65536 is infinite.
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale in place."""
        if id(optimizer) in self._overflow:
            raise RuntimeError("unscale_() was called for this optimizer since the last update()")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("a gradient is float16: keep the model in float32, under autocast")
        # An infinity or a NaN stays in a sum, which reads what the division has just written.
        sums = [grad.div_(self._scale).sum() for grad in grads]
        finite = _all_finite(sums)
        if not finite:  # or a sum of huge finite ones has overflowed, which extremes never do
            extremes = [x for grad in grads if grad.numel() for x in grad.aminmax()]
            finite = _all_finite(extremes)
        self._overflow[id(optimizer)] = not finite

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless they overflowed."""
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
        """Go on from there."""
        self._set(
            state_dict["scale"],
            state_dict["growth_factor"],
            state_dict["backoff_factor"],
            state_dict["growth_interval"],
            state_dict["_growth_tracker"],
        )


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
    _check_options(scaler, dtype, max_norm)
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
    """Write what the next step needs to a file.

        saved   each argument's state (tensors and plain values), and torch's random state
        atomic  a failed save leaves the folder as it was; `path` plus a suffix is its own

    Args:
        path: string or path.
    """
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler else None,
        "scheduler": scheduler.state_dict() if scheduler else None,
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all(),  # one for each GPU, so often none
    }
    # Write beside it, then rename: that happens whole or not at all.
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
        a scaler or scheduler is only saved or only given; any error: a part refuses its state.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, given in (("scaler", scaler), ("scheduler", scheduler)):
        if (state[name] is None) != (given is None):
            raise ValueError(f"the checkpoint has {name} {state[name]}, and {given} was given")
    every = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    parts: dict[str, Any] = {name: part for name, part in every.items() if part is not None}
    _load(parts, state)
    torch.set_rng_state(state["random"])  # dropout goes on from the same draw
    torch.cuda.set_rng_state_all(state["cuda_random"][: torch.cuda.device_count()])


def _all_finite(numbers: list[Tensor]) -> bool:
    """Waits for the device, once for all."""
    return not numbers or bool(torch.stack(numbers).isfinite().all())


def _load(parts: dict[str, Any], states: dict[str, Any]) -> None:
    """Load each part; where one refuses, all are as before."""
    before = {name: part.state_dict() for name, part in parts.items()}
    # A model writes into its weights, so they are copied: as many bytes as gradients take later.
    # The others put new objects in the place of the old ones.
    if "model" in before:
        before["model"] = copy.deepcopy(before["model"])
    try:
        for name, part in parts.items():
            part.load_state_dict(states[name])
    except BaseException:
        # A model loads what fits before it refuses the rest, and the optimizer may refuse after it.
        for each, part in parts.items():
            part.load_state_dict(before[each])
        raise


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
        """Drop the 16-bit gradients, which `step` leaves."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, loss_scale: float = 1.0) -> bool:
        """Step, and round; whether the step was taken."""
        if not 0 < loss_scale < math.inf:
            raise ValueError(f"loss_scale must be positive and finite, not {loss_scale}")
        try:
            for weight, master in zip(self._weights, self.masters, strict=True):
                if weight.grad is not None:
                    # Widen first: divided in 16 bits, what the scale has saved would underflow now.
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
        """Go on from `state_dict`, and round the masters into the model."""
        saved = state_dict["masters"]
        shapes = [[tuple(m.shape) for m in masters] for masters in (saved, self.masters)]
        if shapes[0] != shapes[1]:
            # Not only how many: copy_ would spread one number over a whole master.
            raise ValueError(f"{len(saved)} masters of {shapes[0]} for those of {shapes[1]}")
        # First, as it may refuse too. An optimizer takes the tensors of a state as they are, and
        # would go on in the saved ones.
        state = copy.deepcopy(state_dict["optimizer"])
        _load({"optimizer": self.optimizer}, {"optimizer": state})
        for weight, master, value in zip(self._weights, self.masters, saved, strict=True):
            master.copy_(value)
            weight.copy_(master)
