"""train_step with sync="last": fewer reductions for more memory, and the same numbers."""

from __future__ import annotations

import pytest

from specs.fsdp_wrap import ranks as programs
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.shapes import one_block
from specs.fsdp_wrap.simulated import check_calls_of_steps, check_held


class TestPart4SyncLast:
    @pytest.mark.works("train_step", 1)
    def test_the_last_micro_batch_reduces_for_all(self, answer, world):
        """A single micro-batch is first and last."""
        cause = "a backward pass reduces that should not, or the last one does not; or reductions "
        cause += "stay switched off after the step"
        hold(answer, world, "last", cause=cause)

    @pytest.mark.exact("train_step", 2)
    def test_accumulates_in_float32_with_bfloat16_parameters(self, answer, world):
        """512 and seven times 1, divided by 8, is 64.875; bfloat16 gives 64."""
        world.run(answer, programs.accumulates)

    @pytest.mark.exact("train_step", 1)
    def test_reduces_every_unit_once(self, answer, device):
        """Also if the last micro-batch is the first again. Each micro-batch gathers."""
        check_calls_of_steps(answer, device, 64, one_block, samples=(300,) * 3, sync="last")

    @pytest.mark.saves("train_step", 1)
    def test_holds_one_set_of_whole_gradients(self, answer, reference, device):
        """Gradients: shards + the whole ones of the model + new ones of a block, to be added.
        Parameters and activations as with sync="each".
        """
        check_held(answer, reference, device, "last")
