"""What runs on every rank beside the scripts of cases: wrap alone, and steps that are refused."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.toys import mse
from kit.ranks.rank import device
from kit.ranks.shapes import SHAPES
from kit.ranks.shards import check_untouched, full, gradients, local_state, mesh, weights
from kit.ranks.toys import Batch, Block, data, make
from specs.fsdp_wrap.cases import Still, momentum
from specs.fsdp_wrap.shapes import Weigh


def keeps_values(answer: Any, rank: int) -> None:
    """On a real rank: weights, dtypes, flags and names right after wrap, in either dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("odd sizes", "frozen", "nested"):
            model, kinds = SHAPES[name]()
            block = next(module for module in model.modules() if isinstance(module, kinds))
            model.register_buffer("third", torch.tensor(1 / 3))
            block.register_buffer("unsaved", torch.tensor(1 / 3), persistent=False)
            trained = [p.requires_grad for p in model.parameters()]
            want = weights(model) | full(dict(model.named_buffers()))
            model.to(device()).eval()
            block.train()
            answer.wrap(model, mesh(), kinds, momentum, dtype=dtype)
            what = f"of the model {name} after wrap with {dtype}"
            cause = "the values, or their digits, or their dtype, get lost, or names change"
            got = weights(model) | full(dict(model.named_buffers()))
            check_equal(got, want, f"values {what}", cause=cause)
            cause = "requires_grad is what the caller has set"
            check_equal([p.requires_grad for p in model.parameters()], trained, what, cause=cause)


def accumulates(answer: Any, rank: int) -> None:
    """The gradient of micro-batches that weigh 512, 1, 1, ... in bfloat16 training."""
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
    """It ends there: a call more would meet that of a rank that waits, and hide that it does."""
    model = make().to(device())
    optimizer = answer.wrap(model, mesh(), Block, momentum)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    _is_refused(
        lambda: answer.train_step(model, window(rank, counts[rank]), mse, optimizer),
        (model, optimizer),
        when=f"on every rank, where the ranks have {counts} micro-batches",
        cause="ranks without any, or with other numbers than the others, are not seen on every one",
    )


def refuses_arguments(answer: Any, rank: int) -> None:
    """Options that are not there, norms that are none, and a model that is not sharded."""
    model, plain = make().to(device()), make().to(device())
    wrapped = model, answer.wrap(model, mesh(), Block, momentum)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (wrapped, {"sync": "first"}, "first"),
        *((wrapped, {"max_norm": x}, str(x)) for x in (0.0, -0.001, float("nan"))),
        ((plain, momentum(plain.parameters())), {}, ""),
    ]
    for state, options, word in cases:
        model, optimizer = state
        shown = "".join(f"{k}={v!r}" for k, v in options.items())
        _is_refused(
            functools.partial(answer.train_step, model, window(rank, 1), mse, optimizer, **options),
            state,
            [word],
            when=f"where {shown or 'the model is not sharded'}",
            cause=f"{shown} is taken for something else" if shown else "nobody looks whether it is",
        )


def _is_refused(call: Any, state: Any, words: Any = (), *, when: str, cause: str) -> None:
    before = local_state(*state)
    check_raises(call, ValueError, mentions=words, when=when, cause=cause)
    cause = "the work has begun before everything was checked, on every rank"
    check_untouched(before, *state, call="the refused call", cause=cause, clause=ERRORS)
