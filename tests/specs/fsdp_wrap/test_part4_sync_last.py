"""train_step with sync="last": fewer reductions for more memory, and the same numbers."""

from __future__ import annotations

import pytest

from specs.fsdp_wrap import ranks as programs
from specs.fsdp_wrap.cases import KEPT
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.shapes import one_block
from specs.fsdp_wrap.simulated import check_calls_of_steps, check_held


class TestPart4SyncLast:
    @pytest.mark.works("train_step", 1)
    def test_the_last_micro_batch_reduces_for_all(self, answer, world):
        """Of one micro-batch the first is the last."""
        cause = "a backward pass reduces that should not, or the last one does not; or an option "
        cause += "is forgotten; or what was switched off for a few micro-batches stays"
        hold(answer, world, "last", cause=cause)

    @pytest.mark.exact("train_step", 3)
    def test_accumulates_in_float32_with_bfloat16_parameters(self, answer, world):
        """512 and seven times 1, divided by 8: 64.875, of which bfloat16 keeps 64."""
        world.run(answer, programs.accumulates)

    @pytest.mark.exact("train_step", 1)
    @pytest.mark.parametrize(("options", "count"), [({}, 40), (KEPT, 3)], ids=["plain", "kept"])
    def test_reduces_every_unit_once(self, answer, device, options, count):
        """On 64 ranks, whatever the number of micro-batches, also if the last one is the first. The
        gathers are those of a step for each.
        """
        given = {"samples": (300,) * count, "sync": "last"}
        check_calls_of_steps(answer, device, 64, one_block, **given, **options)

    @pytest.mark.saves("train_step", 1)
    def test_holds_one_set_of_whole_gradients(self, answer, reference, device):
        """Gradients: shards + the whole ones of the model, and of a block that are added to those
        of the micro-batch before. The rest is as without it.
        """
        check_held(answer, reference, device, "last")
