"""What ranks do for the specs of build; the expected results, and those of known mistakes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import check_equal
from kit.laws.equal import same
from kit.ranks.rank import device
from kit.ranks.shapes import Deep, Outer
from kit.ranks.shards import full, mesh, weights
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Model
from specs.sharded_checkpoint.models import BLOCK_TYPES, momentum, of_all, sharded
from specs.sharded_checkpoint.ranks import error_of


class Tricky(nn.Module):
    """Blocks in blocks, one of a subclass; frozen parameters, two precisions, both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))  # one row, on rank 0
        self.register_buffer("scale", torch.ones(7, 1))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(OUTPUTS), persistent=False)
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.head.bias.requires_grad_(False)
        inner = Outer(WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2), Deep(WIDTH)
        self.outer = nn.Sequential(*inner)
        self.spare = nn.Sequential(nn.Linear(FEATURES, WIDTH, dtype=torch.bfloat16))
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.again = nn.Linear(FEATURES, WIDTH, bias=False)
        self.eval().outer.train()


def tied() -> nn.Module:
    """The same with one weight in two modules."""
    model = Tricky()
    model.again.weight = model.embed.weight
    return model


def init(module: nn.Module) -> None:
    """Random values, others for frozen parameters: another order gives other values."""
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, mean=0.02, std=0.15 if p.requires_grad else 0.3)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
        else:
            buffer.fill_(3)


def begin() -> None:
    """The same random numbers from here on, and not from the beginning of a seed."""
    draw.seed(6)
    draw.rand(3)


def alone(
    make: Callable[[], nn.Module],
    order: Callable[[nn.Module], Iterable[nn.Module]] = nn.Module.modules,
) -> nn.Module:
    """What one process has; computed on a rank, because a GPU draws other numbers."""
    with device():
        model = make()
    begin()
    for module in order(model):
        init(module)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, those not in the state dict too."""
    return {**weights(model), **full(dict(model.named_buffers()))}


def guesses(make: Callable[[], nn.Module], want: dict[str, Tensor]) -> dict[str, Any]:
    """The values of known mistakes."""
    model, ranks, untied = sharded(make()), mesh().size(), values(alone(Tricky))
    own = dict(model.named_parameters(remove_duplicate=False))
    wide = values(alone(lambda: make().float()))
    found = {
        "modules are initialised from the inside out": values(
            alone(make, order=lambda m: reversed([*m.modules()]))
        ),
        "a tied weight keeps the value of its first module, not its last": untied
        | {"again.weight": untied["embed.weight"]},
        "init gets float32, which is then rounded to the dtype of the weight": {
            name: value.to(want[name].dtype) for name, value in wide.items()
        },
        "init gets a parameter that requires a gradient, although it is frozen": values(
            alone(lambda: make().requires_grad_(True))
        ),
        "every rank takes the first rows": {
            name: torch.cat([value.chunk(ranks)[0]] * ranks)[: len(value)] if name in own else value
            for name, value in want.items()
        },
    }
    begin()
    with torch.no_grad():
        for module in model.modules():
            init(module)
    found["init runs on shards, so every rank draws the same numbers"] = values(model)
    return {belief: value for belief, value in found.items() if not same(value, want)}


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(p, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _modes(model: nn.Module) -> dict[str, bool]:
    modes = {
        f"mode of {name or 'the model'}": module.training for name, module in model.named_modules()
    }
    modes |= {f"{name} is in the state dict": True for name in model.state_dict()}
    frozen = {f"requires_grad of {name}": p.requires_grad for name, p in model.named_parameters()}
    return modes | frozen


def _held(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of what the optimizer has."""
    names = {p: name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return sorted(names.get(p, "one that is not in the model") for p in held)


UNITS, VALUES, TIES, MODES = "units", "values", "ties", "what make_model set"
HELD = "parameters of the optimizer"
FACTS: dict[str, Callable[[Any, Any], Any]] = {
    UNITS: lambda model, optimizer: [
        name for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ],
    VALUES: lambda model, optimizer: values(model),
    TIES: lambda model, optimizer: _ties(model),
    MODES: lambda model, optimizer: _modes(model),
    HELD: _held,
}
CAUSES = {
    UNITS: "a block, or the model, is not a unit; or another module is one",
    VALUES: "init runs in another order, twice, without some parameters or buffers, or on shards; "
    "or the generator is seeded again",
    TIES: "to_empty(), or a new parameter, broke the tie",
    MODES: "build calls train() or eval(), makes parameters that require gradients, or registers "
    "a buffer again",
    HELD: "it was made from parameters that were replaced afterwards; or it lacks a frozen one; "
    "or it has a tied one twice",
}


def built_has(answer: Any, rank: int, make: Callable[[], nn.Module], *facts: str) -> None:
    for what in facts:
        begin()
        model, optimizer = answer.build(make, mesh(), BLOCK_TYPES, init, momentum)
        on_meta = [name for name, v in model.state_dict().items() if v.is_meta]
        unfinished = "to_empty() was not called, or not for every tensor"
        check_equal(on_meta, [], "tensors on meta", cause=unfinished)
        got, one = FACTS[what](model, optimizer), sharded(alone(make))
        want, suspects = FACTS[what](one, momentum(one.parameters())), {}
        if what == VALUES and any(of_all(not same(got, want))):
            suspects = guesses(make, want)
        clause = VALUES if what == VALUES else ""
        check_equal(got, want, what, cause=CAUSES[what], suspects=suspects, clause=clause)


def build_fails_on_one(answer: Any, rank: int) -> None:
    """make_model, init and make_optimizer, one at a time, raise on rank 1."""
    tied = functools.partial(Model, blocks=0, tied=True)
    given: dict[str, Any] = {"make_model": tied, "init": init, "make_optimizer": momentum}
    for name, function in given.items():

        def fails(*args: Any, function: Any = function) -> Any:
            if rank == 1:
                raise OSError()  # without a message
            return function(*args)

        make_model, *others = {**given, name: fails}.values()
        build = functools.partial(answer.build, make_model, mesh(), BLOCK_TYPES, *others)
        what = f"whether rank {rank} raises where {name} raises on rank 1"
        cause = "the ranks do not tell each other that one of them failed"
        check_equal(bool(error_of(build)), True, what, cause=cause)
