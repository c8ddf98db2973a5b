"""A right answer of another shape: from the stub alone, with bookkeeping of its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
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


# What the parts share


def _tensors(root: object) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    todo, seen = [root], {}
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # keeps it alive, and its id its own
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)


class _Tally:
    """Sums storages, each once; a storage belongs to the first that claims it."""

    def __init__(self) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes back

    def claim(self, tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._held:
                self._held[storage._cdata] = storage
                total += storage.nbytes()
        return total


# Part 1


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    tally = _Tally()
    # The keyword arguments run in this order, and the order decides who owns a shared storage.
    return StateBytes(
        parameters=tally.claim(model.parameters()),
        gradients=tally.claim(p.grad for p in model.parameters() if p.grad is not None),
        buffers=tally.claim(model.buffers()),
        optimizer=(
            0 if optimizer is None else tally.claim(_tensors(list(optimizer.state.values())))
        ),
    )


# Part 2


class _Slip:
    """Stands in the graph for one saved tensor; it lives exactly as long as the graph needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a node that saves its own output would otherwise hold itself, for ever.
        self.tensor = tensor.detach()

    def redeem(self) -> Tensor:
        return self.tensor


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    ledger: list[weakref.ref[_Slip]] = []

    def pack(tensor: Tensor) -> _Slip:
        slip = _Slip(tensor)
        ledger.append(weakref.ref(slip))
        return slip

    with saved_tensors_hooks(pack, _Slip.redeem):
        result = forward()

    # A slip that is still there is held by a graph, whoever keeps that graph.
    counted = [slip.tensor for ref in ledger if (slip := ref()) is not None]
    slip = None
    del result
    tally = _Tally()
    tally.claim(model.parameters())
    tally.claim(model.buffers())
    return tally.claim(counted)


# Part 3


class _LiveStorages(TorchDispatchMode):
    """Watches every operation and keeps the bytes of the CPU storages that are alive.

    A weak reference to each storage calls back when it dies, so the sum is right at any moment and
    needs looking at only where memory is taken: after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def enter(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu":
            return
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            ref, before = self._known[key]
        else:
            ref, before = weakref.ref(storage, lambda _: self._leave(key)), 0
        self._known[key] = (ref, size)
        self.live += size - before
        self.peak = max(self.peak, self.live)

    def _leave(self, key: int) -> None:
        entry = self._known.pop(key, None)
        if entry is not None:
            self.live -= entry[1]

    def close(self) -> None:
        self._known.clear()  # the references go, and their calls with them

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.enter(tensor.untyped_storage())
        return out


def peak_memory(
    step: Callable[[], object],
    device: torch.device | str,
    existing: Iterable[Tensor] = (),
) -> PeakMemory:
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {device!r}")
    gc.collect()  # old garbage must not be freed in the middle of the step
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        baseline = torch.cuda.memory_allocated(where)
        step()
        peak = torch.cuda.max_memory_allocated(where)
        return PeakMemory(baseline, peak, torch.cuda.memory_allocated(where) - baseline)

    watch = _LiveStorages()
    try:
        tensor = None
        for tensor in existing:
            watch.enter(tensor.untyped_storage())
        del tensor  # nothing here may keep alive what the step frees
        baseline = watch.live
        with watch:
            step()
        return PeakMemory(baseline, watch.peak, watch.live - baseline)
    finally:
        watch.close()


# Part 4


class _Part(NamedTuple):
    """One kind of state: half bytes a parameter, and the ZeRO stage from which it is divided."""

    half_bytes: int
    stage: int

    def on_rank(self, count: int, zero_stage: int, ranks: int) -> int:
        shard = -(-count // ranks) if zero_stage >= self.stage else count
        return shard * self.half_bytes


class _Recipe:
    """The parts that trained parameters need, and what a frozen base under them weighs."""

    def __init__(self, weights: int, grads: int, optim: int, *, frozen: float = 0) -> None:
        self.trained = (_Part(2 * weights, 3), _Part(2 * grads, 2), _Part(2 * optim, 1))
        self.frozen = _Part(int(2 * frozen), 3)
        self.has_adapters = frozen > 0

    def total(self, n_params: int, trainable: int | None, zero_stage: int, ranks: int) -> int:
        frozen, trained = (0, n_params) if trainable is None else (n_params, trainable)
        halves = self.frozen.on_rank(frozen, zero_stage, ranks)
        halves += sum(part.on_rank(trained, zero_stage, ranks) for part in self.trained)
        return halves // 2


_RECIPES = {
    "sgd": _Recipe(4, 4, 0),
    "sgd_momentum": _Recipe(4, 4, 4),
    "adam": _Recipe(4, 4, 8),
    "amp_adam": _Recipe(4, 4, 8),
    "master_adam": _Recipe(2, 2, 12),
    "lora_16bit": _Recipe(4, 4, 8, frozen=2),
    "lora_4bit": _Recipe(4, 4, 8, frozen=0.5),
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
        raise ValueError(f"n_params must not be negative: {n_params}")
    if trainable is not None and trainable < 0:
        raise ValueError(f"trainable must not be negative: {trainable}")
    chosen = _RECIPES[recipe]
    if chosen.has_adapters and trainable is None:
        raise ValueError(f"recipe {recipe!r} has adapters and needs trainable, which is None")
    if not chosen.has_adapters and trainable is not None:
        raise ValueError(f"recipe {recipe!r} has no adapters, but trainable is {trainable}")
    if not 0 <= zero_stage <= 3:
        raise ValueError(f"zero_stage must be 0 to 3, not {zero_stage}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    return chosen.total(n_params, trainable, zero_stage, ranks)
