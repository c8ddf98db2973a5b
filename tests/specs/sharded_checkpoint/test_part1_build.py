"""A model that no rank could hold: its values, its units, and its bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from kit.laws.checks import check_bar
from kit.laws.scenarios import once
from kit.memory.ruler import measure
from kit.ranks.shapes import Deep
from kit.ranks.shards import rounded, shard_bytes, units, whole_bytes
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import Block
from specs.sharded_checkpoint import ranks_build as ranks
from specs.sharded_checkpoint.models import BLOCK_TYPES, momentum


def _in_each_other(width: int = 48) -> nn.Module:  # rounding to 512 bytes is little of it
    """Seven blocks, each inside of another; and three of other widths beside them."""
    model = Deep(width)
    for _ in range(2):
        around = Deep(width)
        around.outer[0].inner, model = model, around
    return nn.Sequential(model, *(Block(width - n) for n in (6, 4, 2)))


class TestPart1Build:
    @pytest.mark.works("build", "values")
    @pytest.mark.parametrize("world", [3], indirect=True, ids=["3_ranks"])
    def test_has_the_values_of_one_process(self, answer, world):
        """To the bit: the numbers that one process draws, module by module, in its order."""
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.VALUES)

    @pytest.mark.exact("build", "units")
    def test_every_block_is_a_unit_and_the_model_has_the_rest(self, answer, worlds):
        """On one rank too, where nothing is to be gathered."""
        for size in (2, 1):
            worlds(size).run(answer, ranks.built_has, ranks.Tricky, ranks.UNITS)

    @pytest.mark.exact("build", "optimizer")
    def test_the_optimizer_has_each_shard_once(self, answer, world):
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.HELD)

    @pytest.mark.exact("build", "make_model")
    def test_makes_the_model_once_under_meta(self, answer, world):
        """Of one class of blocks. Then an ordinary tensor is made once more, after `build`."""
        world.run(answer, ranks.built_once)

    @pytest.mark.saves("build", "memory")
    def test_no_rank_of_eight_ever_holds_the_model(self, answer, reference, device):
        """Bytes while it is built <= shards + buffers + what two units have, rounding included."""

        def peak(module: Any) -> int:
            with simulated_world(8, device) as mesh:
                arguments = _in_each_other, mesh, BLOCK_TYPES, ranks.init, momentum
                kinds = {"cpu", mesh.device_type}  # the host has no room either
                build = partial(module.build, *arguments)
                return max(measure(build, kind).above_baseline for kind in kinds)

        model = _in_each_other()
        parameters = [*model.parameters()]
        largest = sorted(whole_bytes(unit, 8) for unit in units(model, BLOCK_TYPES))[-2:]
        buffers = sum(rounded(b.numel() * b.element_size()) for b in model.buffers())
        check_bar(
            "build, above the baseline on a rank of 8",
            peak(answer),
            shard_bytes(parameters, 8) + buffers + sum(largest),
            plain=shard_bytes(parameters, 1) + buffers,
            reference=once("reference", lambda: peak(reference)),
            formula="shards + buffers + two blocks",
            cause="the whole model is there before it is sharded, or all of it is initialised "
            "at once; or blocks stay whole while those inside of them are made; or something, "
            "such as a memo of ties, still holds what was whole",
        )

    @pytest.mark.survives("build", 1)
    def test_leaves_the_random_stream_where_one_process_does(self, answer, world):
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.STREAM)

    @pytest.mark.survives("build", "together")
    def test_every_rank_raises_where_one_cannot_build(self, answer, world):
        """A function that is given raises on rank 1 of 2."""
        world.run(answer, ranks.build_fails_on_one)

    @pytest.mark.survives("build", 2)
    def test_ties_stay(self, answer, world):
        """And have the values of one process: `init` sets what is tied once for each module."""
        facts = ranks.TIES, ranks.VALUES, ranks.STREAM, ranks.HELD
        world.run(answer, ranks.built_has, ranks.tied, *facts)

    @pytest.mark.survives("build", 3)
    def test_train_mode_and_what_is_frozen_stay(self, answer, world):
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.MODES)
