"""The account against formulas: bytes by kind on 8 and 1,024 ranks, real and dry."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch

from kit.laws import draw
from kit.memory.account import KINDS, Account, account
from kit.memory.ruler import measure
from kit.memory.stack import by_kind, stacked
from kit.ranks.collectives import Collective
from kit.ranks.simulated import dry_run, simulated_world
from selftest.stacks import (
    BLOCKS,
    HIDDEN,
    SAMPLES,
    SHAPES,
    WIDTH,
    Stack,
    World,
    bf16,
    books,
    gathered,
    make_optimizer,
    numel,
    part,
    rounded,
    shard,
    together,
)

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 does not run on the cpu"
)

RANKS = (8, 1024)
WAYS: dict[str, dict[str, Any]] = {
    "each block": {},
    "root only": {"blocks": False},
    "blocks only": {"root": False},
    "kept after forward": {"reshard_after_forward": False},
    "bfloat16": {"mp_policy": "bf16"},
    "checkpointed": {"checkpointed": True},
    "with AdamW": {"sgd": False},
}


@functools.cache
def read(way: str, ranks: int, world: World = simulated_world) -> tuple[Account, list[Collective]]:
    options = dict(WAYS[way])
    if "mp_policy" in options:
        options["mp_policy"] = bf16()
    return books(world, ranks, **options)


@pytest.mark.parametrize("ranks", RANKS)
def test_shards_and_adams_state_are_the_rows_of_a_rank_and_padding(ranks: int) -> None:
    memory, _ = read("with AdamW", ranks)
    assert memory.most["shards"] == memory.before["shards"] == BLOCKS * part(ranks)
    # two moments like the shards of rank 0, and for each parameter its step
    assert memory.before["optimizer state"] == 0
    assert memory.after["optimizer state"] == BLOCKS * (2 * part(ranks) + len(SHAPES) * 512)


def test_the_last_rank_holds_padding_but_has_no_state_of_it() -> None:
    for rank, rows in ((7, (83 - 77, 61 - 56)), (5, (11, 8))):
        with simulated_world(8, rank=rank) as mesh:
            model = shard(Stack(), mesh)
            optimizer = make_optimizer(model)
            x = draw.randn(SAMPLES, WIDTH)

            def step(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
                model(x).sum().backward()
                optimizer.step()

            memory = account(step, model=model, optimizer=optimizer, known=[x])
        hidden, width = rows
        local = (4 * hidden * WIDTH, 4 * hidden, 4 * width * HIDDEN, 4 * width)
        state = 2 * sum(map(rounded, local)) + len(SHAPES) * 512
        assert memory.after["optimizer state"] == BLOCKS * state
        assert memory.after["shards"] == BLOCKS * part(8)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("way", "blocks"),
    [
        ("each block", 1),
        ("checkpointed", 1),
        ("root only", BLOCKS),
        ("blocks only", BLOCKS),  # each is a root, and a root is not given back after forward
        ("kept after forward", BLOCKS),
    ],
)
def test_unsharded_are_the_blocks_gathered_at_a_time(way: str, blocks: int, ranks: int) -> None:
    memory, _ = read(way, ranks)
    assert memory.most["unsharded"] == blocks * gathered(ranks)
    assert memory.before["unsharded"] == memory.after["unsharded"] == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_bfloat16_halves_what_is_gathered_and_leaves_shards_and_their_gradients(ranks: int) -> None:
    memory, _ = read("bfloat16", ranks)
    assert memory.most["unsharded"] == gathered(ranks, size=2)
    assert memory.most["shards"] == BLOCKS * part(ranks)
    # the gradients of each block are reduced into one float32 storage
    assert memory.after["gradients"] == BLOCKS * rounded(4 * together(ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_are_one_whole_block_and_the_shards_of_those_before(ranks: int) -> None:
    reduced = rounded(4 * together(ranks))
    for way, size in (("each block", 4), ("bfloat16", 2)):
        memory, _ = read(way, ranks)
        whole = sum(rounded(size * numel(shape)) for shape in SHAPES)
        assert memory.most["gradients"] == whole + (BLOCKS - 1) * reduced
        assert memory.after["gradients"] == BLOCKS * reduced
    memory, _ = read("root only", ranks)
    assert memory.most["gradients"] == BLOCKS * sum(rounded(4 * numel(shape)) for shape in SHAPES)


@pytest.mark.parametrize("ranks", RANKS)
def test_communication_is_the_buffers_of_two_blocks(ranks: int) -> None:
    buffer = rounded(4 * ranks * together(ranks))
    memory, _ = read("each block", ranks)
    # a block's all-gather begins before the last one's buffer is given back
    assert memory.most["communication"] == 2 * buffer
    memory, _ = read("bfloat16", ranks)
    # the float32 buffer of a reduce-scatter, and of an all-gather the bfloat16 one and its input
    half, cast = rounded(2 * ranks * together(ranks)), rounded(2 * together(ranks))
    assert memory.most["communication"] == buffer + half + cast
    assert memory.before["communication"] == memory.after["communication"] == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_of_a_step(ranks: int) -> None:
    sent = together(ranks)

    def calls(gathers: int, reductions: int, blocks: int, dtype: torch.dtype) -> Any:
        gather = Collective("all_gather", blocks * sent, dtype)
        reduction = Collective("reduce_scatter", blocks * ranks * sent, torch.float32)
        return Counter({gather: gathers, reduction: reductions})

    f32, n = torch.float32, BLOCKS
    assert Counter(read("each block", ranks)[1]) == calls(2 * n, n, 1, f32)
    assert Counter(read("checkpointed", ranks)[1]) == calls(2 * n, n, 1, f32)
    assert Counter(read("kept after forward", ranks)[1]) == calls(n, n, 1, f32)
    assert Counter(read("root only", ranks)[1]) == calls(1, 1, n, f32)
    assert Counter(read("bfloat16", ranks)[1]) == calls(2 * n, n, 1, torch.bfloat16)


def test_activations_are_what_forward_holds_and_checkpoints_lower_them() -> None:
    rows = 4 * SAMPLES
    hidden, width = rounded(rows * HIDDEN), rounded(rows * WIDTH)
    plain, less = (read(way, 8)[0] for way in ("each block", "checkpointed"))
    # of a block the input and output of gelu and the output; and the data
    held = BLOCKS * (2 * hidden + width) + width
    assert held <= plain.most["activations"] <= held + 5 * width  # the loss has transients
    # the outputs and one block anew, its gradients, and the data
    held = BLOCKS * width + 2 * hidden + width
    assert held <= less.most["activations"] <= held + 2 * hidden + 3 * width
    assert less.reading.peak < plain.reading.peak


@pytest.mark.parametrize("way", ["kept after forward", "bfloat16", "checkpointed", "with AdamW"])
def test_a_dry_run_reads_the_same_as_the_simulated_world(way: str) -> None:
    (real, calls), (dry, dry_calls) = read(way, 8), read(way, 8, dry_run)
    assert dry_calls == calls
    # but for the timeline: a real world's points are there also of the fake tensors that count
    # nothing, and fake ones are detached once more when they become parameters
    for field in ("before", "at_peak", "most", "after"):
        assert getattr(dry, field) == getattr(real, field)
    same = dataclasses.replace(dry.reading, timeline=real.reading.timeline)
    assert same == real.reading


@pytest.mark.parametrize("way", WAYS)
def test_the_kinds_sum_to_the_whole(way: str) -> None:
    memory, _ = read(way, 8)
    assert all(tuple(kinds) == KINDS for kinds in (memory.before, memory.at_peak, memory.most))
    assert sum(memory.before.values()) == memory.reading.baseline
    assert sum(memory.at_peak.values()) == memory.reading.peak == memory.peak
    assert sum(memory.after.values()) == memory.reading.baseline + memory.reading.retained
    assert all(memory.at_peak[kind] <= memory.most[kind] for kind in KINDS)


def test_the_whole_is_what_the_ruler_reads_and_repeats_to_the_byte() -> None:
    with simulated_world(8) as mesh:
        model = shard(Stack(), mesh)
        optimizer = make_optimizer(model)
        x = draw.randn(SAMPLES, WIDTH)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        first, *others = (
            account(step, model=model, optimizer=optimizer, known=[x]) for _ in range(4)
        )
        assert all(other == first for other in others)
        assert measure(step, known=[model, optimizer, x]) == first.reading


def test_a_device_without_a_ruler_is_refused_by_name() -> None:
    model = Stack()
    with pytest.raises(ValueError, match="meta"):
        account(lambda: None, "meta", model=model, optimizer=make_optimizer(model))


def test_changes_add_up_to_the_peak_and_tell_what_waits_for_backward():
    """Activations: made in a forward pass, freed in a backward pass; transients are not."""
    from torch.nn import Linear, Sigmoid

    model = torch.nn.Sequential(Linear(64, 256), Sigmoid(), Linear(256, 8))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(128, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    books = account(step, model=model, optimizer=optimizer, known=[x])
    now, most, waiting = 0, 0, 0
    for point in sorted({change.point for change in books.changes}):
        here = [change for change in books.changes if change.point == point]
        now += sum(change.delta for change in here)
        most = max(most, now)
        waiting = max(waiting, sum(c.delta for c in books.changes if c.waits and c.point <= point))
    assert most == books.peak == sum(by_kind(books).values())
    assert by_kind(books)["data"] == 128 * 64 * 4
    assert now == sum(books.after.values())
    # what Sigmoid returns is saved for backward, what it takes is not; square saves the output
    assert waiting == (256 + 8) * 128 * 4 == max(row["activations"] for row in stacked(books))
