"""A right answer of another shape: written from the stub alone, leaning on the library."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import uuid
from collections import defaultdict
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


def _check_options(scaler: Scaler | None, dtype: object, max_norm: float | None) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, bfloat16 or float16, not {dtype}")
    if dtype == torch.float16 and scaler is None:
        raise ValueError(f"{dtype} needs a scaler, not {scaler}")
    if dtype != torch.float16 and scaler is not None:
        raise ValueError(f"a scaler is for torch.float16, not for {dtype}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")


def _check_batch(batch: object) -> None:
    if not isinstance(batch, (tuple, list)):
        raise ValueError(f"batch must be a pair of tensors, not {type(batch).__name__}")
    if len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        kinds = ", ".join(type(part).__name__ for part in batch)
        raise ValueError(f"batch must be a pair of tensors, not ({kinds})")
    shapes = [tuple(part.shape) for part in batch]
    if any(len(shape) == 0 or shape[0] == 0 for shape in shapes):
        raise ValueError(f"batch is empty: shapes {shapes[0]} and {shapes[1]}")
    if shapes[0][0] != shapes[1][0]:
        raise ValueError(f"batch has {shapes[0][0]} inputs and {shapes[1][0]} targets")


def _grads(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _total_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """2-norm in float64: in float32 the squares of finite gradients may overflow."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms))


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
    _check_options(scaler, dtype, max_norm)
    _check_batch(batch)
    inputs, targets = batch
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    optimizer.zero_grad(set_to_none=True)

    amp = dtype != torch.float32
    torch.clear_autocast_cache()  # the caller's: it outlives the weights
    with torch.autocast(inputs.device.type, dtype=dtype if amp else None, enabled=amp):
        loss = loss_fn(model(inputs).float(), targets)
    loss = loss.float()
    true_loss = loss.detach().clone()

    with torch.autocast(inputs.device.type, enabled=False):
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)

    grads = _grads(params)
    norm = _total_norm(grads, inputs.device)
    finite = bool(norm.isfinite())
    if max_norm is not None and finite and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm.item())

    if scaler is None:
        optimizer.step()
        return StepResult(true_loss, norm.float(), False)
    overflows: list[bool] = []  # one for each step; a fused optimizer steps over its own
    with contextlib.ExitStack() as stack:
        hook = lambda o, *_: overflows.append(bool(getattr(o, "found_inf", 0.0)))  # noqa: E731
        stack.callback(optimizer.register_step_post_hook(hook).remove)
        stack.callback(scaler.update)
        scaler.step(optimizer)
    return StepResult(true_loss, norm.float(), overflows != [False])


# Part 2


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


class _Seen:
    """An optimizer since the last update."""

    def __init__(self, optimizer: Optimizer, found: list[Tensor]) -> None:
        self.optimizer = optimizer
        self.stepped = False
        self._found = found  # one flag a device and dtype, not read before it is needed

    def overflow(self) -> bool:
        return any(bool(flag) for flag in self._found)


class LossScaler:
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._scale = _float32(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        # By id; the optimizer is kept too, so that its id is not given to another one meanwhile.
        self._seen: dict[int, _Seen] = {}

    def get_scale(self) -> float:
        return self._scale

    def scale(self, outputs: Tensor) -> Tensor:
        # A tensor, not a float: a 16-bit scalar times a float32 scalar is float32.
        scale = torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        return outputs * scale

    def unscale_(self, optimizer: Optimizer) -> None:
        seen = self._seen.get(id(optimizer))
        if seen is not None:
            when = "after its step" if seen.stepped else "twice"
            raise RuntimeError(f"unscale_() was called {when} for this optimizer; update() first")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None and p.grad.dtype == torch.float16 for p in params):
            raise ValueError("a gradient is torch.float16: do not cast the model, use autocast")

        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for grad in _grads(params):
            groups[grad.device, grad.dtype].append(grad)
        found = []
        inverse = torch.tensor(self._scale, dtype=torch.float64).reciprocal().float()
        for (device, dtype), grads in groups.items():
            found_inf = torch.zeros((), device=device)
            if dtype == torch.float32:
                factor = inverse.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
            else:  # on a GPU it has no bfloat16, and looks at float64 as float32
                for grad in grads:
                    found_inf += grad.isfinite().all().logical_not()
                    grad.mul_(inverse.item())
            found.append(found_inf)
        self._seen[id(optimizer)] = _Seen(optimizer, found)

    def step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self.unscale_(optimizer)
        seen = self._seen[id(optimizer)]
        if seen.stepped:
            raise RuntimeError("step() was called twice for this optimizer; update() first")
        if not seen.overflow():
            optimizer.step()
        seen.stepped = True

    def update(self) -> None:
        if not self._seen:
            raise RuntimeError("update() without unscale_() or step() since the last update()")
        if any(seen.overflow() for seen in self._seen.values()):
            self._scale = _float32(self._scale * self._backoff_factor)
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker >= self._growth_interval:
                grown = _float32(self._scale * self._growth_factor)
                if math.isfinite(grown):
                    self._scale = grown
                self._growth_tracker = 0
        self._seen = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        scale, growth, backoff, interval, tracker = (state_dict[name] for name in names)
        self._scale = _float32(scale)
        self._growth_factor, self._backoff_factor = growth, backoff
        self._growth_interval, self._growth_tracker = interval, tracker


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
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "cpu_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    # Written beside the target and moved over it when complete.
    temporary = f"{os.fspath(path)}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Scaler | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name, given in (("scaler", scaler), ("scheduler", scheduler)):
        if checkpoint[name] is not None and given is None:
            raise ValueError(f"a {name} was saved and none is given")
        if checkpoint[name] is None and given is not None:
            raise ValueError(f"a {name} is given and none was saved")

    # All that may refuse comes first: the scaler on trial, the model by its shapes, the optimizer.
    if scaler is not None:
        copy.deepcopy(scaler).load_state_dict(checkpoint["scaler"])
    saved, mine = (
        {name: getattr(value, "shape", None) for name, value in state.items()}
        for state in (checkpoint["model"], model.state_dict())
    )
    if saved != mine:
        raise RuntimeError(f"another model's weights were saved: {saved.items() ^ mine.items()}")
    before = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    try:
        model.load_state_dict(checkpoint["model"])  # an extra state may refuse after all
        _load_or_leave(optimizer, checkpoint["optimizer"])
        if scheduler is not None:
            _load_or_leave(scheduler, checkpoint["scheduler"])
    except BaseException:
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        raise
    if scaler is not None:
        scaler.load_state_dict(checkpoint["scaler"])
    torch.set_rng_state(checkpoint["cpu_rng"])
    if checkpoint["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])


def _load_or_leave(part: Optimizer | LRScheduler, state: dict[str, Any]) -> None:
    """Load a state; whatever it lacks is a ValueError, and the part stays as it was."""
    before = part.state_dict()
    try:
        part.load_state_dict(state)
    except KeyError as error:
        part.load_state_dict(before)
        raise ValueError(f"{type(part).__name__} finds no {error} in its state") from error


# Part 4


class MasterWeights:
    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no trainable parameter")
        for name, p in named:
            if p.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"parameter {name!r} is {p.dtype}, not torch.float16 or torch.bfloat16"
                )
        self._params = [p for _, p in named]
        self.masters = [p.detach().float().requires_grad_() for p in self._params]
        self.optimizer = make_optimizer(self.masters)

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None

    def step(self, loss_scale: float = 1.0) -> bool:
        try:
            for p, master in zip(self._params, self.masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float().div_(loss_scale)
            if not all(bool(grad.isfinite().all()) for grad in _grads(self.masters)):
                return False
            self.optimizer.step()
            with torch.no_grad():
                for p, master in zip(self._params, self.masters, strict=True):
                    if p.grad is not None:
                        p.copy_(master)
            return True
        finally:
            for master in self.masters:
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": [master.detach() for master in self.masters],
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masters = state_dict["masters"]
        if len(masters) != len(self.masters):
            raise ValueError(
                f"{len(masters)} masters were saved, the model has {len(self.masters)}"
            )
        for i, (saved, master) in enumerate(zip(masters, self.masters, strict=True)):
            if saved.shape != master.shape:
                raise ValueError(
                    f"master {i} was {tuple(saved.shape)}, the model has {tuple(master.shape)}"
                )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        with torch.no_grad():
            for p, saved, master in zip(self._params, masters, self.masters, strict=True):
                master.copy_(saved)
                p.copy_(master)
