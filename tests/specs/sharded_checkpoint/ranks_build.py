"""What runs on every rank: programs for the specs of build."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import check_equal
from kit.laws.equal import same
from kit.ranks.shards import mesh
from kit.ranks.toys import Block, Model
from specs.sharded_checkpoint.built import MODELS, UNTIED, alone, begin, guesses, init, values
from specs.sharded_checkpoint.models import BLOCK_TYPES, momentum, of_all
from specs.sharded_checkpoint.ranks import error_of


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(p, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _modes(model: nn.Module) -> dict[str, bool]:
    modes = {f"mode of {name}": module.training for name, module in model.named_modules()}
    frozen = {f"requires_grad of {name}": p.requires_grad for name, p in model.named_parameters()}
    return modes | frozen


def _held(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of what the optimizer has."""
    names = {p: name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return sorted(names.get(p, "one that is not in the model") for p in held)


VALUES, TIES, MODES = "values", "ties", "train mode and requires_grad"
HELD, STREAM = "parameters of the optimizer", "the next random number"
FACTS: dict[str, Callable[[Any, Any], Any]] = {
    VALUES: lambda model, optimizer: values(model),
    TIES: lambda model, optimizer: _ties(model),
    MODES: lambda model, optimizer: _modes(model),
    HELD: _held,
    STREAM: lambda model, optimizer: draw.next_random(torch.device("cpu"), 1).item(),
}
CAUSES = {
    VALUES: "init runs in another order, twice, on what lacks something, or on shards; or what it "
    "draws from has been seeded anew, or has another dtype",
    TIES: "to_empty(), or a new parameter, has cut the tie",
    MODES: "build has called train() or eval(), or has made parameters that require gradients",
    HELD: "it was made from parameters that were replaced afterwards; or a frozen one, which may "
    "be thawed later, is left out; or a tied one is there twice",
    STREAM: "numbers are drawn that one process does not draw, or ranks are seeded apart",
}


def built(answer: Any, kind: str) -> Any:
    """The model and its optimizer."""
    begin()
    return answer.build(MODELS[kind], mesh(), BLOCK_TYPES, init, momentum)


def built_has(answer: Any, rank: int, *facts: str, kinds: Any = UNTIED) -> None:
    """Fail unless what was built has that of one process."""
    for what, kind in itertools.product(facts, kinds):
        model, optimizer = built(answer, kind)
        on_meta = [name for name, v in model.state_dict().items() if v.is_meta]
        unfinished = "to_empty() has not been called, or not on all that is on meta"
        check_equal(on_meta, [], f"tensors on meta of the model {kind}", cause=unfinished)
        got, one = FACTS[what](model, optimizer), alone(kind)
        want = FACTS[what](one, momentum(one.parameters()))
        is_wrong = what == VALUES and any(of_all(not same(got, want)))
        suspects = guesses(kind, want) if is_wrong else {}
        if what == STREAM and got != want:
            begin()
            before = FACTS[STREAM](model, optimizer)
            suspects = {"the generator is put back to where it was before": before}
        check_equal(got, want, f"{what} of the model {kind}", cause=CAUSES[what], suspects=suspects)


def built_units(answer: Any, rank: int) -> None:
    """Which modules are units."""
    for kind in UNTIED:
        model, _ = built(answer, kind)
        modules = dict(model.named_modules())
        want = [n for n, m in modules.items() if not n or isinstance(m, BLOCK_TYPES)]
        got = [name for name, m in modules.items() if isinstance(m, FSDPModule)]
        cause = "a block is no unit of its own, or what is no block is one, or the model is none"
        what = f"units of the model {kind}, ranks: {mesh().size()}"
        check_equal(got, want, what, cause=cause)


def built_once(answer: Any, rank: int) -> None:
    """On which device each call of make_model has made its tensors; and one after `build`."""
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


def built_with_ties(answer: Any, rank: int) -> None:
    """What is one parameter is still one; all else is as without ties."""
    built_has(answer, rank, TIES, VALUES, STREAM, HELD, kinds=["tied"])


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
