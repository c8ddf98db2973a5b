"""Checkpoints in models of others: second calls, models without blocks, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_equal, check_raises
from specs.checkpointed_model.common import WIDTH, Runs, back
from specs.checkpointed_model.models import Mixer, Named, Nest, host, host_runs


class TestPart4CheckpointBlocksRefusals:
    subject = "checkpoint_blocks"

    @pytest.mark.survives
    @pytest.mark.parametrize("first", ["all", "one_block"])
    def test_refuses_a_second_call_and_changes_nothing(self, answer, device, first):
        """Also where only one of the blocks has been through it: the others stay as they are."""
        model, x = host(device)
        part = model if first == "all" else model.stages["late"]
        answer.checkpoint_blocks(part, model.mixer)
        check_raises(
            lambda: answer.checkpoint_blocks(model, model.mixer),
            ValueError,
            when="for a model of which one block, or all, have been through it",
        )
        runs = host_runs(model)
        back(model(x))
        want = 3 * [2] if first == "all" else [1, 1, 2]
        cause = "blocks are checkpointed twice, or before the others have been looked at"
        check_equal(runs.counts, want, "runs of each block after the refused call", cause=cause)

    @pytest.mark.survives
    def test_takes_blocks_of_two_classes_in_two_calls(self, answer, device):
        model = nn.Sequential(Nest(), nn.Tanh(), Named()).to(device)
        runs = Runs([model[0].up, model[2].up])
        cause = "the second call goes by the model, and not by the blocks that it asks for"
        for kind in (Nest, Named):
            try:
                got = answer.checkpoint_blocks(model, kind)
            except ValueError as error:
                got = error
            check_equal(got, 1, f"blocks of the class {kind.__name__}", cause=cause)
        back(model(draw.randn(3, WIDTH, device=device)))
        check_equal(runs.counts, [2, 2], "runs of each block", cause=cause)

    @pytest.mark.survives
    def test_refuses_a_model_without_such_blocks(self, answer, device):
        check_raises(
            lambda: answer.checkpoint_blocks(host(device)[0], Nest),
            ValueError,
            mentions=["Nest"],
            when="for a Host, which has Mixer blocks and no Nest",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("bad", "named"),
        [("Mixer", "Mixer"), (int, "int"), (nn.Linear(3, 2), "Linear"), ((Mixer, Nest), "Nest")],
        ids=["a_name", "no_module", "a_module", "two_classes"],
    )
    def test_refuses_what_is_no_class_of_modules(self, answer, device, bad, named):
        check_raises(
            lambda: answer.checkpoint_blocks(host(device)[0], bad),
            TypeError,
            mentions=[named],
            when=f"for block_type={bad!r}",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize(
        "bad",
        [torch.ops.aten.addmm, torch.addmm, "aten.addmm.default"],
        ids=["no_overload", "a_function", "a_name"],
    )
    def test_refuses_to_keep_what_is_no_overload_and_changes_nothing(self, answer, device, bad):
        """pytorch/pytorch#176065: aten.mm, without .default, matches no operation."""
        model, x = host(device)
        keep = [torch.ops.aten.mm.default, bad]
        check_raises(
            lambda: answer.checkpoint_blocks(model, model.mixer, keep=keep),
            TypeError,
            mentions=["addmm"],
            when=f"for keep with {bad!r}, which is no overload",
        )
        runs = host_runs(model)
        refused = ""
        try:
            back(model(x))
        except ValueError as error:  # of the selection, at the first call of a block
            refused = str(error)
        cause = "keep is looked at when the blocks have been changed already"
        check_equal(refused, "", "error of the model after the refused call", cause=cause)
        check_equal(runs.counts, 3 * [1], "runs of each block after the refused call", cause=cause)
