"""A right answer of another shape: from the stub alone, norms and states by hand."""

from __future__ import annotations

import copy
import enum
import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (batch, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to a scalar


class StepResult(NamedTuple):
    loss: Tensor  # float32 scalar, not scaled, detached
    grad_norm: Tensor  # float32 scalar: 2-norm of the unscaled gradients, before clipping
    skipped: bool  # whether an overflow skipped the step


class Scaler(Protocol):
    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: Optimizer) -> None: ...
    def step(self, optimizer: Optimizer) -> object: ...
    def update(self) -> None: ...
    def get_scale(self) -> float: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


# Part 1


def _held_params(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, each once."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return list(held.values())


def _any_nonfinite(grads: Iterable[Tensor]) -> bool:
    flags: dict[torch.device, Tensor] = {}
    for grad in grads:
        flag = grad.isfinite().all().logical_not()
        flags[grad.device] = flags[grad.device] | flag if grad.device in flags else flag
    return any(bool(flag) for flag in flags.values())  # one wait a device


def _norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """The 2-norm over all gradients, in float64: the square of 1e30 overflows float32."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += grad.detach().double().square().sum().to(device)
    return total.sqrt()


def _clip(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    too_long = norm.isfinite() & (norm > max_norm)
    factor = torch.where(too_long, max_norm / norm, torch.ones_like(norm))
    for grad in grads:
        grad.mul_(factor.to(grad.device))


def _check_settings(scaler: Scaler | None, dtype: torch.dtype, max_norm: float | None) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
    if dtype == torch.float16 and scaler is None:
        raise ValueError(f"dtype {dtype} needs a scaler, which is None")
    if dtype != torch.float16 and scaler is not None:
        raise ValueError(f"scaler {type(scaler).__name__} is for torch.float16, not for {dtype}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm!r}")


def _check_batch(batch: object) -> None:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ValueError(f"batch must be inputs and targets, not a {type(batch).__name__}{size}")
    if not all(isinstance(part, Tensor) and part.dim() > 0 for part in batch):
        parts = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in batch]
        raise ValueError(f"batch must be two tensors with a first dimension, not {parts}")
    lengths = [len(part) for part in batch]
    if lengths[0] != lengths[1]:
        raise ValueError(f"inputs and targets differ in length: {lengths[0]} and {lengths[1]}")
    if lengths[0] == 0:
        raise ValueError(f"batch is empty: inputs of shape {tuple(batch[0].shape)}")


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
    _check_settings(scaler, dtype, max_norm)
    _check_batch(batch)
    inputs, targets = batch
    kind = inputs.device.type
    params = _held_params(optimizer)
    for param in params:
        param.grad = None
    torch.clear_autocast_cache()  # the caller's: it outlives the weights
    with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
        loss = loss_fn(model(inputs).float(), targets).float()
    with torch.autocast(kind, enabled=False):
        (loss if scaler is None else scaler.scale(loss)).backward()

    if scaler is not None:
        scaler.unscale_(optimizer)
    grads = [p.grad for p in params if p.grad is not None]
    norm = _norm(grads, loss.device)
    if max_norm is not None:
        with torch.no_grad():
            _clip(grads, norm, max_norm)

    if scaler is None:
        optimizer.step()
        skipped = False
    else:
        # Whether the weights moved is seen at the optimizer itself. One that handles the overflow
        # in its kernel (fused) is called either way, with the verdict in `found_inf`.
        moved: list[bool] = []
        hook = optimizer.register_step_post_hook(
            lambda opt, args, kwargs: moved.append(not getattr(opt, "found_inf", False))
        )
        try:
            scaler.step(optimizer)
        finally:
            hook.remove()
            scaler.update()  # the step is over for the scaler too
        skipped = not any(moved)
    return StepResult(loss.detach(), norm.float(), skipped)


# Part 2


class _Stage(enum.Enum):
    READY = enum.auto()
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


class LossScaler:
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        # Never written to: a graph may have saved it.
        self._scale = torch.tensor(float(init_scale), dtype=torch.float32)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._good_steps = growth_interval, 0
        # Since the last update: where each optimizer stands, and whether it saw an overflow.
        self._stages: dict[Optimizer, _Stage] = {}
        self._overflow: dict[Optimizer, bool] = {}

    def get_scale(self) -> float:
        return self._scale.item()

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs * self._scale.to(outputs.device)

    def unscale_(self, optimizer: Optimizer) -> None:
        stage = self._stages.get(optimizer, _Stage.READY)
        if stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() was already called for this optimizer since update()")
        if stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() was called after step() of this optimizer")
        grads = [p.grad for p in _held_params(optimizer) if p.grad is not None]
        for grad in grads:
            if grad.dtype == torch.float16:
                raise ValueError(
                    f"cannot unscale a {grad.dtype} gradient of shape {tuple(grad.shape)}: "
                    "keep the model in float32 and use autocast"
                )
        self._overflow[optimizer] = _any_nonfinite(grads)
        inverse = self._scale.double().reciprocal().float()
        with torch.no_grad():
            for grad in grads:
                grad.mul_(inverse.to(grad.device))
        self._stages[optimizer] = _Stage.UNSCALED

    def step(self, optimizer: Optimizer) -> None:
        stage = self._stages.get(optimizer, _Stage.READY)
        if stage is _Stage.STEPPED:
            raise RuntimeError("step() was already called for this optimizer since update()")
        if stage is _Stage.READY:
            self.unscale_(optimizer)
        if not self._overflow[optimizer]:
            optimizer.step()
        self._stages[optimizer] = _Stage.STEPPED

    def update(self) -> None:
        if not self._stages:
            raise RuntimeError("update() before any unscale_() or step() since the last update()")
        if any(self._overflow.values()):
            self._scale = self._scaled_by(self._backoff_factor)
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps >= self._growth_interval:
                grown = self._scaled_by(self._growth_factor)
                self._scale = grown if grown.isfinite() else self._scale
                self._good_steps = 0
        self._stages.clear()
        self._overflow.clear()

    def _scaled_by(self, factor: float) -> Tensor:
        """The scale times a factor: the product in double, then rounded, as torch.amp has it."""
        return (self._scale.double() * factor).float()

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scale = torch.tensor(float(state_dict["scale"]), dtype=torch.float32)
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
    results = []
    for batch in batches:
        result = train_step(
            model, batch, loss_fn, optimizer, scaler, dtype=dtype, max_norm=max_norm
        )
        del batch  # not alive while the next one is made
        results.append(result)
        if scheduler is not None and not result.skipped:
            scheduler.step()
    return results


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all() if cuda else [],
    }
    # Written beside the target and moved over it at the end: there is never half a file at `path`.
    target = os.path.realpath(os.fspath(path))
    partial = f"{target}.{uuid.uuid4().hex}.partial"
    try:
        with open(partial, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, given in (("scaler", scaler), ("scheduler", scheduler)):
        if state[name] is not None and given is None:
            raise ValueError(f"a {name} was saved in {os.fspath(path)!r}, and none is given")
        if state[name] is None and given is not None:
            raise ValueError(f"a {name} is given, and none was saved in {os.fspath(path)!r}")
    given = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    loaded: list[tuple[Any, Any]] = []  # and what each had before
    try:
        for name, part in given.items():
            if part is not None:
                loaded.append((part, copy.deepcopy(part.state_dict())))
                part.load_state_dict(state[name])
    except BaseException as error:
        for part, before in reversed(loaded):
            part.load_state_dict(before)
        if isinstance(error, LookupError):
            raise ValueError(f"a state without {error}") from error
        raise
    # The random state last, so that nothing above has drawn from it.
    torch.set_rng_state(state["random"])
    if torch.cuda.is_available():
        for index, rng in enumerate(state["cuda_random"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(rng, index)


# Part 4


class MasterWeights:
    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(f"{type(model).__name__} has no trainable parameter")
        for name, param in named:
            if param.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(f"{name} is {param.dtype}, not torch.float16 or torch.bfloat16")
        self._params = [param for _, param in named]
        self.masters = [p.detach().float().requires_grad_() for p in self._params]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def _round(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for param, master in pairs:
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    def step(self, loss_scale: float = 1.0) -> bool:
        moving = [
            (p, m) for p, m in zip(self._params, self.masters, strict=True) if p.grad is not None
        ]
        if _any_nonfinite(param.grad for param, _ in moving):
            return False
        try:
            for param, master in moving:
                master.grad = param.grad.detach().float().div_(loss_scale)
            # Again, as a scale below 1 can push a gradient out of float32.
            if loss_scale < 1 and _any_nonfinite(master.grad for _, master in moving):
                return False
            self.optimizer.step()
        finally:
            for master in self.masters:
                master.grad = None
        self._round(moving)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": [master.detach().clone() for master in self.masters],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["masters"]
        if len(saved) != len(self.masters):
            raise ValueError(f"{len(saved)} masters saved, but the model has {len(self.masters)}")
        for index, (old, now) in enumerate(zip(saved, self.masters, strict=True)):
            if old.shape != now.shape:
                raise ValueError(
                    f"master {index} is {tuple(old.shape)}, but {tuple(now.shape)} in the model"
                )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        with torch.no_grad():
            for old, now in zip(saved, self.masters, strict=True):
                now.copy_(old)
        self._round(zip(self._params, self.masters, strict=True))
