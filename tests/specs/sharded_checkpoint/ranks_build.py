"""What runs on every rank for the specs of build, what it should give, and what mistakes give."""

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
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Block, Model
from specs.sharded_checkpoint.models import BLOCK_TYPES, Thin, momentum, of_all, sharded
from specs.sharded_checkpoint.ranks import error_of


class Tricky(nn.Module):
    """Blocks in blocks, one of a subclass; frozen parameters, two precisions, both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))  # one row: only rank 0 has it
        self.register_buffer("scale", torch.ones(7, 1))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(OUTPUTS), persistent=False)
        self.register_buffer("unused", None)
        self.sum = nn.Conv1d(OUTPUTS, 1, 2)  # of it only rank 0 has rows
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.head.bias.requires_grad_(False)
        inner = Outer(WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2), Deep(WIDTH)
        self.outer = nn.Sequential(*inner)
        self.pruned = nn.Sequential()  # a block without parameters
        self.spare = Thin().to(torch.bfloat16)
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.again = nn.Linear(FEATURES, WIDTH, bias=False)  # where it is tied, it has nothing else
        self.eval().outer.train()


def tied() -> nn.Module:
    """The same with one weight in two modules."""
    model = Tricky()
    model.again.weight = model.embed.weight
    return model


def init(module: nn.Module) -> None:
    """Random values for all that is the module's own: whoever is out of order gets other ones.

    What is frozen has others; and a count on each module, which may have nothing of its own.
    """
    module.calls_of_init = getattr(module, "calls_of_init", 0) + 1  # type: ignore[assignment]
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, mean=0.02, std=0.15 if p.requires_grad else 0.3)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
        else:
            buffer.fill_(3)


def begin() -> None:
    """The same random numbers from here on, of which some have been drawn."""
    draw.seed(6)
    draw.rand(3)


def alone(
    make: Callable[[], nn.Module],
    order: Callable[[nn.Module], Iterable[nn.Module]] = nn.Module.modules,
) -> nn.Module:
    """What one process has: called on a rank, as a GPU draws other numbers."""
    with device():
        model = make()
    begin()
    for module in order(model):
        init(module)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, also those not in the state dict, and the calls of `init`."""
    calls = {
        f"calls of init on {name or 'the model'}": torch.tensor(getattr(module, "calls_of_init", 0))
        for name, module in model.named_modules()
    }
    return {**weights(model), **full(dict(model.named_buffers())), **calls}


def guesses(make: Callable[[], nn.Module], want: dict[str, Tensor]) -> dict[str, Any]:
    """What well-known mistakes give."""
    model, ranks, untied = sharded(make()), mesh().size(), values(alone(Tricky))
    own = dict(model.named_parameters(remove_duplicate=False))
    wide = values(alone(lambda: make().float()))
    found = {
        "modules are initialised from the inside out": values(
            alone(make, order=lambda m: reversed([*m.modules()]))
        ),
        "a module whose parameters are all tied to modules before is left out": values(
            alone(make, order=lambda m: [x for x in m.modules() if x is not getattr(m, "again", 0)])
        ),
        "of a tied weight the first module's value is kept: the last one counts": untied
        | {"again.weight": untied["embed.weight"]},
        "init is given float32, and then it is rounded to the dtype of the weight": {
            name: value.to(want[name].dtype) for name, value in wide.items()
        },
        "what is given to init requires a gradient, where the weight is frozen": values(
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
    found["init runs on shards, so every rank draws the same numbers for its own"] = values(model)
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


UNITS, VALUES, TIES, MODES = "units", "values", "ties", "what make_model has set"
HELD, STREAM = "parameters of the optimizer", "the next random number"
FACTS: dict[str, Callable[[Any, Any], Any]] = {
    UNITS: lambda model, optimizer: [
        name for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ],
    VALUES: lambda model, optimizer: values(model),
    TIES: lambda model, optimizer: _ties(model),
    MODES: lambda model, optimizer: _modes(model),
    HELD: _held,
    STREAM: lambda model, optimizer: draw.next_random(torch.device("cpu"), 1).item(),
}
CAUSES = {
    UNITS: "a block is no unit of its own, or what is no block is one, or the model is none",
    VALUES: "init runs in another order, twice, on what lacks something, or on shards; or the "
    "generator has been seeded anew",
    TIES: "to_empty(), or a new parameter, has cut the tie",
    MODES: "build has called train() or eval(), has made parameters that require gradients, or has "
    "registered a buffer anew",
    HELD: "it was made from parameters that were replaced afterwards; or a frozen one, which may "
    "be thawed later, is left out; or a tied one is there twice",
    STREAM: "numbers are drawn that one process does not draw, or ranks are seeded apart",
}


def built_has(answer: Any, rank: int, make: Callable[[], nn.Module], *facts: str) -> None:
    for what in facts:
        begin()
        types = BLOCK_TYPES if mesh().size() > 1 else (*BLOCK_TYPES, Tricky)  # a block itself
        model, optimizer = answer.build(make, mesh(), types, init, momentum)
        on_meta = [name for name, v in model.state_dict().items() if v.is_meta]
        unfinished = "to_empty() has not been called, or not on all that is on meta"
        check_equal(on_meta, [], "tensors on meta", cause=unfinished)
        got, one = FACTS[what](model, optimizer), sharded(alone(make))
        want, suspects = FACTS[what](one, momentum(one.parameters())), {}
        if what == VALUES and any(of_all(not same(got, want))):
            suspects = guesses(make, want)
        if what == STREAM:
            begin()
            belief = "this rank has drawn nothing, or its generator is put back to where it was"
            suspects = {belief: FACTS[STREAM](model, optimizer)}
        check_equal(got, want, what, cause=CAUSES[what], suspects=suspects)


def built_once(answer: Any, rank: int) -> None:
    seen: list[str] = []

    def make_model() -> Model:
        seen.append(torch.empty(1).device.type)
        return Model()

    def make_optimizer(parameters: Any) -> Optimizer:
        seen.append("an optimizer")
        return momentum(parameters)

    answer.build(make_model, mesh(), Block, init, make_optimizer)
    seen.append(torch.empty(1).device.type)
    cause = "make_model is called with memory, or twice, or meta is not left again"
    want = ["meta", "an optimizer", "cpu"]
    check_equal(seen, want, "devices of new tensors, and optimizers", cause=cause)


def build_fails_on_one(answer: Any, rank: int) -> None:
    """One argument of `build` after the other raises on rank 1; the model has a tied weight."""
    tied = functools.partial(Model, blocks=0, tied=True)
    given: dict[str, Any] = {"make_model": tied, "init": init, "make_optimizer": momentum}
    for name, function in given.items():

        def fails(*args: Any, function: Any = function) -> Any:
            if rank == 1:
                error = OSError()  # without a word
                error.cannot_be_pickled = lambda: None  # type: ignore[attr-defined]
                raise error
            return function(*args)

        make_model, *others = {**given, name: fails}.values()
        build = functools.partial(answer.build, make_model, mesh(), BLOCK_TYPES, *others)
        what = f"whether rank {rank} raises where {name} raises on rank 1"
        cause = "the ranks do not tell each other what has failed"
        check_equal(bool(error_of(build)), True, what, cause=cause)
