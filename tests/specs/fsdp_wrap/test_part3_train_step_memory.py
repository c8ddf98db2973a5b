"""What a step of train_step holds and calls, on rank 0 of 8 and of 64 simulated ranks.

Nothing is sent there, so values mean nothing. The optimizer does nothing: gradients and activations
are what is looked at.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from kit.laws.checks import check, check_bar, check_equal
from kit.memory.account import Account, account
from kit.memory.ruler import human
from kit.ranks.collectives import Collective, collectives
from kit.ranks.simulated import simulated_world
from specs.fsdp_wrap.models import (
    Block,
    Model,
    data,
    make,
    mse,
    part,
    rounded,
    shard_bytes,
    units,
    whole_bytes,
)

WIDTH, BLOCKS = 40, 3


class TestPart3TrainStep:
    subject = "train_step"

    @pytest.mark.exact
    @pytest.mark.parametrize(
        ("sync", "ranks", "checkpoint"),
        [("each", 8, False), ("each", 8, True), ("last", 64, False)],
        ids=["each-8", "each-8-checkpoint", "last-64"],
    )
    def test_reduces_every_unit_for_each_micro_batch_or_once(
        self, answer, device, sync, ranks, checkpoint
    ):
        """Reductions: units x 3 with sync="each", units with sync="last".

        Gathers: for each micro-batch two of every block and one of the root. A unit's reduction is
        of N x ceil(rows / N) rows of each of its parameters, a gather of ceil(rows / N).
        """
        options = {"checkpoint": True} if checkpoint else {}
        calls = _second_step(answer, device, ranks, sync=sync, max_norm=1.0, **options)[1]
        sizes = [sum(part(p, ranks) for p in unit) for unit in units(make(WIDTH, BLOCKS))]
        times = 3 if sync == "each" else 1
        want = Counter({ranks * size: times * n for size, n in Counter(sizes).items()})
        got = Counter(call.numel for call in calls if call.kind == "reduce_scatter")
        cause = "micro-batches whose gradients are not wanted yet are reduced"
        if sum(got.values()) < sum(want.values()):
            cause = "a backward pass that should reduce gradients does not"
        check_equal(_shown(got), _shown(want), "reductions by size", cause=cause)
        gathers = Counter(sizes[-1:] * 3) + Counter(sizes[:-1] * 6)
        _check_the_rest(calls, gathers, 64 + 4 * len(list(make(WIDTH, BLOCKS).parameters())))

    @pytest.mark.saves
    @pytest.mark.parametrize(("sync", "ranks"), [("each", 64), ("last", 64)])
    def test_holds_shards_of_gradients_or_one_set_of_whole_ones(
        self, answer, reference, device, sync, ranks
    ):
        """Bytes of gradients with 3 micro-batches, padding and rounding included:

        sync="each"  shards + the whole gradients of two blocks
        sync="last"  shards + the whole gradients of the model, and of a block that are added to
                     those of the micro-batch before
        """
        model = make(WIDTH, BLOCKS)
        whole = [whole_bytes(unit, 1) for unit in units(model)]
        of_whole = 2 * max(whole) if sync == "each" else sum(whole) + max(whole)
        sets = 1 if sync == "each" else 2
        yours, theirs = (
            _second_step(module, device, ranks, sync=sync, max_norm=1.0)[0].most["gradients"]
            for module in (answer, reference)
        )
        check_bar(
            f"gradients at their most on rank 0 of {ranks}, sync={sync!r}",
            yours,
            shard_bytes(model.parameters(), ranks) + of_whole,
            plain=shard_bytes(model.parameters(), ranks) + sets * sum(whole),
            reference=theirs,
            formula="shards + the whole gradients of "
            + ("two blocks" if sync == "each" else "the model and one more block"),
            cause="whole gradients are held beyond the backward pass of their unit"
            if sync == "each"
            else "there is a second set of whole gradients",
        )

    @pytest.mark.saves
    @pytest.mark.parametrize("sync", ["each", "last"])
    def test_two_blocks_and_the_root_are_whole_at_most(self, answer, reference, device, sync):
        """Also from one micro-batch to the next, which would save a gather of every block."""
        *blocks, root = (whole_bytes(unit, 64) for unit in units(make(WIDTH, BLOCKS)))
        yours, theirs = (
            _second_step(module, device, 64, sync=sync, max_norm=1.0)[0].most["unsharded"]
            for module in (answer, reference)
        )
        check_bar(
            f"gathered parameters on 64 ranks, 3 micro-batches, sync={sync!r}",
            yours,
            sum(sorted(blocks)[-2:]) + root,
            plain=sum(blocks) + root,
            reference=theirs,
            formula="two blocks + the root's unit; plain is the whole model",
            cause="blocks stay gathered for the next micro-batch",
        )

    @pytest.mark.saves
    def test_activations_are_those_of_one_micro_batch(self, answer, reference, device):
        """Those of 4 micro-batches are those of 1, the data of 3 more, and 8 numbers of each.

        An output that is kept is more than that: 600 samples x 3 are 7 KiB.
        """

        def most(module: ModuleType, count: int) -> int:
            books = _second_step(module, device, 8, (600,) * count, blocks=2, sync="last")
            return books[0].most["activations"]

        one, yours, theirs = most(answer, 1), most(answer, 4), most(reference, 4)
        data_of_one = sum(rounded(4 * 600 * size) for size in (5, 3))
        check_bar(
            "activations at their most, 4 micro-batches",
            yours,
            one + 3 * (data_of_one + 8 * 512),
            plain=4 * one,
            reference=theirs,
            formula="those of 1 micro-batch + the data of 3 + 8 numbers of each",
            cause="graphs or outputs are kept while the next micro-batch runs",
        )

    @pytest.mark.saves
    def test_a_checkpointed_block_keeps_its_input_only(self, answer, reference, device):
        """With B blocks: the activations of one block without checkpoints + B - 1 inputs of blocks.

        A block keeps, plain, some 9 times its input: x, norm(x), and 3 times as wide tanh(up).
        """
        samples, blocks = 200, 4

        def most(module: ModuleType, blocks: int, checkpoint: bool) -> int:
            books = _second_step(
                module, device, 8, (samples,), blocks=blocks, checkpoint=checkpoint, width=32
            )
            return books[0].most["activations"]

        limit = most(reference, 1, False) + (blocks - 1) * rounded(4 * samples * 32)
        check_bar(
            f"activations at their most, {blocks} blocks, checkpoint=True",
            most(answer, blocks, True),
            1.08 * limit,
            plain=most(reference, blocks, False),
            reference=most(reference, blocks, True),
            formula="1.08 x (one plain block + 3 inputs of blocks)",
            cause="what is inside the blocks is kept, or all blocks are recomputed at once",
        )


@functools.cache
def _second_step(
    answer: Any,
    device: torch.device,
    ranks: int,
    samples: tuple[int, ...] = (4, 3, 5),
    **options: Any,
) -> tuple[Account, list[Collective]]:
    """What rank 0 holds and calls in the second step."""
    with simulated_world(ranks, device) as mesh:
        model, optimizer, step = _step(answer, device, mesh, samples, **options)
        step(1)  # the first one makes what stays
        with collectives() as calls:
            return account(step, device, model=model, optimizer=optimizer), calls


def _step(
    answer: Any,
    device: torch.device,
    mesh: Any,
    samples: Sequence[int] = (4, 3, 5),
    *,
    width: int = WIDTH,
    blocks: int = BLOCKS,
    checkpoint: bool = False,
    **options: Any,
) -> tuple[Model, Any, Any]:
    model = make(width, blocks).to(device)
    optimizer = answer.wrap(model, mesh, Block, _Still, checkpoint=checkpoint)
    window = [(x.to(device), y.to(device)) for x, y in data(samples, seed=0)]

    def step(count: int = len(window)) -> None:
        answer.train_step(model, window[:count], mse, optimizer, **options)

    return model, optimizer, step


class _Still(torch.optim.SGD):
    """Moves nothing: it would take as long as the rest."""

    def step(self, closure: Any = None) -> None:
        pass


def _shown(sizes: Counter[int]) -> str:
    return ", ".join(f"{times} of {size}" for size, times in sorted(sizes.items()))


def _check_the_rest(calls: list[Collective], gathers: Counter[int], limit: int) -> None:
    """At most these gathers, and else only calls of a few numbers."""
    __tracebackhide__ = True
    left = Counter(gathers)
    for call in calls:
        size = call.numel * call.dtype.itemsize
        if call.kind == "all_gather" and left[call.numel] > 0:
            left[call.numel] -= 1
        elif call.kind != "reduce_scatter":
            check(
                size <= limit,
                expected=f"at most {sum(gathers.values())} gathers of units, and else calls of at"
                f" most {limit} B",
                got=f"one more {call.kind} of {human(size)}",
                cause="gradients are sent for the norm, or a unit is gathered once too often",
            )
