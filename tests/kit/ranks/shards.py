"""What a rank holds of a model that is sharded, put together again, and the arithmetic of shards.

On N ranks a rank has ceil(rows / N) rows of every parameter; N times that is at most N - 1 rows
more than there are: padding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.laws.checks import check
from kit.laws.equal import same
from kit.ranks.rank import device

if TYPE_CHECKING:  # a second of imports, which only those pay who shard
    from torch.distributed.device_mesh import DeviceMesh


@functools.cache  # a mesh has process groups, which are never given back
def mesh() -> DeviceMesh:
    """Over all ranks of the world."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, (dist.get_world_size(),))


@functools.cache
def meshes(inner: int) -> DeviceMesh:
    """Groups of so many ranks, side by side: those of one share a model ("shards")."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size() // inner, inner)
    return init_device_mesh(device().type, shape, mesh_dim_names=("groups", "shards"))


def full(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each tensor, on the cpu. A collective if shards are among them: on every rank.

    One for all of them, because a call for each takes longer than the step that is looked at.
    """
    shards: dict[str, Any] = {n: v.detach() for n, v in values.items() if hasattr(v, "to_local")}
    every: list[Tensor] = []
    if shards:
        group = next(iter(shards.values())).device_mesh.get_group()
        mine = torch.cat([_padded(shard, group.size()) for shard in shards.values()])
        every = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(every, mine, group=group)
    result, start = {}, 0
    for name, value in values.items():
        if name in shards:
            numel = part(value, len(every))
            rows = torch.cat([flat[start : start + numel] for flat in every])
            start += numel
            value = rows[: value.numel()].view(value.shape).to(value.dtype)
        result[name] = value.detach().cpu().clone()
    return result


def _padded(shard: Any, ranks: int) -> Tensor:
    local = shard.to_local().flatten()
    return F.pad(local, (0, part(shard, ranks) - local.numel()))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What the state dict has, whole."""
    return full(model.state_dict())


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names of the state dict: a wrapper may give others to named_parameters().

    FSDP2 gives every unit back to make a state dict, so a spec does not ask for one between steps.
    """
    held = model.state_dict(keep_vars=True).items()
    return [(name, p) for name, p in held if isinstance(p, nn.Parameter)]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradient of each parameter, whole."""
    return gradients_of(named(model))


def gradients_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """The same of parameters that were named before."""
    every = {name: p.grad for name, p in parameters}
    there = full({name: grad for name, grad in every.items() if grad is not None})
    return {name: there.get(name) for name in every}


def local_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's parts of weights, gradients and optimizer state, by value."""
    state = {
        f"{key} of {number}": _local(value)
        for number, p in enumerate(model.parameters())
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
    return {
        "weights": {name: _local(value) for name, value in model.state_dict().items()},
        "gradients": {name: _local(p.grad) for name, p in model.named_parameters()},
        "optimizer state": state,
    }


def check_untouched(
    before: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    call: str,
    cause: str,
    clause: str = "",
) -> None:
    """Fail if anything in `before` (of `local_state`) is otherwise on this rank."""
    __tracebackhide__ = True
    now = local_state(model, optimizer)
    changed = [kind for kind, values in before.items() if not same(values, now[kind])]
    check(
        not changed,
        expected=f"{', '.join(before)} as before {call}",
        got=f"{' and '.join(changed)} changed",
        cause=cause,
        clause=clause,
    )


def _local(value: Any) -> Any:
    if not isinstance(value, Tensor):  # no gradient
        return value
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().clone()


def units(model: nn.Module, block_types: Any) -> list[list[nn.Parameter]]:
    """The parameters of each unit of a model that is whole: blocks in their order, the root last.

    A block inside a block comes after it, and has its own.
    """
    blocks = [m for m in model.modules() if isinstance(m, block_types) and m is not model]
    owner: dict[nn.Parameter, int] = {}
    for number, block in enumerate(blocks):
        owner.update(dict.fromkeys(block.parameters(), number))
    found: list[list[nn.Parameter]] = [[] for _ in [*blocks, model]]
    for p in model.parameters():
        found[owner.get(p, len(blocks))].append(p)
    return found


def rounded(nbytes: int) -> int:
    """What a storage counts: a multiple of 512 bytes."""
    return -(-nbytes // 512) * 512


def part(p: Tensor, ranks: int) -> int:
    """Numbers in a rank's part of a parameter, padding included."""
    return -(-len(p) // ranks) * (p.numel() // len(p))


def shard_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """Bytes of a rank's float32 parts; of all with ranks=1."""
    return sum(rounded(4 * part(p, ranks)) for p in parameters)


def whole_bytes(parameters: Iterable[Tensor], ranks: int, itemsize: int = 4) -> int:
    """Bytes of the whole parameters when `ranks` parts are put together, padding included."""
    return sum(rounded(itemsize * ranks * part(p, ranks)) for p in parameters)
