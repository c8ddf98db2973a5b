"""Memory measurement: count the bytes before you cut them.

Four parts: the bytes of training state, the bytes that autograd saves for the backward pass, the
peak of a step on any device, and the closed form that predicts the state before anything is built.

All figures are bytes (int). Memory belongs to storages, not to tensors: a view shares its storage
with its base, so every storage is counted once and in full, however many tensors look at it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StateBytes(NamedTuple):
    """Bytes of training state by kind."""

    parameters: int
    gradients: int
    buffers: int
    optimizer: int


class PeakMemory(NamedTuple):
    """Bytes of one measured step."""

    baseline: int  # alive before the step
    peak: int  # the most that was alive at any moment of the step, baseline included
    retained: int  # alive after the step, less the baseline; negative if the step freed some


# Part 1


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """Bytes of a model's parameters, gradients and buffers, and of an optimizer's state.

    Each storage counts once, in full, under the first kind that holds it (parameters, gradients,
    buffers, optimizer): tied parameters count once, a view or an expanded tensor counts as the
    storage behind it. Frozen parameters and non-persistent buffers count; a gradient that is None
    does not. Optimizer state is every tensor in `optimizer.state`, however deep in lists, tuples
    and dicts; before the first step Adam has none.

    Args:
        model: any module with dense tensors, on any device, the meta device included.
        optimizer: None counts as no state.

    Raises:
        TypeError: `model` is not a Module or `optimizer` is not an Optimizer; names the type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
    parameters = list(model.parameters())
    state = tree_leaves(list(optimizer.state.values())) if optimizer else []
    seen: set[int] = set()  # shared by the four kinds: what one kind counted, no other counts
    return StateBytes(
        parameters=_new_bytes(parameters, seen),
        gradients=_new_bytes([p.grad for p in parameters], seen),
        buffers=_new_bytes(model.buffers(), seen),
        optimizer=_new_bytes(state, seen),
    )


def _new_bytes(values: Iterable[object], seen: set[int]) -> int:
    """Bytes of the storages behind `values` that are not in `seen`; adds them to it."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            # _cdata is the address of the storage itself; data_ptr() would be 0 for every
            # empty or meta tensor, and the same for two storages that share foreign memory.
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


# Part 2


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd holds between the forward and the backward pass.

    Counts the tensors that were saved for a backward pass while `forward` ran and that are still
    held when it returns, each storage once and in full. What was saved for a graph that is gone by
    then does not count. Storages of `model`'s parameters and buffers never count, in whatever shape
    they are saved (Linear saves its weight as a transposed view): they are there anyway. The input
    counts, if it is saved. Afterwards the graph is as free to go as without the count.

    Args:
        forward: runs the forward pass; its result is kept alive until the count is taken.
        model: whose parameters and buffers to leave out.

    Raises:
        TypeError: `forward` is not callable or `model` is not a Module; names the type.
        Any error of `forward`, unchanged; no hook is left behind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    # The graph owns the boxes and we hold them weakly: a box lives as long as autograd would
    # have held the tensor, so a graph that is dropped on the way takes its boxes along.
    boxes: weakref.WeakSet[_Box] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Box:
        # Detached, because exp and its like save their own result: with its grad_fn in the box,
        # the graph would hold itself, and nothing would ever be freed.
        box = _Box(tensor.detach())
        boxes.add(box)
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        result = forward()
    state: set[int] = set()
    _new_bytes([*model.parameters(), *model.buffers()], state)
    total = _new_bytes([box.tensor for box in boxes], state)
    del result  # only now may the graph go
    return total


class _Box:
    """A saved tensor that can be referred to weakly without keeping its graph alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# Part 3


def peak_memory(
    step: Callable[[], object],
    device: torch.device | str,
    existing: Iterable[Tensor] = (),
) -> PeakMemory:
    """Run `step` once and say how many bytes were alive before, at the peak, and after.

    On cuda the allocator counts. On the cpu nothing counts for us: a TorchDispatchMode watches
    every operation, forward and backward, and keeps the sum of live storages. A temporary counts
    while it lives; a view or an in-place result takes no memory; what is freed is given back. Two
    measurements are independent: neither reports the peak of the other. Memory of other devices
    does not count.

    Args:
        step: runs the work; what it returns is dropped before `retained` is read.
        device: "cpu", "cuda" or "cuda:N", as a string or a torch.device.
        existing: every tensor alive before the step that it may use or free (parameters,
            gradients, optimizer state, inputs). On the cpu they are the baseline, each storage
            once; on cuda the allocator knows them already. An iterator is emptied in either case,
            and nothing of it is kept: what the step frees must be free to go.

    Raises:
        ValueError: `device` names another kind of device, or none, or a cuda device that is not
            there; names it. The step has not run then.
        Any error of `step`, unchanged; no mode is left behind.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"no device is named {device!r}") from None
    if device.type == "cpu":
        return _peak_on_cpu(step, existing)
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return _peak_on_cuda(step, device, existing)
    raise ValueError(f"device must be cpu, or a cuda device that is there, not {str(device)!r}")


def _peak_on_cuda(
    step: Callable[[], object], device: torch.device, existing: Iterable[Tensor]
) -> PeakMemory:
    # Emptied, though we need nothing of it: an iterator that still has tensors to give would keep
    # alive what the step frees.
    deque(existing, maxlen=0)
    torch.cuda.synchronize(device)
    # Without the reset, max_memory_allocated is the highest since the process started.
    torch.cuda.reset_peak_memory_stats(device)
    baseline = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return PeakMemory(baseline, peak, torch.cuda.memory_allocated(device) - baseline)


def _peak_on_cpu(step: Callable[[], object], existing: Iterable[Tensor]) -> PeakMemory:
    counter = _LiveBytes()
    counter.add(existing)
    baseline = counter.live
    with counter:
        step()
    return PeakMemory(baseline, counter.peak, counter.live - baseline)


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive and remembers the highest sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.finalize[Any, Any]] = {}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Below autograd every operation passes here, those of the backward pass included. A view
        # or an in-place result arrives with a storage that is known already.
        self.add(tree_leaves(result))
        return result

    def add(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.is_cpu:
                storage = value.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.storages:
                    # The storage tells us when it is freed; a tensor could not, since others
                    # may still look at the same storage.
                    self.storages[key] = weakref.finalize(storage, self.drop, key, size)
                    self.live += size
        self.peak = max(self.peak, self.live)

    def drop(self, key: int, size: int) -> None:
        del self.storages[key]  # the address may be used again by another storage
        self.live -= size


# Part 4


def training_bytes(
    n_params: int,
    recipe: str,
    *,
    trainable: int | None = None,
    zero_stage: int = 0,
    ranks: int = 1,
) -> int:
    """Bytes of training state on one rank, from arithmetic alone; activations are not in it.

    The convention, in bytes a parameter (weights + gradients + optimizer):

    - "sgd": 4 + 4 + 0, all fp32
    - "sgd_momentum": 4 + 4 + 4
    - "adam": 4 + 4 + 8, two fp32 moments
    - "amp_adam": the same as "adam". Autocast keeps fp32 weights and gradients; its 16-bit copies
      of the weights live for one forward and backward and are counted with the activations.
    - "master_adam": 2 + 2 + 12, 16-bit weights and gradients; the optimizer holds an fp32 master
      copy and two fp32 moments. This is the 16 of the ZeRO paper (arXiv 1910.02054, section 3.1);
      with fp32 gradients in place of the 16-bit ones people count 18, with both kinds 20.
    - "lora_16bit": `n_params` frozen weights of 2, and `trainable` adapter parameters as "adam"
    - "lora_4bit": `n_params` frozen weights of half a byte (quantisation constants not counted),
      and `trainable` adapter parameters as "adam"

    ZeRO stage 1 divides the optimizer's part among the ranks, stage 2 the gradients too, stage 3
    the weights too, frozen ones included. A divided part is ceil(parameters / ranks) parameters
    long on every rank, since shards are padded to one size. An odd half byte is rounded up.

    Args:
        n_params: parameters of the model; for LoRA of the frozen model, adapters not included.
        recipe: one of the names above.
        trainable: parameters of the adapters; for the LoRA recipes, and only for them.
        zero_stage: 0 (nothing divided) to 3.
        ranks: data-parallel ranks, at least 1.

    Raises:
        TypeError: a count is not an int (a float such as 7e9, or a bool); names the value.
        ValueError: an unknown recipe, a negative count, `trainable` given for a recipe without
            adapters or missing for one with them, a stage outside 0 to 3, fewer than 1 ranks; names
            the value.
    """
    counts = {"n_params": n_params, "zero_stage": zero_stage, "ranks": ranks}
    if trainable is not None:
        counts["trainable"] = trainable
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} must be an int, not {count!r}")
        if count < 0:
            raise ValueError(f"{name} must not be negative, not {count}")
    if recipe not in _BITS:
        raise ValueError(f"recipe must be one of {', '.join(_BITS)}, not {recipe!r}")
    if (trainable is not None) != recipe.startswith("lora"):
        raise ValueError(f"trainable is for lora recipes, and only them: {trainable}, {recipe!r}")
    if zero_stage > 3:
        raise ValueError(f"zero_stage must be 0 to 3, not {zero_stage}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")

    total = _bytes_on_one_rank(n_params, _BITS[recipe], zero_stage, ranks)
    if trainable is not None:
        total += _bytes_on_one_rank(trainable, _BITS["adam"], zero_stage, ranks)
    return total


# Bits a parameter: weights, gradients, optimizer. Bits, because 4-bit weights are half a byte and
# the arithmetic should stay in integers.
_BITS = {
    "sgd": (32, 32, 0),
    "sgd_momentum": (32, 32, 32),
    "adam": (32, 32, 64),
    "amp_adam": (32, 32, 64),
    "master_adam": (16, 16, 96),
    "lora_16bit": (16, 0, 0),
    "lora_4bit": (4, 0, 0),
}


def _bytes_on_one_rank(count: int, bits: tuple[int, int, int], zero_stage: int, ranks: int) -> int:
    weights, gradients, optimizer = bits
    shard = -(-count // ranks)  # ceil, in integers
    total = weights * (shard if zero_stage >= 3 else count)
    total += gradients * (shard if zero_stage >= 2 else count)
    total += optimizer * (shard if zero_stage >= 1 else count)
    return -(-total // 8)
