"""What a rank holds while a model is built, saved and loaded."""

from __future__ import annotations

import functools
from itertools import product

import pytest

from kit.laws.checks import check_bar
from kit.ranks.simulated import simulated_world
from specs.fsdp_wrap import ranks_build, ranks_checkpoint
from specs.fsdp_wrap.models import (
    Model,
    rounded,
    shard_bytes,
    units,
    whole_bytes,
)

# Wide enough that rounding to 512 bytes is little of it; two real ranks need more blocks.
WIDTH, BLOCKS, BLOCKS_OF_TWO = 48, 4, 6


class TestPart4Build:
    subject = "build"

    @pytest.mark.saves
    @pytest.mark.parametrize("ranks", [8, 64])
    def test_no_rank_ever_holds_the_model(self, answer, reference, device, ranks):
        """Bytes while it is built <= shards + buffers + what two units have, rounding included."""

        def peak(module: object) -> int:
            with simulated_world(ranks, device) as mesh:
                return ranks_build.peak_of_build(module, mesh, WIDTH, BLOCKS, device)

        _check_peak(peak(answer), peak(reference), ranks, BLOCKS)

    @pytest.mark.saves
    def test_no_rank_of_two_ever_holds_the_model(self, answer, reference, world):
        """The same on two real ranks, of which neither gets anything from the other."""
        yours, theirs = (
            world.run(module, ranks_build.peak, WIDTH, BLOCKS_OF_TWO)
            for module in (answer, reference)
        )
        for mine, other in zip(yours, theirs, strict=True):
            _check_peak(mine, other, 2, BLOCKS_OF_TWO)

    @pytest.mark.saves
    def test_a_rank_has_to_do_with_its_own_part_only(self, answer, reference, world, tmp_path):
        """Bytes above the baseline, on a rank of 2:

        save, load  <= its weights and Adam's two moments once more + two whole parameters
        save_whole  <= 3 x the largest parameter on rank 1: itself, and twice to gather it
        """
        parameters = list(_model(blocks=2).parameters())
        largest = max(whole_bytes([p], 2) for p in parameters)
        yours, theirs = (
            world.run(module, ranks_checkpoint.peaks, tmp_path / name, WIDTH, 2)
            for name, module in (("yours", answer), ("theirs", reference))
        )
        for call, rank in product(("save", "load"), range(2)):
            check_bar(
                f"{call}, above the baseline on rank {rank} of 2",
                yours[rank][call],
                3 * shard_bytes(parameters, 2) + 2 * largest,
                plain=3 * shard_bytes(parameters, 1),
                reference=theirs[rank][call],
                formula="its weights and moments + two whole parameters; plain is the whole model",
                cause="a rank gathers, or reads, what belongs to other ranks",
            )
        check_bar(
            "save_whole, above the baseline on rank 1 of 2",
            yours[1]["save_whole"],
            3 * largest,
            plain=shard_bytes(parameters, 1),
            reference=theirs[1]["save_whole"],
            formula="3 x the largest parameter; plain is the whole model",
            cause="every rank gathers the whole model for itself",
        )


@functools.cache
def _model(blocks: int) -> Model:
    return Model(WIDTH, blocks)


def _check_peak(yours: int, theirs: int, ranks: int, blocks: int) -> None:
    __tracebackhide__ = True
    parameters = list(_model(blocks).parameters())
    largest = sorted(whole_bytes(unit, ranks) for unit in units(_model(blocks)))[-2:]
    buffers = sum(rounded(b.numel() * b.element_size()) for b in _model(blocks).buffers())
    check_bar(
        f"build, above the baseline on a rank of {ranks}",
        yours,
        shard_bytes(parameters, ranks) + buffers + sum(largest),
        plain=shard_bytes(parameters, 1) + buffers,
        reference=theirs,
        formula="shards + buffers + two blocks",
        cause="the whole model is there before it is sharded, or all of it is initialised at once",
    )
