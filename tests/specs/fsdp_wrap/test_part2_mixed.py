"""Sharding with half the bytes: bfloat16 in every unit, float32 in what is kept and added up."""

from __future__ import annotations

import pytest
import torch

from kit.laws.checks import check_bar
from kit.ranks.shapes import SHAPES, nested
from kit.ranks.shards import units
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import WIDTH
from specs.fsdp_wrap.cases import KEPT, adamw
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.shapes import tabled, wide
from specs.fsdp_wrap.simulated import (
    activations_of_wide,
    books,
    check_buffers,
    check_calls,
)

BF16 = torch.bfloat16
SAMPLES = 128  # so that activations are many times the 512 bytes that storages are rounded to


class TestPart2Mixed:
    @pytest.mark.works("wrap", "bfloat16")
    def test_trains_nearly_as_in_float32(self, answer, world):
        """Within 5 %: bfloat16 has 8 bits, 1 / 256 in each number."""
        cause = "bfloat16 alone costs less than 5 %: this is another computation"
        hold(answer, world, "bfloat16", cause=cause)

    @pytest.mark.exact("wrap", "bfloat16")
    @pytest.mark.parametrize(
        ("shape", "options"),
        [(wide, {}), (SHAPES["frozen"], {}), (nested, KEPT)],
        ids=["plain", "frozen", "kept"],
    )
    def test_gathers_bfloat16_and_reduces_float32(self, answer, device, shape, options):
        """As many calls as in float32; what is gathered has half the bytes."""
        check_calls(answer, device, "a step in bfloat16", shape, dtype=BF16, **options)

    @pytest.mark.saves("wrap", "bfloat16")
    def test_whole_blocks_and_activations_take_half_the_bytes(self, answer, reference, device):
        """Parameters: half of what float32 gathers + a storage's 512 bytes for each.

        Activations: 2 bytes a number in each of three blocks + one more block in backward, + 5 %.
        """
        plain = books(reference, device, samples=(SAMPLES,)).memory.most
        accounts = [
            books(module, device, samples=(SAMPLES,), dtype=BF16).memory
            for module in (answer, reference)
        ]
        yours, theirs = (account.most for account in accounts)
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
        check_buffers(*accounts, "in bfloat16")
        check_bar(
            f"activations in bfloat16 of {SAMPLES} samples",
            yours["activations"],
            1.05 * activations_of_wide(SAMPLES, 2),
            plain=plain["activations"],
            reference=theirs["activations"],
            formula="1.05 x (what 4 blocks keep, 2 bytes a number, + one block in backward)",
            cause="something between forward and backward is float32",
        )

    @pytest.mark.survives("wrap", 5)
    def test_units_cast_what_they_get(self, answer, device, world):
        """A block gets the product with a float32 buffer; the model gets tokens, or a mask too."""
        cause = "inputs reach a unit as they come; or tokens are cast"
        hold(answer, world, "bfloat16 inputs", cause=cause)
        with simulated_world(8, device) as mesh:
            model, kinds = tabled()
            answer.wrap(model.to(device), mesh, kinds, adamw, dtype=BF16)
            tokens, mask = torch.tensor([[3, 7]]), torch.ones(WIDTH, dtype=torch.float64)
            model(tokens.to(device), more={"mask": mask.to(device)}).sum().backward()
