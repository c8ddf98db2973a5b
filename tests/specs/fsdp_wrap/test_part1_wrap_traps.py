"""Sharding block by block: meshes, forward passes of other kinds, and what cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.simulated import simulated_world
from specs.fsdp_wrap import ranks_wrap
from specs.fsdp_wrap.models import Block, adamw, make
from specs.fsdp_wrap.refused import check_refused
from specs.fsdp_wrap.shapes import Outer, nested


def _between_blocks() -> nn.Module:
    model = make()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def _block_and_root() -> nn.Module:
    model = make()
    model.add_module("probe", nn.Linear(13, 40, bias=False))
    model.probe.weight = model.blocks[1].up.weight
    return model


def _inner_and_outer() -> nn.Module:
    model, _ = nested()
    model[1].gate.bias = model[1].inner.down.bias
    return model


# What model, which classes, and what the message must hold.
BAD: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "an_absent_class": (make, Outer, ["Outer"]),
    "one_absent_class_of_two": (make, (Block, Outer), ["Outer"]),
    "a_class_that_only_the_root_has": (lambda: Block(5), Block, ["Block"]),
    "two_blocks_that_share": (_between_blocks, Block, ["up.weight"]),
    "a_block_that_shares_with_the_root": (_block_and_root, Block, ["weight"]),
    "a_block_that_shares_with_the_one_inside": (_inner_and_outer, (Block, Outer), ["bias"]),
}


class TestPart1WrapTraps:
    """Part 1: wrap - every block a unit, then the root"""

    subject = "wrap"

    @pytest.mark.survives
    def test_wrapping_changes_no_value_and_no_flag(self, answer, world):
        world.run(answer, ranks_wrap.keeps_values)

    @pytest.mark.survives
    @pytest.mark.parametrize("reshard", [True, False], ids=["given_back", "kept"])
    def test_evaluation_between_the_steps_is_that_of_one_process(self, answer, world, reshard):
        """Nothing gives a unit back at the end of a backward pass that never comes."""
        world.run(answer, ranks_wrap.evaluates, reshard)

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("world", "inner"),
        [(2, 1), (4, 2)],
        indirect=["world"],
        ids=["one_rank_of_2", "two_ranks_of_4"],
    )
    def test_only_the_ranks_of_the_mesh_share_the_model(self, answer, world, inner):
        world.run(answer, ranks_wrap.in_groups, inner)

    @pytest.mark.survives
    @pytest.mark.parametrize("kind", BAD)
    def test_refuses_blocks_that_cannot_be_units(self, answer, device, kind):
        """A parameter of two units would have a shard in one and be whole in the other."""
        model, kinds, words = BAD[kind]
        with simulated_world(8, device) as mesh:
            when = f"for {kind.replace('_', ' ')}"
            check_refused(answer, model().to(device), mesh, kinds, words, when)

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("shape", "words"), [((8, 1), []), ((2, 4), ["2"])], ids=["8_by_1", "2_by_4"]
    )
    def test_refuses_a_mesh_of_two_dimensions(self, answer, device, shape, words):
        """On it fully_shard would replicate over the first dimension, without a word."""
        with simulated_world(8, device):
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("a", "b"))
            check_refused(answer, make().to(device), mesh, Block, words, f"for a mesh {shape}")

    @pytest.mark.survives
    @pytest.mark.parametrize("units", ["all", "the_last_block"])
    def test_refuses_a_model_that_is_sharded(self, answer, device, units):
        with simulated_world(8, device) as mesh:
            model = make().to(device)
            if units == "all":
                answer.wrap(model, mesh, Block, adamw)
            else:
                fully_shard(model.blocks[2], mesh=mesh)
            check_refused(answer, model, mesh, Block, [], f"where {units} had been sharded before")
