"""Four billion parameters on 64 ranks: a dry run, so no value is computed and no memory is held."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from kit.laws.checks import check, check_bar
from kit.laws.toys import Block
from kit.memory.account import Account
from kit.memory.ruler import human
from specs.fsdp_wrap.models import adamw, shard_bytes, units, whole_bytes
from specs.fsdp_wrap.plan import LargeModel, rehearse

RANKS, TOKENS = 64, (1, 256)
GPU = 24 * 2**30


def large() -> LargeModel:
    """Few blocks, because a dry run takes as long as it has operations: 4 of 4.2 GB."""
    return LargeModel(layers=4, width=10240, words=1000)


def alone(model: nn.Module, mesh: Any) -> torch.optim.Optimizer:
    """It has no state and makes no tensor, so that activations are all that is left to count."""
    return torch.optim.SGD(model.parameters(), foreach=False)


@functools.cache
def dry_books(answer: Any) -> Account:
    """A step of rank 0 of 64, whose model the answer has wrapped; None: of one process."""
    if answer is None:
        return rehearse(alone, large, 1, TOKENS, steps=1)[0]

    def wrapped(model: nn.Module, mesh: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = answer.wrap(model, mesh, Block, adamw)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # it makes the state, as a step before would
        return optimizer

    return rehearse(wrapped, large, RANKS, TOKENS, steps=1)[0]


class TestPart1WrapBillions:
    subject = "wrap"

    @pytest.mark.saves
    def test_four_billion_parameters_fit_a_gpu_of_24_gib(self, answer):
        """State / 64 + two whole blocks, the gradients of one, buffers for two, the root's unit
        + the activations of one process, within 2 %; a process alone needs 16 bytes a parameter.
        """
        with torch.device("meta"):
            model = large()
        *blocks, root = (whole_bytes(unit, RANKS) for unit in units(model, Block))
        activations = dry_books(None).most["activations"]
        plain, state = (4 * shard_bytes(model.parameters(), ranks) for ranks in (1, RANKS))
        limit = 1.02 * (state + 5 * max(blocks) + root + activations)
        check_bar(
            f"peak on {RANKS} ranks of {sum(p.numel() for p in model.parameters()):,} parameters",
            dry_books(answer).peak,
            limit,
            plain=plain + activations,
            formula="state / 64 + 5 blocks + the root's unit + activations, + 2 %",
            cause="the units are larger than a block, or something is not sharded",
        )
        check(
            dry_books(answer).peak <= GPU,
            expected="a peak that fits 24 GiB",
            got=human(dry_books(answer).peak),
            cause="the units are larger than a block, or something is not sharded",
        )
