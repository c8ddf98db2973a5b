"""Half the bytes: units compute in bfloat16; shards and reductions are float32."""

from __future__ import annotations

import pytest
import torch

from kit.laws.checks import check_bar
from kit.ranks.shards import units
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.shapes import wide
from specs.fsdp_wrap.simulated import activations_of_wide, books, check_calls

BF16 = torch.bfloat16
SAMPLES = 128  # activations are many times the 512 bytes that storages are rounded to


class TestPart2Mixed:
    @pytest.mark.works("wrap", "bfloat16")
    def test_trains_nearly_as_in_float32(self, answer, world):
        """Within 5 %: bfloat16 has 8 bits, 1 / 256 in each number. Tokens are not cast."""
        cause = "bfloat16 alone costs less than 5 %; this computes something else"
        hold(answer, world, "bfloat16", cause=cause)

    @pytest.mark.exact("wrap", "bfloat16")
    def test_gathers_bfloat16_and_reduces_float32(self, answer, device):
        """As many calls as in float32; gathers send half the bytes."""
        check_calls(answer, device, "a step in bfloat16", dtype=BF16)

    @pytest.mark.saves("wrap", "bfloat16")
    def test_whole_blocks_and_activations_take_half_the_bytes(self, answer, reference, device):
        """Parameters: half of what float32 gathers + 512 bytes, to which a storage is rounded.

        Activations: 2 bytes a number in each of three blocks + one more block in backward, + 5 %.
        """
        plain = books(reference, device, samples=(SAMPLES,)).memory.most
        yours, theirs = (
            books(module, device, samples=(SAMPLES,), dtype=BF16).memory.most
            for module in (answer, reference)
        )
        *blocks, root = units(*wide())
        check_bar(
            "gathered parameters in bfloat16 on 8 ranks",
            yours["unsharded"],
            0.5 * plain["unsharded"] + 512 * (2 * len(blocks[0]) + len(root)),
            plain=plain["unsharded"],
            reference=theirs["unsharded"],
            formula="half of float32 + 512 a parameter",
            cause="parameters are gathered in float32",
        )
        check_bar(
            f"activations in bfloat16 of {SAMPLES} samples",
            yours["activations"],
            1.05 * activations_of_wide(SAMPLES, 2),
            plain=plain["activations"],
            reference=theirs["activations"],
            formula="1.05 x (what 4 blocks keep, 2 bytes a number, + one block in backward)",
            cause="something between forward and backward is float32",
        )
