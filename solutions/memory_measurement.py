"""Memory measurement: count the bytes before you cut them.

All figures are bytes (int). Memory belongs to storages: all views of a tensor share one, which
counts once and in full. Tensors are dense.

    errors  ValueError, before any change; the message names the bad value
"""

from __future__ import annotations

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
        gradients   of frozen parameters too; None is 0 bytes
        buffers     of every module, non-persistent ones too
        optimizer   tensors in `optimizer.state`; Adam has none before its first step
        sharing     a storage counts once and in full, under the first of these kinds that has it

        >>> state_bytes(nn.Linear(7, 3))
        StateBytes(parameters=96, gradients=0, buffers=0, optimizer=0)

    Details:
        1. Optimizer state may lie deep in lists, tuples and dicts.
        2. Hyperparameters in `optimizer.param_groups` are not state, even tensors.
        3. Tensors on the meta device count as on a real one.
        4. The model, its gradients and the optimizer stay as they are.
    """
    parameters = list(model.parameters())
    state = tree_leaves(optimizer.state) if optimizer is not None else []
    seen: set[int] = set()  # shared, so that no storage counts under two kinds
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
            # _cdata tells storages apart. A tensor's data_ptr() is where its view starts, and
            # that of a storage on meta is always 0.
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


# Part 2


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd still holds for backward when `forward` has returned.

        held      tensors saved during `forward`, saved inputs too, if a graph still holds them:
                  the result's, or another that is kept, such as an auxiliary loss's
        sharing   a storage counts once and in full, however small the saved part
        left out  parameters and buffers that the model has after `forward`, and views of them
        after     backward works; the caller's saved-tensor hooks are as before; errors in
                  `forward` come through, and gc.collect() can free them

        >>> saved_bytes(lambda: model(x), model)

    Args:
        forward: called once.

    Details:
        1. A graph that is gone does not count, even if its tensors live on.
        2. Once the caller drops the result, its graph is freed without the garbage collector.
        3. If the caller has no hooks, gradients and memory are as after `forward` alone.
    """
    # The graph owns the boxes, and we refer to them weakly: a box lives as long as autograd would
    # have kept the tensor, so a graph that is dropped on the way takes its boxes along.
    boxes: WeakSet[_Box] = WeakSet()

    def pack(tensor: Tensor) -> _Box:
        # Detached, because operations like exp save their own result: with its grad_fn in the
        # box, the graph would hold itself, and only the garbage collector could free it.
        box = _Box(tensor.detach())
        boxes.add(box)
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        result = forward()
    model_storages: set[int] = set()
    _new_bytes([*model.parameters(), *model.buffers()], model_storages)
    total = _new_bytes([box.tensor for box in boxes], model_storages)
    del result  # it has kept the graph alive until here
    return total


class _Box:
    """What the graph holds in place of a saved tensor."""

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
        retained  what the step frees is subtracted, so keep no tensor of `existing` alive
        after     errors in `step` come through, and gc.collect() can free them; no mode is left on

        >>> peak_memory(lambda: train_step(x), "cpu", [x, *model.parameters()])

    Args:
        step: called once; its result is dropped before `retained` is read.
        device: "cpu", "cuda" or "cuda:N", or a torch.device; only its memory counts.
        existing: every older tensor that the step uses or frees, gradients and optimizer state
            too; on the cpu they are the baseline.

    Raises:
        any other device type, such as mps.

    Details:
        1. Every dtype and every operation counts, under no_grad too, also Tensor.resize_() and
           `out=`, which enlarge a tensor. Temporaries inside one operation need not count.
        2. The peak is at least the baseline. Earlier measurements do not count.
        3. On cuda the allocator's bytes count, on the cpu the storages'.
    """
    device = torch.device(device)
    if device.type == "cpu":
        watch = _LiveStorages()
        baseline = watch.look(existing)
        del existing  # a list made for this call would keep alive what the step frees
        return _peak_on_cpu(step, watch, baseline)
    if device.type == "cuda":
        del existing
        return _peak_on_cuda(step, device)
    raise ValueError(f"device must be cpu or cuda, not {str(device)!r}")


def _peak_on_cuda(step: Callable[[], object], device: torch.device) -> PeakMemory:
    torch.cuda.synchronize(device)
    # Without the reset, max_memory_allocated is the highest since the process started.
    torch.cuda.reset_peak_memory_stats(device)
    baseline = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return PeakMemory(baseline, peak, torch.cuda.memory_allocated(device) - baseline)


def _peak_on_cpu(step: Callable[[], object], watch: _LiveStorages, baseline: int) -> PeakMemory:
    with watch:
        step()
    after = watch.look()
    return PeakMemory(baseline, watch.peak, after - baseline)


class _LiveStorages(TorchDispatchMode):
    """The storages that are alive, and the most bytes that they ever held together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak: a storage that is freed leaves by itself. A tensor would leave too early, since
        # views may keep its storage alive.
        self.alive: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every operation comes through here, below autograd; those of the backward pass too.
        result = func(*args, **(kwargs or {}))
        self.look(tree_leaves(result))
        return result

    def look(self, values: Iterable[object] = ()) -> int:
        """Bytes alive now, the storages of `values` included."""
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.device.type == "cpu":
                    self.alive[storage._cdata] = storage  # that of a view is there already
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
        lora_16bit    2 for frozen weights; `trainable` adapter parameters as adam
        lora_4bit     1/2 for frozen weights; adapters likewise

        zero          stage 1 divides optimizer state by ranks, 2 also gradients, 3 also weights

        >>> training_bytes(7_500_000_000, "master_adam", zero_stage=3, ranks=64)
        1875000000

    Args:
        n_params: parameters; for LoRA the frozen ones.
        trainable: parameters of the adapters, for LoRA only.

    Raises:
        an unknown recipe; a stage that is not 0 to 3; ranks below 1; a negative count;
        `trainable` missing for LoRA, or given without it.

    Details:
        1. Shards are padded: every rank has ceil(parameters / ranks) of a divided part.
    """
    if recipe not in _BITS:
        raise ValueError(f"recipe must be one of {', '.join(_BITS)}, not {recipe!r}")
    if (trainable is not None) != recipe.startswith("lora"):
        raise ValueError(f"trainable is for lora recipes, and only them: {trainable}, {recipe!r}")
    for name, count in (("n_params", n_params), ("trainable", trainable or 0)):
        if count < 0:
            raise ValueError(f"{name} must not be negative, not {count}")
    if not 0 <= zero_stage <= 3:
        raise ValueError(f"zero_stage must be 0 to 3, not {zero_stage}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")

    total = _bytes_on_one_rank(n_params, _BITS[recipe], zero_stage, ranks)
    if trainable is not None:
        total += _bytes_on_one_rank(trainable, _BITS["adam"], zero_stage, ranks)
    return total


# Bits per parameter: weights, gradients, optimizer state. In bytes a 4-bit weight would be 0.5.
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
    return total // 8
