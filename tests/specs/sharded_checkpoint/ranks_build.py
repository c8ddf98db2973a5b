"""What runs on every rank: programs for the specs of build."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import check_close, check_equal
from kit.laws.equal import same
from kit.ranks.shards import mesh
from kit.ranks.toys import Model
from specs.sharded_checkpoint.models import (
    BLOCK_TYPES,
    MODELS,
    SEED,
    TRICKY,
    Tiny,
    alone,
    has_own,
    init,
    momentum,
    sharded,
    step,
    ties,
    values,
)
from specs.sharded_checkpoint.ranks import error_of, of_all


def built(answer: Any, kind: str, make_optimizer: Callable[..., Optimizer] = momentum) -> Any:
    """The model and its optimizer."""
    draw.seed(SEED)
    return answer.build(MODELS[kind], mesh(), BLOCK_TYPES, init, make_optimizer)


def built_has(answer: Any, rank: int, what: str, cause: str, kinds: Iterable[str]) -> None:
    """Fail unless what was built has that of one process, for these kinds of models."""
    for kind in kinds:
        model = built(answer, kind)[0]
        on_meta = [name for name, v in model.state_dict().items() if v.is_meta]
        unfinished = "to_empty() has not been called, or not on all that is on meta"
        check_equal(on_meta, [], f"tensors on meta of the model {kind}", cause=unfinished)
        got, want = FACTS[what](model), FACTS[what](alone(kind))
        is_wrong = what == "values" and any(of_all(not same(got, want)))
        guesses = _guesses(kind, want) if is_wrong else {}
        check_equal(got, want, f"{what} of the model {kind}", cause=cause, suspects=guesses)


FACTS: dict[str, Callable[[Any], Any]] = {
    "values": values,
    "ties": ties,
    "train mode and requires_grad": lambda m: (
        {f"mode of {name}": module.training for name, module in m.named_modules()}
        | {f"requires_grad of {name}": p.requires_grad for name, p in m.named_parameters()}
    ),
    "the next random number": lambda m: draw.next_random(torch.device("cpu"), 1).item(),
}


def _guesses(kind: str, want: dict[str, Tensor]) -> dict[str, Any]:
    """What well-known mistakes give."""
    ranks = mesh().size()
    found = {
        "modules are initialised from the inside out": values(
            alone(kind, order=lambda m: reversed([*m.modules()]))
        ),
        "modules without parameters and buffers are left out": values(
            alone(kind, order=lambda m: [x for x in m.modules() if has_own(x)])
        ),
        "the tie: init sees two parameters where one has two names": values(
            alone(kind, init=functools.partial(init, is_one=False))
        ),
        "every rank takes the first rows": {
            name: _first_rows(value, ranks) if value.dim() else value
            for name, value in want.items()
        },
    }
    model = sharded(MODELS[kind]())
    draw.seed(SEED)
    with torch.no_grad():
        for module in model.modules():
            init(module)
    found["init runs on shards, so every rank draws the same numbers for its own"] = values(model)
    return {belief: value for belief, value in found.items() if not same(value, want)}


def _first_rows(value: Tensor, ranks: int) -> Tensor:
    rows = math.ceil(len(value) / ranks)
    return torch.cat([value[:rows]] * ranks)[: len(value)]


def built_units(answer: Any, rank: int) -> None:
    """Which modules are units, and what the optimizer holds."""
    for kind in MODELS:
        model, optimizer = built(answer, kind)
        modules = dict(model.named_modules())
        want = [n for n, m in modules.items() if not n or isinstance(m, BLOCK_TYPES)]
        got = [name for name, m in modules.items() if isinstance(m, FSDPModule)]
        cause = "a block is no unit of its own, or what is no block is one, or the model is none"
        check_equal(got, want, f"units of the model {kind}", cause=cause)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in model.named_parameters() if p not in held]
        cause = "a frozen parameter may be thawed later, and then the optimizer does not know it"
        check_equal(missing, [], f"parameters of {kind} that make_optimizer lacks", cause=cause)


def built_trains(answer: Any, rank: int) -> None:
    """Two steps of what was built, and of one process."""
    for kind in TRICKY[:2]:
        one = alone(kind)
        own = momentum(one.parameters())
        model, optimizer = built(answer, kind)
        cause = "the optimizer was made from parameters that were replaced afterwards"
        for number in range(2):
            want = step(one, own, number, is_alone=True)
            got = step(model, optimizer, number)
            what = f"loss of step {number + 1} of the model {kind}"
            check_close(got, want, what, cause=cause, rtol=1e-4)


def built_once(answer: Any, rank: int) -> None:
    """On which device each call of make_model has made its tensors; and one after `build`."""
    seen: list[str] = []

    def make_model() -> Model:
        seen.append(torch.empty(1).device.type)
        return Model()

    def make_optimizer(parameters: Any) -> Optimizer:
        seen.append("an optimizer")
        return momentum(parameters)

    answer.build(make_model, mesh(), BLOCK_TYPES, init, make_optimizer)
    seen.append(torch.empty(1).device.type)
    cause = "make_model is called with memory, or twice, or meta is not left again"
    want = ["meta", "an optimizer", "cpu"]
    check_equal(seen, want, "devices of new tensors, and optimizers", cause=cause)


def build_fails_on_one(answer: Any, rank: int) -> dict[str, bool]:
    """Whether this rank raises where one argument of `build` raises on rank 1."""
    given: dict[str, Any] = {"make_model": Tiny, "init": init, "make_optimizer": momentum}
    raised = {}
    for name, function in given.items():

        def fails(*args: Any, function: Any = function) -> Any:
            if rank == 1:
                error = OSError()  # without a word
                error.cannot_be_pickled = lambda: None  # type: ignore[attr-defined]
                raise error
            return function(*args)

        make_model, *others = {**given, name: fails}.values()
        build = functools.partial(answer.build, make_model, mesh(), BLOCK_TYPES, *others)
        raised[name] = bool(error_of(build))
    return raised
