"""One rank of many in this process: what a step holds and calls, for the specs of wrap."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from kit.laws.checks import check, check_bar, check_equal
from kit.laws.toys import mse
from kit.memory.account import Account, account
from kit.memory.ruler import bytes_of, measure
from kit.ranks.collectives import Collective, collectives
from kit.ranks.shapes import Shape
from kit.ranks.shards import part, rounded, units, whole_bytes
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import data
from specs.fsdp_wrap.cases import adamw
from specs.fsdp_wrap.shapes import (
    COLUMNS,
    ROWS,
    TALL_BLOCKS,
    WIDE,
    WIDE_BLOCKS,
    wide,
)


class Books(NamedTuple):
    """The second step of a rank: the first one makes what stays."""

    memory: Account
    calls: Counter[Collective]


SAMPLES = 4


@functools.cache
def books(
    answer: Any,
    device: torch.device,
    ranks: int = 8,
    rank: int = 0,
    *,
    shape: Callable[[], Shape] = wide,
    samples: int = SAMPLES,
    forward_only: bool = False,
    adam: bool = False,
    looked: bool = False,
    train: bool = True,
    **options: Any,
) -> Books:
    """A forward and a backward of `rank` of `ranks`, with a step of Adam where that is counted, or
    a forward under no_grad after them, or one `looked` before; measured once for all specs.
    """
    with simulated_world(ranks, device, rank=rank) as mesh:
        model, kinds = shape()
        model.to(device).train(train)
        optimizer = answer.wrap(model, mesh, kinds, adamw, **options)
        (batch,) = data([samples], seed=0)
        inputs, targets = (tensor.to(device) for tensor in batch)

        def step() -> None:
            mse(model(inputs), targets).backward()
            if adam:
                optimizer.step()

        @torch.no_grad()
        def look() -> None:
            model(inputs)

        step()
        if looked:
            look()
        optimizer.zero_grad()
        with collectives() as calls:
            memory = account(
                look if forward_only else step,
                device,
                model=model,
                optimizer=optimizer,
                known=[inputs, targets],
            )
        return Books(memory, Counter(calls))


def left_by_wrap(answer: Any, device: torch.device) -> int:
    """Bytes of `wide` that live on when rank 0 of 8 has wrapped it."""
    held: list[Any] = []
    with simulated_world(8, device) as mesh:
        model, kinds = wide()
        model.to(device)
        before = bytes_of(model)
        wrap = functools.partial(answer.wrap, model, mesh, kinds, adamw)
        return before + measure(lambda: held.append(wrap()), device, known=[model]).retained


def check_step(
    answer: Any,
    device: torch.device,
    shape: Callable[[], Shape],
    what: str,
    ranks: int = 8,
    rank: int = 0,
    **options: Any,
) -> Account:
    """Fail unless a step makes the calls that follow from its options; what it has held."""
    __tracebackhide__ = True
    memory, calls = books(answer, device, ranks, rank, shape=shape, **options)
    is_kept = not options.get("reshard_after_forward", True)
    dtype = options.get("dtype", torch.float32)
    if options.get("forward_only"):
        want = planned(shape, ranks, 1, dtype, reductions=0)
    else:
        want = planned(shape, ranks, 1 if is_kept else 2, dtype)
    check_calls(calls, want, what=what)
    return memory


def check_calls(got: Counter[Collective], want: Counter[Collective], *, what: str) -> None:
    """Fail unless a step makes these collective calls, in any order."""
    __tracebackhide__ = True
    kinds = ("all_gather", "reduce_scatter")
    other = sorted({call.kind for call in got} - set(kinds))
    counts = [sum(n for call, n in got.items() if call.kind == kind) for kind in kinds]
    wanted = [sum(n for call, n in want.items() if call.kind == kind) for kind in kinds]
    check(
        not other and counts == wanted,
        expected=f"{wanted[0]} gathers and {wanted[1]} reductions in {what}",
        got=f"{counts[0]} and {counts[1]}" + (f", and {' and '.join(other)}" if other else ""),
        cause=_cause(got, want, [a - b for a, b in zip(counts, wanted, strict=True)]),
    )
    is_only_dtype = _sizes(got) == _sizes(want)
    check(
        got == want,
        expected=f"in {what} calls of {show(want - got)}",
        got=f"of {show(got - want)} instead",
        cause="the units are the right ones: what they gather or reduce has another dtype"
        if is_only_dtype
        else "the units are others, some with parameters of another; or shards are not by rows",
    )


def _sizes(calls: Counter[Collective]) -> list[tuple[str, int]]:
    """Of each call what it is and of how much, whatever the dtype."""
    return sorted((call.kind, call.numel) for call in calls.elements())


def _cause(got: Counter[Collective], want: Counter[Collective], more: list[int]) -> str:
    """`more`: by how many gathers and reductions there are too many."""
    gathers, reductions = more
    # A block is gathered twice, unless blocks are kept: then nothing tells the root from them.
    once = {c for c, n in want.items() if n == 1 and c.kind == "all_gather"}
    roots = once if any(n > 1 for n in want.values()) else set()
    if reductions < 0:
        return "there are too few units: a block is no unit of its own"
    if reductions > 0:
        return "there are too many units, or a frozen one is reduced, or reductions are repeated"
    if gathers == 1 and got - want and {*(got - want)} <= roots:
        return "the root's unit is gathered twice: it is given back after forward, and needed again"
    if gathers > 0:
        return (
            "a unit is given back that is needed again, or is gathered only to be looked at, or "
            "ahead by the order of another pass"
        )
    lacking = want - got
    if lacking.total() == 1 and {*lacking} <= once:
        return (
            "a unit that is gathered once was whole already: from a pass before, without backward"
        )
    return "a block is not given back after forward"


def show(calls: Counter[Collective]) -> str:
    parts = [
        f"{n} {call.kind} of {call.numel} {str(call.dtype).removeprefix('torch.')}"
        for call, n in sorted(calls.items(), key=str)
    ]
    return ", ".join(parts) or "nothing"


def planned(
    shape: Callable[[], Shape],
    ranks: int,
    gathers: int = 2,
    dtype: torch.dtype = torch.float32,
    reductions: int = 1,
    passes: int = 1,
) -> Counter[Collective]:
    """The calls of a step. A rank sends its part of a unit to gather it, in each pass, padding
    included, and its whole gradients to reduce them: ranks times as much. What is frozen has none.
    """
    *blocks, root = units(*shape())
    plan = Counter[Collective]()
    for unit, times in [*((block, gathers) for block in blocks), (root, 1)]:
        if unit:
            plan[Collective("all_gather", _parts(unit, ranks), dtype)] += times * passes
        if trained := [p for p in unit if p.requires_grad]:
            numel = ranks * _parts(trained, ranks)
            plan[Collective("reduce_scatter", numel, torch.float32)] += reductions
    return +plan


def _parts(parameters: list[nn.Parameter], ranks: int) -> int:
    return sum(part(p, ranks) for p in parameters)


def check_whole(
    yours: Account,
    theirs: Account,
    blocks: list[int],
    root: int,
    where: str,
    reshard: bool = True,
    cause: str = "blocks are not given back after forward, or a unit is more than one block",
) -> None:
    """Fail if more is gathered at a time than two blocks and the root's unit."""
    __tracebackhide__ = True
    check_bar(
        f"gathered parameters {where}",
        yours.most["unsharded"],
        (sum(sorted(blocks)[-2:]) if reshard else sum(blocks)) + root,
        plain=sum(blocks) + root if reshard else None,
        reference=theirs.most["unsharded"],
        formula="two blocks + the root's unit" if reshard else "the whole model",
        cause=cause,
    )


def activations_of_tall() -> int:
    """What forward holds of `tall`, in each block its input and relu's result; in backward the
    gradients of both, and of relu's input; what is in the root is as much as a block.
    """
    row, hidden = rounded(4 * SAMPLES * COLUMNS), rounded(4 * SAMPLES * ROWS)
    return (TALL_BLOCKS + 1) * (row + hidden) + 2 * hidden + row


def activations_of_wide(samples: int, itemsize: int) -> int:
    """What forward holds of `wide`, in each block its input, what its norm returns with two
    numbers a sample, and tanh's result; and as much as one more block in backward and the loss.
    """
    row, hidden = itemsize * samples * WIDE, itemsize * samples * (3 * WIDE + 1)
    block = 2 * rounded(row) + rounded(hidden) + 2 * rounded(4 * samples)
    return WIDE_BLOCKS * block + 2 * rounded(row) + 2 * rounded(hidden) + 6 * rounded(20 * samples)


def check_forward_alone(
    answer: Any, reference: Any, device: torch.device, shape: Any, options: dict[str, Any]
) -> None:
    """Under no_grad n + 1 gathers; two blocks and the root's unit at most, and then none. With
    reshard_after_forward=False the whole model at most.
    """
    __tracebackhide__ = True
    dtype, is_kept = options.get("dtype", torch.float32), "reshard_after_forward" in options
    what = "a forward under no_grad"
    yours, theirs = (
        check_step(module, device, shape, what, forward_only=True, **options)
        for module in (answer, reference)
    )
    *blocks, root = (whole_bytes(unit, 8, dtype.itemsize) for unit in units(*shape()))
    check_whole(yours, theirs, blocks, root, f"in {what}", not is_kept)
    cause = "no backward comes that would give it back: the root's unit, or all of them"
    check_equal(yours.after["unsharded"], 0, f"gathered bytes after {what}", cause=cause)
