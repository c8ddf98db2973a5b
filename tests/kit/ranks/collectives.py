"""Which collective calls a rank makes: in a real world, a simulated one, and a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kit.private_torch import COLLECTIVES, DispatchMode, named_arguments


class Collective(NamedTuple):
    """One collective call: `numel` counts the elements of this rank's input."""

    kind: str
    numel: int
    dtype: torch.dtype


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """The collective calls inside the block, one entry each, those that DDP makes included.

    Kinds are "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce",
    "gather", "scatter", "send", "recv", "batch_isend_irecv", "barrier"; a coalesced call is one
    call. An operator of torch.distributed that is not known raises LookupError and does not run.
    """
    seen: list[Collective] = []
    with _Watch(seen):
        yield seen


class _Watch(DispatchMode):
    """Sees the operators of torch.distributed, also those that DDP issues from C++."""

    def __init__(self, seen: list[Collective]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a wrapper (a DTensor) is unwrapped first: what it calls would go unseen from in here
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func.namespace in COLLECTIVES:
            self._note(func.name(), named_arguments(func, args, kwargs))
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, arguments: dict[str, Any]) -> None:
        kind = kind_of(operator)
        if not kind:
            return
        name = next((name for name in _INPUTS if name in arguments), "")
        tensors = list(_flat(arguments.get(name)))
        dtype = tensors[0].dtype if tensors else torch.float32
        numel = 0 if kind == "barrier" else sum(tensor.numel() for tensor in tensors)
        self._seen.append(Collective(kind, numel, dtype))


def kind_of(operator: str) -> str:
    """The kind of the collective that an operator calls, "" if it calls none.

    Raises LookupError for an operator that is not in the tables below.
    """
    name = operator.partition("::")[2].strip("_")
    if name in _NO_CALLS:
        return ""
    if name not in _KINDS:
        raise LookupError(
            f"{operator} may be a collective call, and it is not known of which kind: "
            f"add it to _KINDS in {__name__}, or to _NO_CALLS if it calls no other rank"
        )
    return _KINDS[name]


# Operators of the same namespaces that call no other rank.
_NO_CALLS = (
    "wait_tensor",
    "wait_tensors",
    "wrap_tensor_autograd",
    "check_for_nan",
    "mesh_get_process_group",
)

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
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "gather_into_tensor": "gather",  # since torch 2.15
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recv_any_source": "recv",
    "batch_p2p_ops": "batch_isend_irecv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}

# What the schemas call this rank's input; the first that an operator has.
_INPUTS = (
    *("input_tensors", "input_tensor", "input_list", "inputs", "input"),
    *("tensors", "tensor", "self"),
)


def _flat(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
