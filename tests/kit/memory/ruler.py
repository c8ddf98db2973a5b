"""The memory ruler: how many bytes of tensors does one step hold, and when.

    measure(lambda: train_step(batch), known=[model, optimizer, batch]).above_baseline

On the cpu a dispatch mode counts the live storages after every operation: exact, and the same to
the byte each time. On cuda the reading is the caching allocator's own. The rules of the cpu count:

1. Storages count, not tensors: a view, an expanded tensor, an in-place result is no memory.
2. A storage counts rounded up to 512 bytes, as the cuda allocator holds it.
3. What the step did not make is baseline, whether it was registered (`known`) or met later as the
   argument of an operation. Except for `lift_fresh`: its argument is the literal that
   `torch.tensor([...])` has just made.
4. Sizes are read again where they can change: the result of an operation (`out=`, `resize_`), and
   `UntypedStorage.resize_`, by which FSDP frees parameters without any dispatch.
5. A wrapper (a DTensor) is unwrapped first, so that the local operation counts. Fake tensors, which
   DTensor's sharding propagation makes in global size, hold no memory.
6. The garbage collector waits for the end of the step, so that the peak does not depend on when it
   came by; `retained` is what can still be reached.

What the cpu count cannot see (the figures were read on torch 2.13, two cores):

- Memory inside one operator: a conv2d forward shows 1.11 of the allocator's 2.21 MB, forward and
  backward 1.11 of 2.59. Attention counts as the cpu kernel that ran; cuda chooses others.
- Memory that no operation makes: C extensions, numpy, a checkpoint's random state (5 KB each).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from kit.private_torch import DispatchMode, sparse_parts, storage_key


@dataclass(frozen=True)
class Reading:
    """What one step did to memory, in bytes.

    baseline  alive before the step; on the cpu, as far as it was known or the step used it
    peak      the most that was alive at any time during the step
    retained  alive after the step, less the baseline; negative when more was freed than kept
    timeline  alive after each operation, from the baseline to what remains after the step
    """

    device: str
    baseline: int
    peak: int
    retained: int
    timeline: tuple[int, ...]

    @property
    def above_baseline(self) -> int:
        """The most that the step itself added, in bytes."""
        return self.peak - self.baseline


def measure(
    step: Callable[[], object], device: torch.device | str = "cpu", *, known: Iterable[object] = ()
) -> Reading:
    """Run `step` once and read its memory, in bytes.

    `known` is what is alive beforehand: modules and optimizers (with gradients and states),
    tensors, and collections of these. On cuda the allocator knows it already. The step's return
    value is dropped before `retained` is read.

    Raises ValueError for a device that is neither cpu nor cuda, TypeError for something in `known`
    that cannot hold tensors, and whatever the step raises.
    """
    device = measurable(device)
    return _measure_cpu(step, known) if device.type == "cpu" else _measure_cuda(step, device)


def measurable(device: torch.device | str) -> torch.device:
    """The device, if it can be measured. Raises ValueError if not."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no memory ruler for device '{device}': it measures cpu and cuda")
    return device


def bytes_of(*things: object) -> int:
    """Bytes held by modules, optimizers and tensors: each storage once, rounded up to 512 bytes.

    A module counts with its parameters, buffers and gradients, an optimizer with its states,
    parameters and gradients. Storages on every device count. Raises TypeError like `measure`.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    _visit(tensors_in(things), lambda storage: storages.update({storage_key(storage): storage}))
    return sum(_rounded(storage.nbytes()) for storage in storages.values())


def human(n: int) -> str:
    """A number of bytes in three digits: '512 B', '13.6 KiB', '1.50 MiB'."""
    if abs(n) < 1024:
        return f"{n} B"
    value, units = n / 1024, iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(value) >= 999.5 and unit != "TiB":
        value, unit = value / 1024, next(units)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


class _Mode(DispatchMode):
    """Sees every operation, and clears up after imports."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = len(sys.modules)

    def collect_after_import(self) -> None:
        # An import may leave cyclic garbage, tracebacks for one, and with it every frame that was
        # running and its activations. The first checkpoint of a process imports torch._dynamo.
        if len(sys.modules) != self._modules:
            gc.collect()
            self._modules = len(sys.modules)


class LiveBytes(_Mode):
    """Counts the bytes of live cpu storages while it is active.

    Everything is kept relative to the baseline. A storage that turns out late to have existed
    before only raises the baseline, and every earlier point of the timeline rises with it.
    """

    def __init__(self, known: Iterable[object] = ()) -> None:
        super().__init__()
        self.baseline, self.above, self.timeline = 0, 0, [0]
        self._bytes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        _visit(tensors_in(known), self._existed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # only wrappers define __tensor_flatten__; importing DTensor to ask for it costs a second
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self.collect_after_import()
        if func is not torch.ops.aten.lift_fresh.default:
            _visit((*args, *(kwargs or {}).values()), self._existed)
        if torch.is_inference_mode_enabled():
            # Only autograd takes composite operations apart, and it is not asked here.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        _visit((result,), self._made)
        self.timeline.append(self.above)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the block runs: operations, and resized storages, which no dispatch sees."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self._existed(storage)
            result = original(storage, size)
            self._resized(storage)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_), self:
            yield

    def _existed(self, storage: torch.UntypedStorage) -> None:
        if storage_key(storage) not in self._bytes:
            self.baseline += self._watch(storage)

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        before = self._bytes.get(key)
        if before is None:
            self.above += self._watch(storage)
        elif before != (now := _rounded(storage.nbytes())):
            self._bytes[key] = now
            self.above += now - before

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._made(storage)
        self.timeline.append(self.above)

    def _watch(self, storage: torch.UntypedStorage) -> int:
        if not self._counts(storage):
            return 0
        key = storage_key(storage)
        self._bytes[key] = _rounded(storage.nbytes())
        self._refs[key] = weakref.ref(storage, partial(self._freed, key))
        return self._bytes[key]

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        # the storage is asked, not the tensor: a fake tensor calls itself cpu, its storage is meta
        return storage.device.type == "cpu"

    def _freed(self, key: int, _: object) -> None:
        del self._refs[key]
        self.above -= self._bytes.pop(key)

    def reading(self) -> Reading:
        """The figures so far, in bytes. Ends the count: what is freed later is not followed."""
        self._refs.clear()
        points = tuple(self.baseline + above for above in [*self.timeline, self.above])
        return Reading("cpu", self.baseline, max(points), self.above, points)


def _measure_cpu(step: Callable[[], object], known: Iterable[object]) -> Reading:
    live = LiveBytes(known)
    with collector_paused() as collect:
        with live.counting():
            step()
        collect()
        return live.reading()


def _measure_cuda(step: Callable[[], object], device: torch.device) -> Reading:
    _warm_up_cublas(device)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    baseline = torch.cuda.memory_allocated(device)
    samples = _AllocatedAfterEach(device)
    with collector_paused() as collect:
        with samples:
            step()
        collect()
    torch.cuda.synchronize(device)
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    timeline = (baseline, *samples.timeline, after)
    return Reading(str(device), baseline, peak, after - baseline, timeline)


class _AllocatedAfterEach(_Mode):
    """Reads the cuda allocator's counter on the host after each operation: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.timeline = device, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collect_after_import()
        result = func(*args, **(kwargs or {}))
        self.timeline.append(torch.cuda.memory_allocated(self.device))
        return result


def _warm_up_cublas(device: torch.device) -> None:
    # a workspace of megabytes is allocated once per thread and library (cuBLAS, cuBLASLt for the
    # bias), and backward runs in a thread of its own
    a, b = (torch.ones(16, 16, device=device, requires_grad=True) for _ in range(2))
    torch.autograd.backward(nn.functional.linear(a @ a, b, b[0]).sum())


@contextmanager
def collector_paused() -> Iterator[Callable[[], object]]:
    """Pause the garbage collector; yields what collects the garbage of the step at its end."""
    resume = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    before = _collections()
    try:
        # The garbage of the step is young, unless the step has collected: then what was left is
        # old. A search through all of torch takes some 100 ms.
        yield lambda: gc.collect(0 if _collections() == before else 2)
    finally:
        resume()


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _visit(values: Iterable[Any], note: Callable[[torch.UntypedStorage], None]) -> None:
    # an operator's arguments are tensors and lists of them: pytree would cost more than the count
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                note(value.untyped_storage())
            elif value.layout is torch.sparse_coo:
                for part in sparse_parts(value):
                    note(part.untyped_storage())
        elif isinstance(value, (list, tuple)):
            _visit(value, note)


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor that `thing` holds, gradients included; duplicates are possible."""
    if isinstance(thing, torch.Tensor):
        yield from parts_of(thing)
        if thing.is_leaf and thing.grad is not None:
            yield from tensors_in(thing.grad)
    elif isinstance(thing, nn.Module):
        yield from tensors_in((thing.parameters(), thing.buffers()))
    elif isinstance(thing, torch.optim.Optimizer):
        yield from tensors_in(group["params"] for group in thing.param_groups)
        yield from tensors_in(thing.state.values())
    elif isinstance(thing, Mapping):
        yield from tensors_in(thing.values())
    elif isinstance(thing, Iterable) and not isinstance(thing, str):
        for item in thing:
            yield from tensors_in(item)
    elif not isinstance(thing, (int, float, str, type(None))):
        raise TypeError(f"no tensors can be found in a {type(thing).__name__}")


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or what a wrapper holds; without its gradient."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]  # a DTensor has its mesh among them
        yield from tensors_in([part for part in parts if isinstance(part, torch.Tensor)])
    else:
        yield tensor
