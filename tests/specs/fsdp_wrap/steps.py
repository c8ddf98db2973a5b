"""What rank 0 of many holds and calls in a train_step, for the specs of bytes and calls."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws.checks import SpecFailure, check_bar, check_equal, fail
from kit.laws.toys import mse
from kit.memory.account import Account, account
from kit.memory.ruler import human
from kit.ranks.collectives import Collective, collectives
from kit.ranks.shards import rounded, shard_bytes, units, whole_bytes
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import Block, data, make
from specs.fsdp_wrap.cases import CHECKPOINT, KEPT, Still
from specs.fsdp_wrap.simulated import check_whole, planned, show

WIDTH, BLOCKS = 40, 3
WRAPPED: dict[str, dict[str, Any]] = {"": {}, "checkpoint": CHECKPOINT, "kept": KEPT}


@functools.cache
def second_step(
    answer: Any,
    device: torch.device,
    ranks: int,
    samples: tuple[int, ...] = (4, 3, 5),
    *,
    width: int = WIDTH,
    blocks: int = BLOCKS,
    wrapped: str = "",
    classes: int = 0,
    again: bool = False,
    **options: Any,
) -> tuple[Account, list[Collective]]:
    """What rank 0 holds and calls in the second step, one of these micro-batches, or `again` with
    the first one for the last; `wrapped` with the options WRAPPED of that name.

    With `classes` the output is as wide, and the loss a sum, whose gradient takes no memory.
    """
    with simulated_world(ranks, device) as mesh:
        model = make(width, blocks).to(device)
        if classes:
            model.head = nn.Linear(width, classes).to(device)
        optimizer = answer.wrap(model, mesh, Block, Still, **WRAPPED[wrapped])
        window = [(x.to(device), y.to(device)) for x, y in data(samples, seed=0)]
        if again:
            window[-1] = window[0]

        def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
            return output.sum(1).mean() if classes else mse(output, targets)

        def step(count: int = len(window)) -> None:
            answer.train_step(model, window[:count], loss_fn, optimizer, **options)

        step(1)  # the first one makes what stays
        with collectives() as calls:
            return account(step, device, model=model, optimizer=optimizer), calls


def check_reductions(
    answer: Any,
    device: torch.device,
    ranks: int,
    sync: str,
    samples: tuple[int, ...] = (4, 3, 5),
    blocks: int = BLOCKS,
    wrapped: str = "",
) -> None:
    """Fail unless each unit is reduced for each micro-batch, or once with sync="last", and gathered
    as in a step of wrap for each; the rest is little. The last micro-batch may be the first again.
    """
    __tracebackhide__ = True
    options = {"sync": sync, "blocks": blocks, "wrapped": wrapped, "again": sync == "last"}
    got = Counter(second_step(answer, device, ranks, samples, max_norm=1.0, **options)[1])
    shape, gathers = lambda: (make(WIDTH, blocks), Block), 1 if wrapped == "kept" else 2
    count = len(samples)
    times = count if sync == "each" else 1
    want = planned(shape, ranks, gathers, reductions=times, passes=count)
    mine, true = (
        Counter({call: n for call, n in found.items() if call.kind == "reduce_scatter"})
        for found in (got, want)
    )
    cause = "micro-batches whose gradients are not wanted yet are reduced"
    if mine.total() < true.total():
        cause = "a backward pass that should reduce gradients does not"
    check_equal(show(mine), show(true), "reductions by size", cause=cause)
    if lacking := want - got:
        raise SpecFailure(
            f"in {count} micro-batches calls of {show(want)}",
            f"without {show(lacking)}",
            "a unit, that of the root perhaps, stays gathered for the next micro-batch",
            clause=6,  # of train_step
        )
    limit = 64 + 4 * len([*make(WIDTH, blocks).parameters()])
    for call in got - want:
        size = call.numel * call.dtype.itemsize
        if size > limit:
            units = f"{gathers} gathers of each block, 1 of the root, and else at most {limit} B"
            cause = (
                "a unit is gathered once too often"
                if call in want
                else "no unit has that size: gradients are sent, or more numbers than a norm needs"
            )
            more = f"one more {call.kind} of {human(size)}"
            fail(expected=units, got=more, cause=cause, sure=True)


def check_held(answer: Any, reference: Any, device: torch.device, sync: str) -> None:
    """Fail if more whole gradients, or whole parameters, are held than this sync needs."""
    __tracebackhide__ = True
    model = make(WIDTH, BLOCKS)
    *blocks, root = (whole_bytes(unit, 64) for unit in units(model, Block))
    whole = [whole_bytes(unit, 1) for unit in units(model, Block)]
    of_whole = 2 * max(whole) if sync == "each" else sum(whole) + max(whole)
    yours, theirs = (
        second_step(module, device, 64, sync=sync, max_norm=1.0)[0]
        for module in (answer, reference)
    )
    check_bar(
        f"gradients at their most on rank 0 of 64, sync={sync!r}",
        yours.most["gradients"],
        shard_bytes(model.parameters(), 64) + of_whole,
        plain=shard_bytes(model.parameters(), 64) + (1 + (sync == "last")) * sum(whole),
        reference=theirs.most["gradients"],
        formula="shards + the whole gradients of "
        + ("two blocks" if sync == "each" else "the model and one more block"),
        cause="whole gradients are held beyond the backward pass of their unit"
        if sync == "each"
        else "there is a second set of whole gradients",
    )
    where = f"on 64 ranks, 3 micro-batches, sync={sync!r}"
    cause = "blocks stay gathered for the next micro-batch"
    check_whole(yours, theirs, blocks, root, where, cause=cause)


def check_activations(answer: Any, reference: Any, device: torch.device, sync: str) -> None:
    """Those of 3 micro-batches are those of 1, the data of 2 more, and 8 numbers of each.

    An output that is kept, until the next one is there too, is more: 200 x 400 are 313 KiB.
    """
    __tracebackhide__ = True

    def most(module: Any, count: int) -> int:
        options = {"blocks": 1, "classes": 400, "sync": sync}
        return second_step(module, device, 8, (200,) * count, **options)[0].most["activations"]

    one, yours, theirs = most(answer, 1), most(answer, 3), most(reference, 3)
    data_of_one = sum(rounded(4 * 200 * size) for size in (5, 3))
    check_bar(
        "activations at their most, 3 micro-batches",
        yours,
        one + 2 * (data_of_one + 8 * 512),
        plain=3 * one,
        reference=theirs,
        formula="those of 1 micro-batch + the data of 2 + 8 numbers of each",
        cause="graphs or outputs are kept while the next micro-batch runs",
    )
