"""Sharding block by block: meshes, forward passes of other kinds, and what cannot be sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from kit.laws.checks import check_bar, check_equal
from kit.ranks.simulated import simulated_world
from specs.fsdp_wrap import ranks_wrap
from specs.fsdp_wrap.models import FEATURES, Block, adamw, make, shard_bytes, units, whole_bytes
from specs.fsdp_wrap.refused import check_refused
from specs.fsdp_wrap.shapes import Outer, nested
from specs.fsdp_wrap.simulated import (
    books,
    check_calls,
    left_by_wrap,
    planned,
    tall,
    wide,
)


def _between_blocks() -> nn.Module:
    model = make(blocks=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def _block_and_root() -> nn.Module:
    model = make()
    model.add_module("probe", nn.Linear(13, 40, bias=False))
    model.probe.weight = model.blocks[0].up.weight
    return model


def _a_module_of_two_blocks() -> nn.Module:
    model = make(blocks=2)
    model.blocks[1].norm = model.blocks[0].norm
    return model


def _a_module_of_inner_and_outer() -> nn.Module:
    model, _ = nested()
    model[1].gate = model[1].inner.norm
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
    "a_module_in_two_blocks": (_a_module_of_two_blocks, Block, ["norm."]),
    "a_module_in_a_block_and_the_one_inside": (
        _a_module_of_inner_and_outer,
        (Block, Outer),
        ["1."],
    ),
}

# How much of a model has been sharded before.
SHARDED = ["all", "all_and_gathered", "the_last_block", "one_parameter"]


class TestPart1WrapTraps:
    subject = "wrap"

    @pytest.mark.saves
    def test_nothing_holds_the_whole_parameters_any_more(self, answer, reference, device):
        """The sum over parameters of 4 ceil(rows / N) columns bytes, and a buffer."""
        plain = list(wide()[0].parameters())
        yours, theirs = (left_by_wrap(module, device) for module in (answer, reference))
        check_bar(
            "what is alive after wrap, on rank 0 of 8",
            yours,
            shard_bytes(plain, 8) + 512,
            plain=shard_bytes(plain, 1) + 512,
            reference=theirs,
            formula="1 / N of the rows of each parameter, rounded up, + a buffer",
            cause="something still has the parameters of before: a list, or another optimizer",
        )

    @pytest.mark.saves
    @pytest.mark.parametrize("reshard", [True, False], ids=["given_back", "kept"])
    def test_a_forward_alone_leaves_nothing_gathered(self, answer, reference, device, reshard):
        """Under no_grad n + 1 gathers; two blocks and the root's unit at most, and then none. With
        reshard_after_forward=False the whole model at most.
        """
        yours, theirs = (
            books(module, device, 8, shape=tall, forward_only=True, reshard_after_forward=reshard)
            for module in (answer, reference)
        )
        gathers = planned(tall, 8, gathers=1)
        once = Counter({call: n for call, n in gathers.items() if call.kind == "all_gather"})
        check_calls(yours.calls, once, what="a forward under no_grad")
        *blocks, root = (whole_bytes(unit, 8) for unit in units(*tall()))
        check_bar(
            "gathered parameters in a forward under no_grad",
            yours.memory.most["unsharded"],
            (sum(sorted(blocks)[-2:]) if reshard else sum(blocks)) + root,
            plain=sum(blocks) + root if reshard else None,
            reference=theirs.memory.most["unsharded"],
            formula="two blocks + the root's unit" if reshard else "the whole model",
            cause="blocks are given back only where a backward is to come",
        )
        cause = "no backward comes that would give it back: the root's unit, or all of them"
        left = yours.memory.after["unsharded"]
        check_equal(left, 0, "gathered bytes after a forward under no_grad", cause=cause)

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
    @pytest.mark.parametrize("what", SHARDED)
    def test_refuses_a_model_that_is_sharded(self, answer, device, what):
        """Between forward and backward the parameters of a unit that stays are whole."""
        with simulated_world(8, device) as mesh:
            model = make(blocks=2).to(device)
            if what.startswith("all"):
                answer.wrap(model, mesh, Block, adamw, reshard_after_forward=False)
            if what == "all_and_gathered":
                model(torch.ones(2, FEATURES, device=device))
            if what == "the_last_block":
                fully_shard(model.blocks[1], mesh=mesh)
            if what == "one_parameter":
                weight = distribute_tensor(model.head.weight, mesh, [Shard(0)])
                model.head.weight = nn.Parameter(weight)
            when = f"where {what.replace('_', ' ')} had been sharded before"
            check_refused(answer, model, mesh, Block, [], when)
