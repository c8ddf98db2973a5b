"""A right answer of another shape: written from the stub alone, leaning on the library."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode


class StateBytes(NamedTuple):
    parameters: int
    gradients: int
    buffers: int
    optimizer: int


class PeakMemory(NamedTuple):
    baseline: int  # alive before the step
    peak: int  # the most that was alive at any moment of the step, baseline included
    retained: int  # alive after the step, less the baseline; negative if the step freed some


# Storages


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages of `tensors` that are not in `seen`, and put them there."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # _cdata, not data_ptr: the latter is 0 for every storage on the meta device.
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


# Part 1


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    parameters = list(model.parameters())
    seen: set[int] = set()
    return StateBytes(
        parameters=_count(parameters, seen),
        gradients=_count((p.grad for p in parameters if p.grad is not None), seen),
        buffers=_count(model.buffers(), seen),
        optimizer=0 if optimizer is None else _count(_tensors(optimizer.state), seen),
    )


# Part 2


class _Saved:
    """What the graph holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        # Detached: a saved output that kept its grad_fn would hold its own graph in a cycle.
        holder = _Saved(tensor.detach())
        saved.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = forward()
    # The graph owns the holders: those of a graph that is gone are gone with it.
    held = [holder.tensor for ref in saved if (holder := ref()) is not None]
    seen: set[int] = set()
    _count(itertools.chain(model.parameters(), model.buffers()), seen)  # there anyway
    total = _count(held, seen)
    del result
    return total


# Part 3


class _LiveStorages(TorchDispatchMode):
    """Keeps the sum of the cpu storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        # By address of the storage: the bytes counted, and the weak reference that takes them back.
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if storage.device.type != "cpu":
            return
        if key in self._live:
            counted, ref = self._live[key]  # an operation may have enlarged it
        else:
            counted, ref = 0, weakref.ref(storage, lambda _: self._release(key))
        self._live[key] = (nbytes, ref)
        self.current += nbytes - counted
        self.peak = max(self.peak, self.current)

    def _release(self, key: int) -> None:
        self.current -= self._live.pop(key)[0]

    def close(self) -> None:
        self._live.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.track(tensor)
        return out


def peak_memory(
    step: Callable[[], object],
    device: torch.device | str,
    existing: Iterable[Tensor] = (),
) -> PeakMemory:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {str(device)!r}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        baseline = torch.cuda.memory_allocated(device)
        result = step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        del result
        return PeakMemory(baseline, peak, torch.cuda.memory_allocated(device) - baseline)

    mode = _LiveStorages()
    try:
        for tensor in existing:
            mode.track(tensor)
            del tensor  # the step may free them: hold none of them
        baseline = mode.current
        with mode:
            result = step()
        peak = mode.peak
        del result
        return PeakMemory(baseline, peak, mode.current - baseline)
    finally:
        mode.close()


# Part 4

# Weights, gradients and optimizer in half bytes a parameter; for LoRA of the frozen model.
_RECIPES = {
    "sgd": (8, 8, 0),
    "sgd_momentum": (8, 8, 8),
    "adam": (8, 8, 16),
    "amp_adam": (8, 8, 16),
    "master_adam": (4, 4, 24),
    "lora_16bit": (4, 0, 0),
    "lora_4bit": (1, 0, 0),
}


def training_bytes(
    n_params: int,
    recipe: str,
    *,
    trainable: int | None = None,
    zero_stage: int = 0,
    ranks: int = 1,
) -> int:
    if recipe not in _RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; one of {', '.join(_RECIPES)}")
    if n_params < 0:
        raise ValueError(f"n_params must not be negative, not {n_params}")
    if not 0 <= zero_stage <= 3:
        raise ValueError(f"zero_stage must be 0 to 3, not {zero_stage}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")

    lora = recipe.startswith("lora")
    if lora and trainable is None:
        raise ValueError(f"recipe {recipe!r} needs trainable, not {trainable}")
    if not lora and trainable is not None:
        raise ValueError(f"recipe {recipe!r} has no adapters, but trainable is {trainable}")
    if trainable is not None and trainable < 0:
        raise ValueError(f"trainable must not be negative, not {trainable}")

    def half_bytes(count: int, recipe: str) -> int:
        shard = -(-count // ranks)
        weights, gradients, optimizer = _RECIPES[recipe]
        return (
            (shard if zero_stage >= 3 else count) * weights
            + (shard if zero_stage >= 2 else count) * gradients
            + (shard if zero_stage >= 1 else count) * optimizer
        )

    total = half_bytes(n_params, recipe)
    if trainable is not None:
        total += half_bytes(trainable, "adam")
    return total // 2
