"""What wrap refuses, and what a refused call leaves behind: nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.laws.checks import ERRORS, check, check_equal, check_raises
from kit.private_torch import forward_hooks
from kit.ranks.shapes import Outer
from kit.ranks.toys import WIDTH, Block, Model, make
from specs.fsdp_wrap.cases import adamw


class Bad(NamedTuple):
    """A call that is refused: words of the message, a change of the model, and other arguments."""

    words: list[str]
    change: Callable[[Model, DeviceMesh], object] = lambda model, mesh: None
    types: Any = Block
    dtype: Any = torch.float32


def _between_blocks(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def _of_two_blocks(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[1].up = model.blocks[0].up


def _block_and_inner(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[0].add_module("inner", Block().to(mesh.device_type))
    model.blocks[0].inner.up.weight = model.blocks[0].up.weight


def _block_and_root(model: Model, mesh: DeviceMesh) -> None:
    model.add_module("probe", nn.Linear(WIDTH, 3 * WIDTH + 1, bias=False))
    model.probe.weight = model.blocks[0].up.weight


REFUSED = {
    "one absent class of two": Bad(["Outer"], types=(Block, Outer)),
    "two blocks that share a parameter": Bad(["up.weight"], _between_blocks),
    "two blocks that share a module": Bad(["up.weight"], _of_two_blocks),
    "a block that shares with one inside it": Bad(["up.weight"], _block_and_inner),
    "a block that shares with the root": Bad(["weight"], _block_and_root),
    "a mesh of 2 by 4": Bad(["2"]),
    "float16": Bad(["float16"], dtype=torch.float16),
    "a sharded model": Bad([], lambda model, mesh: fully_shard(model, mesh=mesh)),
}


def check_refused(answer: Any, mesh: DeviceMesh, what: str) -> None:
    """Fail unless wrap raises ValueError and leaves the model as it was."""
    __tracebackhide__ = True
    bad, made = REFUSED[what], list[object]()

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(parameters)
        return adamw(parameters)

    device, over = mesh.device_type, mesh
    if what == "a mesh of 2 by 4":
        over = init_device_mesh(device, (2, 4), mesh_dim_names=("a", "b"))
    model = make(blocks=2).to(device)
    bad.change(model, mesh)
    before = _anatomy(model)
    call = functools.partial(answer.wrap, model, over, bad.types, make_optimizer, dtype=bad.dtype)
    unseen = f"no check finds {what}, or it comes too late"
    check_raises(call, ValueError, mentions=bad.words, when=f"for {what}", cause=unseen)
    changed = [name for name, found in _anatomy(model).items() if before.get(name) != found]
    check(
        not changed,
        expected=f"a model as it was before the refused call, for {what}",
        got=f"{', '.join(repr(name) for name in changed[:3])} changed",
        cause="sharding begins before everything is checked",
        clause=ERRORS,
    )
    cause = "the optimizer is made before the check"
    check_equal(len(made), 0, f"calls of make_optimizer, for {what}", cause=cause, clause=ERRORS)


def _anatomy(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks and parameters: what sharding changes."""
    return {
        name: (type(m), sorted(vars(m)), *forward_hooks(m), *map(id, m.parameters(recurse=False)))
        for name, m in model.named_modules()
    }
