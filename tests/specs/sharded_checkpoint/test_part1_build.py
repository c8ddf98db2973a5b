"""A model too large for any rank: its values, its units, and its bytes."""

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
    """Seven nested blocks, and three of other widths beside them."""
    model = Deep(width)
    for _ in range(2):
        around = Deep(width)
        around.outer[0].inner, model = model, around
    return nn.Sequential(model, *(Block(width - n) for n in (6, 4, 2)))


class TestPart1Build:
    @pytest.mark.works("build", "values")
    @pytest.mark.parametrize("world", [3], indirect=True, ids=["3_ranks"])
    def test_has_the_values_of_one_process(self, answer, world):
        """To the bit: the numbers that one process draws, module by module."""
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.VALUES)

    @pytest.mark.exact("build", "units")
    def test_every_block_is_a_unit_and_the_model_has_the_rest(self, answer, world):
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.UNITS)

    @pytest.mark.exact("build", "optimizer")
    def test_the_optimizer_has_each_shard_once(self, answer, world):
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.HELD)

    @pytest.mark.saves("build", "memory")
    def test_no_rank_of_eight_ever_holds_the_model(self, answer, reference, device):
        """Bytes during build <= shards + buffers + two units, rounding included."""

        def peak(module: Any) -> int:
            with simulated_world(8, device) as mesh:
                arguments = _in_each_other, mesh, BLOCK_TYPES, ranks.init, momentum
                kinds = {"cpu", mesh.device_type}  # the host is too small as well
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
            cause="the whole model has memory before it is sharded, or is initialised at once; or "
            "blocks stay unsharded while their inner blocks are initialised; or something, such "
            "as a memo of ties, keeps unsharded parameters alive",
        )

    @pytest.mark.survives("build", "together")
    def test_every_rank_raises_where_one_cannot_build(self, answer, world):
        """make_model, init or make_optimizer raises on rank 1 of 2."""
        world.run(answer, ranks.build_fails_on_one)

    @pytest.mark.survives("build", 1)
    def test_ties_stay(self, answer, world):
        """With the values of one process: `init` sets a tied weight once for each module."""
        facts = ranks.TIES, ranks.VALUES, ranks.HELD
        world.run(answer, ranks.built_has, ranks.tied, *facts)

    @pytest.mark.survives("build", 2)
    def test_train_mode_and_what_is_frozen_stay(self, answer, world):
        world.run(answer, ranks.built_has, ranks.Tricky, ranks.MODES)
