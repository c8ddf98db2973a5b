"""Memory measurement: count the bytes before you cut them.

All figures are bytes (int). Memory belongs to storages: all views of a tensor share one, which
counts once and in full. Tensors are dense.

    errors  ValueError unless it says otherwise; each names the offending value (a TypeError may
            name its type), and comes before any change
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StateBytes(NamedTuple):
    """Bytes by kind."""

    parameters: int
    gradients: int
    buffers: int
    optimizer: int


class PeakMemory(NamedTuple):
    """Bytes of one step."""

    baseline: int  # alive before the step
    peak: int  # the most that was alive at any moment of the step, baseline included
    retained: int  # alive after the step, less the baseline; negative if the step freed some


# Part 1


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """Bytes of a model's parameters, gradients and buffers, and of an optimizer's state.

        parameters  frozen ones too
        gradients   of its parameters, frozen ones too; None is 0 bytes
        buffers     of every module, non-persistent ones too
        optimizer   tensors in `optimizer.state`; Adam has none before its first step
        sharing     a storage counts once, under the first of these kinds that has it

        >>> state_bytes(nn.Linear(7, 3))
        StateBytes(parameters=96, gradients=0, buffers=0, optimizer=0)

    Args:
        model: its tensors may have any dtype.
        optimizer: None counts as no state.

    Raises:
        TypeError: not a Module, or not an Optimizer; names the type.

    Details:
        1. A slice, an expanded or a strided tensor counts as the whole storage behind it.
        2. Optimizer state may lie deep in lists, (named) tuples and (ordered) dicts.
        3. Hyperparameters in `optimizer.param_groups` are not state, even tensors.
        4. A tensor on the meta device counts the bytes that it would take elsewhere.
        5. Model, gradients and optimizer stay as they are.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
    parameters = list(model.parameters())
    state = tree_leaves(optimizer.state) if optimizer is not None else []
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
            # _cdata is the address of the storage itself. data_ptr() would be 0 for every meta
            # tensor, and a tensor's own is where its view starts.
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


# Part 2


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd holds for backward passes when `forward` has returned.

        held      what was saved while `forward` ran, if a graph still holds it: its result's, or
                  one that somebody keeps, such as an auxiliary loss's
        sharing   a storage counts once and in full, however small the saved part
        left out  parameters and buffers that the model has after `forward`, and views of them
        after     what it raises comes through, and `gc.collect()` frees it; the hooks on saved
                  tensors are those from before; backward works, but need not notice changes in
                  place

        >>> saved_bytes(lambda: model(x), model)

    Args:
        forward: called once; it may return tensors in lists, tuples and dicts.
        model: its parameters and buffers are left out.

    Raises:
        TypeError: not a Module; names the type.

    Details:
        1. Sizes are those at the end. A graph that is gone does not count, even if its tensors live
           on.
        2. A saved input counts. What `forward` packs with hooks of its own need not count.
        3. Once the caller drops the result, its graph is freed without the garbage collector.
        4. Gradients, modes, random stream and memory are as with `forward` alone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    # The graph owns the boxes and we hold them weakly: a box lives as long as autograd would
    # have held the tensor, so a graph that is dropped on the way takes its boxes along.
    boxes: WeakSet[_Box] = WeakSet()

    def pack(tensor: Tensor) -> _Box:
        # Detached, because exp and its like save their own result: with its grad_fn in the box,
        # the graph would hold itself, and nothing would ever be freed.
        box = _Box(tensor.detach())
        boxes.add(box)
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        result = forward()
    there_anyway: set[int] = set()
    _new_bytes([*model.parameters(), *model.buffers()], there_anyway)
    total = _new_bytes([box.tensor for box in boxes], there_anyway)
    del result  # only now may the graph go
    return total


class _Box:
    """A saved tensor that can be referred to weakly without keeping its graph alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# Part 3, the stretch: part 4 comes before it


def peak_memory(
    step: Callable[[], object],
    device: torch.device | str,
    existing: Iterable[Tensor] = (),
) -> PeakMemory:
    """Run `step` once and say how many bytes were alive before, at the peak, and after.

        peak      temporaries count while they live: in forward, backward and optimizer step
        sharing   a view or an in-place result takes no memory; a slice keeps its whole storage
        retained  what the step frees is subtracted; a cycle not yet collected is alive
        after     what it raises comes through, and `gc.collect()` frees it; no mode is left

        >>> peak_memory(lambda: train_step(x), "cpu", [x, *model.parameters()])

    Args:
        step: called once; its result is dropped before `retained` is read.
        device: "cpu", "cuda" or "cuda:N", or a torch.device; only its memory counts.
        existing: older tensors that the step uses or frees, gradients and optimizer state too; on
            the cpu, the baseline. Those not listed may count as new.

    Raises:
        another of torch's devices (mps, meta), or a cuda device that is not there.

    Details:
        1. Every dtype counts, and every operation, under the caller's no_grad too. Temporaries
           inside one operation, or between two, need not count.
        2. `existing` may be an iterator: empty it, and keep no tensor that the step may free.
        3. The peak is at least the baseline; what an earlier measurement has seen does not count.
        4. Sizes are read after each operation and at the end. `resize_` and `out=` make tensors
           larger; FSDP frees and gathers parameters by `untyped_storage().resize_(n)`, which is no
           operation.
        5. On cuda the allocator's bytes count, on the cpu tensors'.
    """
    device = torch.device(device)
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
    watch = _LiveStorages()
    baseline = watch.look(existing)
    with watch:
        step()
    after = watch.look()
    return PeakMemory(baseline, watch.peak, after - baseline)


class _LiveStorages(TorchDispatchMode):
    """Knows the storages that are alive, and the most that they ever held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak: a storage that is freed leaves by itself. A tensor would leave too early, since
        # others may still look at the same storage.
        self.alive: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd every operation passes here, those of the backward pass included.
        result = func(*args, **(kwargs or {}))
        self.look(tree_leaves(result))
        return result

    def look(self, values: Iterable[object] = ()) -> int:
        """Bytes alive now, the storages of `values` included."""
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.device.type == "cpu":
                    self.alive[storage._cdata] = storage  # a view's is known already
        # Each size is read anew: resize_, out= and FSDP change those of storages known already.
        live = sum(storage.nbytes() for storage in self.alive.values())
        self.peak = max(self.peak, live)
        return live


# Part 4


def training_bytes(
    n_params: int,
    recipe: str,
    *,
    trainable: int | None = None,
    zero_stage: int = 0,
    ranks: int = 1,
) -> int:
    """Bytes of weights, gradients and optimizer state on one rank, by arithmetic.

    Bytes of a parameter, its gradient and its optimizer state:

        sgd           4+4+0
        sgd_momentum  4+4+4
        adam          4+4+8
        amp_adam      4+4+8: under autocast weights and gradients stay float32
        master_adam   2+2+12: fp32 master weights and two moments
        lora_16bit    frozen weights of 2, and `trainable` adapter parameters as adam
        lora_4bit     frozen weights of 1/2, and adapters likewise

        zero          stage 1 divides optimizer state by ranks, 2 also gradients, 3 also weights

        >>> training_bytes(7_500_000_000, "master_adam", zero_stage=3, ranks=64)
        1875000000

    Args:
        n_params: parameters; for LoRA the frozen ones.
        recipe: a name from the table.
        trainable: parameters of the adapters, for LoRA only.
        zero_stage: 0 (divides nothing) to 3.
        ranks: at least 1.

    Raises:
        other recipes, stages and ranks; a negative count; `trainable` missing or out of place.

    Details:
        1. Shards are padded: every rank has ceil(parameters / ranks) of a divided part, frozen
           weights (stage 3) and adapters apart.
        2. Results are exact for every count; half a byte is rounded up.
        3. 0 parameters or adapters are fine.
        4. A float for any number raises TypeError, even a whole one (7e9).
    """
    counts = {"n_params": n_params, "zero_stage": zero_stage, "ranks": ranks}
    if trainable is not None:
        counts["trainable"] = trainable
    for name, count in counts.items():
        if not isinstance(count, int):
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
