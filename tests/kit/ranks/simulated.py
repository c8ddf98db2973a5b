"""Many ranks in one process: what one of them holds and calls, without the others.

    with simulated_world(64) as mesh:       # rank 0 of 64, real tensors
        fully_shard(model, mesh=mesh)

    with dry_run(64) as mesh:               # the same, and no tensor holds any memory
        model = LargeModel(...)

Collectives return at once and move nothing: the other ranks are as if they had what this one has,
so that an answer may compare its numbers with theirs. Other values that passed through one mean
nothing. Shapes, dtypes, bytes and the calls themselves are those of the real thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from kit.private_torch import (
    fake_store,
    fake_tensor_mode,
    forget_shardings,
    fsdp_chunks,
    no_strided_shard_search,
)

if TYPE_CHECKING:  # a second of imports, which only those pay who simulate
    from torch.distributed.device_mesh import DeviceMesh


def why_no_shards(device: torch.device) -> str:
    """Why fully_shard does not run there; nothing where it does."""
    old = torch.__version__ < "2.7"  # compared as versions, not as text
    return (
        "fully_shard of torch 2.6 does not run on the cpu" if old and device.type == "cpu" else ""
    )


@contextmanager
def simulated_world(
    size: int, device: torch.device | str = "cpu", *, rank: int = 0
) -> Iterator[DeviceMesh]:
    """This process as rank `rank` of `size`: its mesh, of one dimension over all ranks.

    No process group is left behind, whatever happens in the block. Raises ValueError for a size
    below 1 and a rank that is not one of them, and RuntimeError in a process that has a group.
    """
    with _world(size, torch.device(device), rank) as mesh:
        yield mesh


@contextmanager
def dry_run(size: int, *, rank: int = 0) -> Iterator[DeviceMesh]:
    """The simulated world with fake tensors: models, optimizers and steps of any size, in seconds.

    Everything calls itself "cpu". What reads a value raises, as `item` and `print` do. Raises like
    `simulated_world`.
    """
    # the mesh is made of real tensors
    with _world(size, torch.device("cpu"), rank) as mesh, _short_cuts(), fake_tensor_mode():
        yield mesh


@contextmanager
def _world(size: int, device: torch.device, rank: int) -> Iterator[DeviceMesh]:
    if size < 1:
        raise ValueError(f"a world has at least one rank, not {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of the {size} ranks 0 to {size - 1}")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        raise RuntimeError("this process has a process group, so it can simulate no other world")
    # DTensor's caches hold meshes, which say what the rank was, and with it how large its shards
    # are; and meshes of other ranks are equal.
    forget_shardings()
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    try:
        # Of the class: an answer may have imported the function all_reduce by its name.
        kind = dist.ProcessGroup
        with mock.patch.object(kind, "allreduce", _summing(kind.allreduce)):
            yield init_device_mesh(device.type, (size,))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _summing(allreduce: Callable[..., Any]) -> Callable[..., Any]:
    """The fake group leaves a sum over ranks as it is; one over equals is so many times as much."""
    import torch.distributed as dist

    def summed(group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
        work = allreduce(group, tensors, options)
        if options.reduceOp == dist.ReduceOp.SUM:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(group.size())
        return work

    return summed


@contextmanager
def _short_cuts() -> Iterator[None]:
    """Spare a third of the time of a dry run; where torch has changed, it takes so much longer.

    FSDP2 cuts a parameter into a view for each rank to use two of them, and all are fake tensors.
    DTensor looks, for each tensor of a foreach operator, in all of them for a flag that only a mesh
    of two dimensions can set.
    """
    with fsdp_chunks(_Chunks), no_strided_shard_search():
        yield


class _Chunks(Sequence[torch.Tensor]):
    """What `torch.chunk` gives, each chunk when it is asked for; empty ones at the end."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, number, dim
        self._size = math.ceil(tensor.size(dim) / number)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        whole = self._tensor.size(self._dim)
        start = min(range(self._number)[index] * self._size, whole)
        return self._tensor.narrow(self._dim, start, min(self._size, whole - start))
