"""What wrap refuses, and what a refused call leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from kit.laws.checks import ERRORS, check, check_equal, check_raises
from kit.private_torch import forward_hooks
from kit.ranks.shapes import Outer
from kit.ranks.toys import FEATURES, WIDTH, Block, Model, make
from specs.fsdp_wrap.cases import adamw


class Bad(NamedTuple):
    """A call that is refused: the words of its message, and what makes the model and the rest."""

    words: list[str]
    change: Callable[[Model, DeviceMesh], nn.Module | None] = lambda model, mesh: None
    types: Any = Block
    dtype: Any = torch.float32


def _between_blocks(model: Model, mesh: DeviceMesh) -> None:
    """Frozen, so that neither would have a gradient."""
    model.blocks[1].up.weight = model.blocks[0].up.weight.requires_grad_(False)


def _block_and_root(model: Model, mesh: DeviceMesh) -> None:
    model.add_module("probe", nn.Linear(WIDTH, 3 * WIDTH + 1, bias=False))
    model.probe.weight = model.blocks[0].up.weight


def _a_module_of_two_blocks(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[1].norm = model.blocks[0].norm


def _gathered(model: Model, mesh: DeviceMesh) -> None:
    """Between forward and backward the parameters of a unit that stays are whole."""
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model(torch.ones(2, FEATURES, device=mesh.device_type))


def _one_block(model: Model, mesh: DeviceMesh) -> None:
    """Whole at the moment, as after a forward pass: no parameter shows it, nor does the root."""
    fully_shard(model.blocks[1], mesh=mesh).unshard()


def _one_parameter(model: Model, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))


REFUSED = {
    "one absent class of two": Bad(["Outer"], types=(Block, Outer)),
    "a class that only the root has": Bad(["Block"], lambda _, mesh: Block(5).to(mesh.device_type)),
    "two blocks that share what is frozen": Bad(["up.weight"], _between_blocks),
    "a block that shares with the root": Bad(["weight"], _block_and_root),
    "a module in two blocks": Bad(["norm."], _a_module_of_two_blocks),
    "a mesh of 2 by 4": Bad(["2"]),
    "float16": Bad(["float16"], dtype=torch.float16),
    "float64": Bad(["float64"], dtype=torch.float64),
    "a model that is sharded and gathered": Bad([], _gathered),
    "a model of which a block is sharded": Bad([], _one_block),
    "a model of which a parameter is sharded": Bad([], _one_parameter),
}


def check_refused(answer: Any, mesh: DeviceMesh, what: str) -> None:
    """Fail unless wrap raises ValueError, and has left the model as it was."""
    __tracebackhide__ = True
    bad, made = REFUSED[what], list[object]()

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(parameters)
        return adamw(parameters)

    device, over = mesh.device_type, mesh
    if what == "a mesh of 2 by 4":
        over = init_device_mesh(device, (2, 4), mesh_dim_names=("a", "b"))
    model: nn.Module = make(blocks=2).to(device)
    model = bad.change(model, mesh) or model  # no .to(): it would give back what is gathered
    before = _anatomy(model)
    options = {"dtype": bad.dtype, "checkpoint": True}  # blocks are not changed for that either
    call = lambda: answer.wrap(model, over, bad.types, make_optimizer, **options)  # noqa: E731
    unseen = f"no check finds {what}, or not on every path to a module, or too late"
    check_raises(call, ValueError, mentions=bad.words, when=f"for {what}", cause=unseen)
    changed = [name for name, found in _anatomy(model).items() if before.get(name) != found]
    check(
        not changed,
        expected=f"a model as it was before the refused call, for {what}",
        got=f"{', '.join(repr(name) for name in changed[:3])} changed",
        cause="units are made before all of them have been checked",
        clause=ERRORS,
    )
    cause = "the optimizer is made before the check"
    check_equal(len(made), 0, f"calls of make_optimizer, for {what}", cause=cause, clause=ERRORS)


def _anatomy(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks and parameters, by which a sharded model differs."""
    return {
        name: (type(m), sorted(vars(m)), *forward_hooks(m), *map(id, m.parameters(recurse=False)))
        for name, m in model.named_modules()
    }
