"""One rank of many, simulated in this process: what a step holds and calls."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kit.laws.checks import SpecFailure, check, check_bar, check_equal
from kit.laws.toys import mse
from kit.memory.account import Account, account
from kit.memory.ruler import bytes_of, measure
from kit.ranks.collectives import Collective, collectives
from kit.ranks.shapes import Shape
from kit.ranks.shards import part, rounded, shard_bytes, units, whole_bytes
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import data
from specs.fsdp_wrap.cases import Still, adamw
from specs.fsdp_wrap.shapes import (
    CLASSES,
    COLUMNS,
    ROWS,
    TALL_BLOCKS,
    WIDE,
    WIDE_BLOCKS,
    classes,
    narrow,
    wide,
)

SAMPLES = 4
BY_HAND, ADAM, STEPS = ("by hand",) * 2, ("adam",) * 2, ("step",) * 2
MakeShape = Callable[[], Shape]


class Books(NamedTuple):
    """What a rank held, and what it called."""

    memory: Account
    calls: Counter[Collective]


@functools.cache
def books(
    answer: Any,
    device: torch.device,
    ranks: int = 8,
    rank: int = 0,
    shape: MakeShape = wide,
    script: Sequence[str] = BY_HAND,
    samples: tuple[int, ...] = (SAMPLES,),
    sync: str = "each",
    **options: Any,
) -> Books:
    """Of the last entry of a script, on `rank` of `ranks`; the entries before make what stays.

    by hand  a forward and a backward
    adam     the same, and a step of AdamW
    look     a forward under no_grad
    step     train_step; with sync="last" the last micro-batch is the first again
    """
    with simulated_world(ranks, device, rank=rank) as mesh:
        model, kinds = shape()
        model.to(device)
        optimizer = answer.wrap(model, mesh, kinds, adamw if "adam" in script else Still, **options)
        window = [(x.to(device), y.to(device)) for x, y in data(samples, seed=0)]
        if sync == "last":
            window[-1] = window[0]
        inputs, targets = window[0]

        def play(thing: str, count: int = len(window)) -> None:
            if thing == "step":
                answer.train_step(model, window[:count], loss, optimizer, sync=sync, max_norm=1.0)
            elif thing == "look":
                with torch.no_grad():
                    model(inputs)
            else:
                loss(model(inputs), targets).backward()
            if thing == "adam":
                optimizer.step()

        for thing in script[:-1]:
            play(thing, 1)
        if script[-1] != "step":
            optimizer.zero_grad()
        last = functools.partial(play, script[-1])
        with collectives() as calls:
            known = [tensor for batch in window for tensor in batch]
            memory = account(last, device, model=model, optimizer=optimizer, known=known)
        return Books(memory, Counter(calls))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """For many classes a sum, as its gradient takes no memory."""
    return output.sum(1).mean() if output.shape[-1] == CLASSES else mse(output, targets)


def left_by_wrap(answer: Any, device: torch.device) -> int:
    """Bytes of `wide` that are still alive after rank 0 of 8 has wrapped it."""
    held: list[Any] = []
    with simulated_world(8, device) as mesh:
        model, kinds = wide()
        model.to(device)
        before = bytes_of(model)
        wrap = functools.partial(answer.wrap, model, mesh, kinds, torch.optim.Adagrad)
        return before + measure(lambda: held.append(wrap()), device, known=[model]).retained


def planned(
    shape: MakeShape, ranks: int, options: dict[str, Any], reductions: int = 1, passes: int = 1
) -> Counter[Collective]:
    """A gather sends a rank's part of a unit, padding included; a reduction sends the unit's whole
    gradients, `ranks` times as much. Frozen parameters have none.
    """
    gathers = 1 if options.get("reshard_after_forward") is False else 2
    dtype = options.get("dtype", torch.float32)
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


def check_calls(
    answer: Any,
    device: torch.device,
    what: str,
    shape: MakeShape = wide,
    **options: Any,
) -> None:
    """Fail unless a step on 8 ranks makes the calls that follow from its options."""
    __tracebackhide__ = True
    got = books(answer, device, shape=shape, **options).calls
    want = planned(shape, 8, options)
    expected = f"{_counted(want)} in {what}, with {show(want - got)}"
    instead = f"{_counted(got)}, with {show(got - want)} instead"
    check(got == want, expected=expected, got=instead, cause=_cause(got, want))


def kinds(calls: Counter[Collective]) -> Counter[str]:
    return Counter(call.kind for call in calls.elements())


def _counted(calls: Counter[Collective]) -> str:
    found = kinds(calls)
    return f"{found['all_gather']} gathers and {found['reduce_scatter']} reductions"


def _cause(got: Counter[Collective], want: Counter[Collective]) -> str:
    gathers, reductions = (
        kinds(got)[kind] - kinds(want)[kind] for kind in ("all_gather", "reduce_scatter")
    )
    # A block is gathered twice; unless blocks are kept, what is gathered once is the root.
    once = {c for c, n in want.items() if n == 1 and c.kind == "all_gather"}
    roots = once if any(n > 1 for n in want.values()) else set()
    mine, true = (sorted((c.kind, c.numel) for c in calls.elements()) for calls in (got, want))
    if mine == true:
        return "the units are right, but they gather or reduce in another dtype"
    if reductions < 0:
        return "there are too few units: a block is no unit"
    if reductions > 0:
        return "there are too many units, or a frozen one is reduced, or reductions are repeated"
    if gathers == 1 and got - want and {*(got - want)} <= roots:
        return "the root is gathered twice: it is freed after forward, and needed again at once"
    if gathers > 0:
        return "a unit is freed although it is needed again"
    if gathers < 0:
        return "a block is not freed after forward, or was never sharded"
    return "the units hold other parameters, or shards are not by rows"


def show(calls: Counter[Collective]) -> str:
    parts = [
        f"{n} {call.kind} of {call.numel} {str(call.dtype).removeprefix('torch.')}"
        for call, n in sorted(calls.items(), key=str)
    ]
    return ", ".join(parts) or "nothing"


def check_calls_of_steps(
    answer: Any, device: torch.device, ranks: int, shape: MakeShape, **options: Any
) -> None:
    """Fail unless each micro-batch gathers each unit as a step of wrap does, and reduces it, or
    only the last one does with sync="last"; or if other calls send more than a few numbers.
    """
    __tracebackhide__ = True
    got = books(answer, device, ranks, shape=shape, script=STEPS, **options).calls
    count = len(options["samples"])
    times = 1 if options.get("sync") == "last" else count
    want = planned(shape, ranks, options, reductions=times, passes=count)
    limit = 64 + 4 * len([*shape()[0].parameters()])
    large = {c: n for c, n in (got - want).items() if c.numel * c.dtype.itemsize > limit}
    lacking, more = want - got, Counter(large)
    is_reduction = "reduce_scatter" in kinds(lacking + more)
    if is_reduction and more:
        cause = "a micro-batch reduces that should not"
    elif is_reduction:
        cause = "a micro-batch that should reduce does not"
    elif lacking:
        cause = "a unit, perhaps the root, stays gathered for the next micro-batch"
    else:
        cause = "a unit is gathered once too often; or gradients are sent for the norm"
    if lacking or more:
        raise SpecFailure(
            f"in {count} micro-batches {show(want)}, and other calls of at most {limit} bytes",
            f"{show(lacking)} missing, and {show(more)} too much",
            cause,
            sure=True,
            clause="" if is_reduction else 3,  # of train_step
        )


def check_whole(
    yours: Account,
    theirs: Account,
    shape: MakeShape,
    ranks: int,
    where: str,
    cause: str = "blocks are not freed after forward, or a unit is more than one block",
) -> None:
    """Fail if more is gathered at a time than two blocks and the root's unit."""
    __tracebackhide__ = True
    *blocks, root = (whole_bytes(unit, ranks) for unit in units(*shape()))
    check_bar(
        f"gathered parameters {where}",
        yours.most["unsharded"],
        sum(sorted(blocks)[-2:]) + root,
        plain=sum(blocks) + root,
        reference=theirs.most["unsharded"],
        formula="two blocks + the root's unit",
        cause=cause,
    )


def check_buffers(yours: Account, theirs: Account, where: str) -> None:
    """Fail if buffers hold more than one block that is gathered and one that is reduced."""
    __tracebackhide__ = True
    check_bar(
        f"buffers to gather and to reduce {where}",
        yours.most["communication"],
        1.25 * theirs.most["communication"],
        plain=None,
        reference=theirs.most["communication"],
        formula="one block gathered ahead, and one reduced: 1.25 x the reference's",
        cause="more than one block is gathered ahead, or being reduced",
    )


def check_forward_alone(answer: Any, device: torch.device, **options: Any) -> None:
    """Fail if a forward under no_grad leaves anything gathered."""
    __tracebackhide__ = True
    got = books(answer, device, script=("by hand", "look"), **options).memory.after["unsharded"]
    *blocks, root = (whole_bytes(unit, 8) for unit in units(*wide()))
    left = {
        "the root stays: no backward comes that would free it": root,
        "all units but the root stay: reshard() frees one unit": sum(blocks),
        "all units stay: no backward comes that would free them": sum(blocks) + root,
    }
    what = "gathered bytes after a forward under no_grad"
    check_equal(got, 0, what, cause="some unit is not freed", suspects=left)


def check_held(answer: Any, reference: Any, device: torch.device, sync: str) -> None:
    """Fail if more whole gradients, whole parameters or activations are held than this sync needs:
    3 micro-batches have the activations of 1, the data of 2 more, and 8 numbers of each.

    An output that is kept while the next one is computed is more: 200 x 400 are 313 KiB.
    """
    __tracebackhide__ = True
    parts = shard_bytes(narrow()[0].parameters(), 64)
    whole = [whole_bytes(unit, 1) for unit in units(*narrow())]
    of_whole = 2 * max(whole) if sync == "each" else sum(whole) + max(whole)
    options: dict[str, Any] = {"script": STEPS, "sync": sync}
    yours, theirs = (
        books(module, device, 64, shape=narrow, samples=(4, 3, 5), **options).memory
        for module in (answer, reference)
    )
    check_bar(
        f"gradients at their most on rank 0 of 64, sync={sync!r}",
        yours.most["gradients"],
        parts + of_whole,
        plain=parts + (1 + (sync == "last")) * sum(whole),
        reference=theirs.most["gradients"],
        formula="shards + the whole gradients of "
        + ("two blocks" if sync == "each" else "the model and one more block"),
        cause="whole gradients are held beyond the backward pass of their unit"
        if sync == "each"
        else "there are two sets of whole gradients",
    )
    where = f"on 64 ranks, 3 micro-batches, sync={sync!r}"
    cause = "blocks stay gathered for the next micro-batch"
    check_whole(yours, theirs, narrow, 64, where, cause)

    def most(module: Any, count: int) -> int:
        memory = books(module, device, shape=classes, samples=(200,) * count, **options).memory
        return memory.most["activations"]

    one, mine, true = most(answer, 1), most(answer, 3), most(reference, 3)
    data_of_one = sum(rounded(4 * 200 * size) for size in (5, 3))
    check_bar(
        "activations at their most, 3 micro-batches",
        mine,
        one + 2 * (data_of_one + 8 * 512),
        plain=3 * one,
        reference=true,
        formula="those of 1 micro-batch + the data of 2 + 8 numbers of each",
        cause="graphs or outputs are kept while the next micro-batch runs",
    )


def activations_of_tall() -> int:
    """What forward keeps of `tall`: in each block its input and relu's output. In backward also
    the gradients of both, and of relu's input. The root has as much as a block.
    """
    row, hidden = rounded(4 * SAMPLES * COLUMNS), rounded(4 * SAMPLES * ROWS)
    return (TALL_BLOCKS + 1) * (row + hidden) + 2 * hidden + row


def activations_of_wide(samples: int, itemsize: int) -> int:
    """What forward keeps of `wide`: in each block its input, the norm's output with two numbers a
    sample, and tanh's output. Backward and the loss take as much as one more block.
    """
    row, hidden = itemsize * samples * WIDE, itemsize * samples * (3 * WIDE + 1)
    block = 2 * rounded(row) + rounded(hidden) + 2 * rounded(4 * samples)
    return WIDE_BLOCKS * block + 2 * rounded(row) + 2 * rounded(hidden) + 6 * rounded(20 * samples)
