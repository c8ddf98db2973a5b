"""Which collective calls a rank makes: in a real world, a simulated one, and a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collective(NamedTuple):
    """One collective call: `numel` counts the elements of this rank's input."""

    kind: str
    numel: int
    dtype: torch.dtype


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """The collective calls inside the block, one entry each, those that DDP makes included.

    Kinds are "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce",
    "gather", "scatter", "send", "recv", "barrier"; a coalesced call is one call.
    """
    seen: list[Collective] = []
    with _Watch(seen):
        yield seen


class _Watch(TorchDispatchMode):
    """Sees the operators of torch.distributed, also those that DDP issues from C++."""

    def __init__(self, seen: list[Collective]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # slower calls otherwise, see kit.memory.ruler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a wrapper (a DTensor) is unwrapped first: what it calls would go unseen from in here
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, {**dict(zip(_names(func), args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, arguments: dict[str, Any]) -> None:
        kind = _KINDS.get(func._schema.name.partition("::")[2].strip("_"))
        if kind is None:
            return  # wait_tensor and the like
        name = next((name for name in _INPUTS if name in arguments), "")
        tensors = list(_flat(arguments.get(name)))
        dtype = tensors[0].dtype if tensors else torch.float32
        numel = 0 if kind == "barrier" else sum(tensor.numel() for tensor in tensors)
        self._seen.append(Collective(kind, numel, dtype))


_KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}

# What the schemas call this rank's input; the first that an operator has.
_INPUTS = ("input_tensors", "input_tensor", "inputs", "input", "tensors", "tensor", "self")


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _flat(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
