"""The log behind `kit.memory.account`: every storage of a step, and the evidence of its kind."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from kit.memory.ruler import LiveBytes, parts_of, tensors_in
from kit.private_torch import (
    CAST,
    COLLECTIVES,
    DEVICE_QUERIES,
    FSDP_COPIES,
    FSDP_GRADIENT_COPIES,
    active_fake_mode,
    fake_device,
    fake_mode_depth,
    in_backward,
    put_hook_first,
    sparse_parts,
    storage_key,
)


class Storage:
    """One storage from its first sight to its end, with the evidence of what it was."""

    def __init__(self) -> None:
        self.before = 0  # its bytes, if it is older than the step
        self.evidence: set[str] = set()
        self.like: Storage | None = None  # it is a gradient if that one is
        self.made_in_backward = self.freed_in_backward = False

    def kind(self) -> str:
        if own := self._kind_by_evidence():
            return own
        met, record = {self}, self.like
        while record and record not in met:
            if kind := record._kind_by_evidence():
                return kind if kind == "gradients" else "activations"
            met.add(record)
            record = record.like
        return "activations"

    def _kind_by_evidence(self) -> str:
        kinds = ("unsharded", "shards", "optimizer state", "gradients", "communication")
        return next((kind for kind in kinds if kind in self.evidence), "")


class Change(NamedTuple):
    """So many bytes more of a storage, before this point of the timeline."""

    point: int
    record: Storage
    delta: int


class StorageLog(LiveBytes):
    """Counts as LiveBytes does, and logs the life of every storage."""

    def __init__(
        self,
        device: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        known: Iterable[object],
    ) -> None:
        super().__init__()
        self._fake = active_fake_mode()
        self._depth = fake_mode_depth(self._fake) if self._fake else 0
        self._device = "meta" if self._fake else device  # where the storages of fake tensors are
        self._records: dict[int, Storage] = {}
        self.old: list[Storage] = []
        self.changes: list[Change] = []
        self._hooks: list[Any] = []
        self._model, self._optimizer = model, optimizer
        self.note_owned()
        for tensor in _plain(list(tensors_in(known))):
            self._record(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_overhead(func):
            return func(*args, **kwargs)
        self.collect_after_import()
        if func is not torch.ops.aten.lift_fresh.default:
            for tensor in _plain((args, *kwargs.values())):
                self._met(tensor)
        result = func(*args, **kwargs)
        for tensor in _plain(result):
            if self._is_counted(tensor):
                self._made(tensor.untyped_storage())
        self._note_operator(func, args, kwargs, result)
        self.timeline.append(self.above)
        return result

    # What is counted, and the log of it

    def _is_overhead(self, func: Any) -> bool:
        """In a dry run: whether a device is asked for, or a sharding is propagated."""
        if not self._fake:
            return False
        return func.namespace == DEVICE_QUERIES or fake_mode_depth(self._fake) > self._depth

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        # in a dry run all storages are meta, and the tensor knows what it stands for
        return not self._fake or fake_device(tensor) == "cpu"

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._device

    def _record(self, tensor: torch.Tensor) -> Storage | None:
        if not self._is_counted(tensor):
            return None
        storage = tensor.untyped_storage()
        self._existed(storage)
        return self._records.get(storage_key(storage))

    def _existed(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key not in self._bytes:
            super()._existed(storage)
            if key in self._bytes:
                record = self._records[key] = Storage()
                record.before = self._bytes[key]
                self.old.append(record)

    def _made(self, storage: torch.UntypedStorage) -> None:
        before = self.above
        super()._made(storage)
        key = storage_key(storage)
        if key in self._bytes:
            if key not in self._records:
                self._records[key] = Storage()
                self._records[key].made_in_backward = in_backward()
            record = self._records[key]
            self._change(record, self.above - before)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        super()._resized(storage)
        if record := self._records.get(storage_key(storage)):
            record.evidence.add("unsharded")

    def _freed(self, key: int, reference: object) -> None:
        record = self._records.pop(key)
        record.freed_in_backward = in_backward()
        self._change(record, -self._bytes[key])
        super()._freed(key, reference)

    def _change(self, record: Storage, delta: int) -> None:
        if delta:
            self.changes.append(Change(len(self.timeline), record, delta))

    # The evidence

    def _note(self, word: str, *values: object) -> None:
        for tensor in _plain(values):
            if record := self._record(tensor):
                record.evidence.add(word)

    def note_owned(self) -> None:
        """Note what the model and the optimizer hold now."""
        parameters = self._parameters()
        self._note("shards", [part for tensor in parameters for part in parts_of(tensor)])
        self._note("shards", list(self._model.buffers()))
        self._note("unsharded", list(self._gathered()))
        self._note("optimizer state", list(tensors_in(self._optimizer.state.values())))
        self._note_gradients()

    def _parameters(self) -> list[torch.Tensor]:
        # the optimizer has the shards even of what the model holds gathered
        return list(dict.fromkeys([*self._model.parameters(), *self._optimized()]))

    def _optimized(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _gathered(self) -> Iterator[torch.Tensor]:
        """What FSDP2 has gathered and not given back: sharded parameters are wrappers."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it
        optimized = set(self._optimized())
        for module in self._model.modules():
            if fsdp and isinstance(module, fsdp.FSDPModule):
                plain = (p for p in module.parameters() if not hasattr(p, "__tensor_flatten__"))
                yield from (parameter for parameter in plain if parameter not in optimized)

    def _note_gradients(self, *_: object) -> None:
        for parameter in self._parameters():
            self._note_gradient(parameter)

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._note("gradients", list(tensors_in(parameter.grad)))

    @contextmanager
    def watching_gradients(self) -> Iterator[None]:
        """Note each gradient when it is set, and before the optimizer's step those set by hand."""
        for parameter in self._parameters():
            self._hook(parameter)
        self._hooks.append(self._optimizer.register_step_pre_hook(self._note_gradients))
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()

    def _hook(self, parameter: torch.Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf:  # FSDP2 calls these hooks as well
            hook = parameter.register_post_accumulate_grad_hook(self._note_gradient)
            # it goes before hooks of the model's own, which may use the gradient up
            put_hook_first(parameter, hook)
            self._hooks.append(hook)

    def _met(self, tensor: torch.Tensor) -> None:
        record = self._record(tensor)
        if record and isinstance(tensor, nn.Parameter) and "parameter" not in record.evidence:
            record.evidence.add("parameter")
            if "shards" not in record.evidence:
                self._hook(tensor)  # a gathered one, whose gradient may wait to be reduced

    def _note_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace in COLLECTIVES:
            self._note("communication", args, *kwargs.values(), result)
        elif func.namespace == FSDP_COPIES:
            self._note("communication", args, *kwargs.values(), result)
            if func.name() in FSDP_GRADIENT_COPIES:
                self._note("gradients", args)
        elif func is CAST:
            self._liken(result, args[0])
        elif func is torch.ops.aten.add_.Tensor and isinstance(args[1], torch.Tensor):
            self._liken(args[1], args[0])

    def _liken(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        record, like = self._record(tensor), self._record(other)
        if record and like and not record.like:
            record.like = like


def _plain(value: object) -> Iterator[torch.Tensor]:
    """The dense tensors among an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
        elif value.layout is torch.sparse_coo:
            yield from sparse_parts(value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _plain(part)
