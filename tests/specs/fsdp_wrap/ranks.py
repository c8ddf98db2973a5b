"""Programs that run on every rank: wrap alone, accumulation, and calls that are refused."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.toys import mse
from kit.ranks.rank import device
from kit.ranks.shapes import frozen
from kit.ranks.shards import check_untouched, full, gradients, local_state, mesh, weights
from kit.ranks.toys import Batch, Block, data, make
from specs.fsdp_wrap.cases import Still, momentum
from specs.fsdp_wrap.shapes import Weigh


def keeps_values(answer: Any, rank: int) -> None:
    """Weights, buffers, dtypes, flags and names right after wrap, in either dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        model, kinds = frozen()
        model.blocks[0].register_buffer("third", torch.tensor(1 / 3))
        trained = [p.requires_grad for p in model.parameters()]
        want = weights(model) | full(dict(model.named_buffers()))
        model.to(device()).eval()
        optimizer = answer.wrap(model, mesh(), kinds, momentum, dtype=dtype)
        got = weights(model) | full(dict(model.named_buffers()))
        cause = "values are lost or rounded, or names change"
        check_equal(got, want, f"values after wrap with {dtype}", cause=cause)
        flags = [p.requires_grad for p in model.parameters()]
        cause = "requires_grad is the caller's to set"
        check_equal(flags, trained, f"requires_grad after wrap with {dtype}", cause=cause)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in model.named_parameters() if id(p) not in held]
        cause = "frozen ones are left out, or it is made before sharding"
        what = "parameters that the optimizer does not hold"
        check_equal(missing, [], what, cause=cause, clause="make_optimizer")


def accumulates(answer: Any, rank: int) -> None:
    """The gradient of micro-batches of 512, 1, 1, ... in bfloat16 training."""
    for sync in ("each", "last"):
        model = Weigh(Weigh()).to(device())  # one in the root, one in a block
        optimizer = answer.wrap(model, mesh(), Weigh, Still, dtype=torch.bfloat16)
        values = [512.0] + [1.0] * 7
        window = [(torch.full((1, 3), v, device=device()), torch.zeros(1)) for v in values]
        answer.train_step(model, window, lambda out, _: out.sum(), optimizer, sync=sync)
        got = gradients(model)
        want, lost = (dict.fromkeys(got, torch.full((3,), n / 8)) for n in (519, 512))
        cause = "gradients are added up, or reduced, in bfloat16"
        what = f"gradients with sync={sync!r}"
        check_equal(got, want, what, cause=cause, suspects={cause: lost})


def window(rank: int, count: int) -> list[Batch]:
    return [(x.to(device()), y.to(device())) for x, y in data([3] * count, seed=rank)]


def refuses_counts(answer: Any, rank: int, counts: list[int]) -> None:
    """Nothing follows: one more collective call could match that of a rank that waits."""
    model = make().to(device())
    optimizer = answer.wrap(model, mesh(), Block, momentum)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    _is_refused(
        lambda: answer.train_step(model, window(rank, counts[rank]), mse, optimizer),
        (model, optimizer),
        when=f"on every rank, with {counts} micro-batches",
        cause="a rank does not know how many micro-batches the others have",
    )


def refuses_arguments(answer: Any, rank: int) -> None:
    model = make().to(device())
    optimizer = answer.wrap(model, mesh(), Block, momentum)
    for name, value in [("sync", "first"), ("max_norm", 0.0), ("max_norm", -0.001)]:
        call = functools.partial(answer.train_step, model, window(rank, 1), mse, optimizer)
        _is_refused(
            functools.partial(call, **{name: value}),
            (model, optimizer),
            [str(value)],
            when=f"with {name}={value!r}",
            cause=f"{name}={value!r} is not checked",
        )


def _is_refused(call: Any, state: Any, words: Any = (), *, when: str, cause: str) -> None:
    before = local_state(*state)
    check_raises(call, ValueError, mentions=words, when=when, cause=cause)
    cause = "the step has begun before everything was checked"
    check_untouched(before, *state, call="the refused call", cause=cause, clause=ERRORS)
