"""Checkpoints in models of others: which blocks, the same bits, FLOPs and bytes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal
from kit.laws.toys import Block
from specs.checkpointed_model.common import (
    WIDTH,
    Runs,
    back,
    check_same,
    one_input,
    peak,
    rounding,
    step,
)
from specs.checkpointed_model.models import (
    Calls,
    Nest,
    Stranger,
    host,
    host_runs,
    transformer,
)

STRANGERS = pytest.mark.parametrize("name", ["gpt2", "vit"])
KEEPS = pytest.mark.parametrize("dear", [False, True], ids=["recompute_all", "keep_dear"])
_DROPS = (
    "the recomputation draws other random numbers, or runs with other arguments than the forward"
    " pass did"
)


@functools.cache
def stranger_peak(name: str, device: torch.device, module=None) -> int:
    """The peak of GPT-2 or ViT with the blocks checkpointed by an answer, or as it is."""
    stranger = Stranger(name, device)
    if module is not None:
        module.checkpoint_blocks(stranger.model, stranger.block_type)
    return peak(stranger.model, stranger.x, lambda: stranger.forward(stranger.model))


@functools.cache
def transformer_peak(device: torch.device, module=None, *, dear: bool = False) -> int:
    """The same for six transformer blocks."""
    model, x = transformer(device)
    if module is not None:
        module.checkpoint_blocks(model, Block, keep=module.DEAR if dear else ())
    return peak(model, x)


class TestPart4CheckpointBlocks:
    subject = "checkpoint_blocks"

    @pytest.mark.works
    def test_recomputes_every_block_wherever_it_is(self, answer, device):
        """Two blocks in a list, one of them of a derived class, and a third two levels deeper.

        The model is in eval mode when it is handed in, and its second block is frozen.
        """
        model, x = host(device)
        model.eval()
        model.blocks[1].requires_grad_(False)
        got = answer.checkpoint_blocks(model, model.mixer)
        cause = "the search stops at the model's own children, or compares classes with ==, or"
        cause += " leaves a frozen block out"
        check_equal(got, 3, "blocks", cause=cause)
        model.train()
        runs = host_runs(model)
        output = model(x)
        check_equal(runs.counts, 3 * [1], "runs after the forward pass", cause="blocks run twice")
        back(output)
        cause = "1: not checkpointed; whether to is asked when the model is handed in, or never, or"
        cause += " a frozen block is left out, through which gradients pass"
        check_equal(runs.counts, 3 * [2], "runs after the backward pass", cause=cause)

    @pytest.mark.works
    @STRANGERS
    @KEEPS
    def test_works_on_models_of_the_transformers_library(self, answer, device, name, dear):
        """GPT-2 and ViT with random weights, dropout on, against an untouched deep copy."""
        stranger = Stranger(name, device)
        model, plain = stranger.model, copy.deepcopy(stranger.model)
        keys = list(model.state_dict())
        keep = answer.DEAR if dear else ()
        got = answer.checkpoint_blocks(model, stranger.block_type, keep=keep)
        cause = "blocks are looked for in the wrong place"
        check_equal(got, stranger.layers, "blocks", cause=cause)
        runs = stranger.runs(model)
        found = step(model, lambda: stranger.forward(model), cause=_DROPS)
        check_equal(runs.take(), stranger.layers * [2], "runs of each block", cause=_DROPS)
        want = step(plain, lambda: stranger.forward(plain))
        check_same(found, want, cause=_DROPS, within=rounding(device))
        cause = "blocks are wrapped in other modules"
        check_equal(list(model.state_dict()), keys, "keys of state_dict()", cause=cause)
        model.eval()
        back(stranger.forward(model))
        cause = "checkpoints stay on in eval mode"
        check_equal(runs.take(), stranger.layers * [1], "runs of each block in eval", cause=cause)

    @pytest.mark.exact
    @KEEPS
    def test_a_block_may_take_and_return_anything(self, answer, device, dear):
        """Tensors by position, in a dict by keyword, a string; a tuple with a dict comes back."""
        model, x = host(device)
        plain = copy.deepcopy(model)
        answer.checkpoint_blocks(model, model.mixer, keep=answer.DEAR if dear else ())
        x.requires_grad_()
        got = step(model, lambda: model(x), x, cause=_DROPS)
        check_same(got, step(plain, lambda: plain(x), x), cause=_DROPS)

    @pytest.mark.exact
    @KEEPS
    @pytest.mark.parametrize("when", ["eval", "no_grad", "block_in_eval"])
    def test_changes_nothing_at_other_times(self, answer, device, when, dear):
        """A frozen block is often in eval mode inside a model that trains."""
        model, x = host(device)
        answer.checkpoint_blocks(model, model.mixer, keep=answer.DEAR if dear else ())
        model.train(when != "eval")
        want = 3 * [1]
        if when == "block_in_eval":
            model.blocks[1].eval()
            want = [2, 1, 2]
        runs = host_runs(model)
        with torch.set_grad_enabled(when != "no_grad"):
            output = model(x)
        if when != "no_grad":
            back(output)
        cause = "the block's own training mode is not asked, at each of its calls"
        check_equal(runs.counts, want, f"runs of each block ({when})", cause=cause)

    @pytest.mark.exact
    def test_only_outermost_blocks_are_checkpointed(self, answer, device):
        """A checkpoint within a checkpoint would run the inner block three times."""
        model = nn.Sequential(Nest(Nest(Nest())), nn.Tanh(), Nest()).to(device)
        runs = Runs([model[0].up, model[0].inner[0].up, model[2].up])
        cause = "blocks inside a block are counted"
        check_equal(answer.checkpoint_blocks(model, Nest), 2, "blocks", cause=cause)
        x = draw.randn(3, WIDTH, device=device)
        back(model(x))
        cause = "blocks inside a block are checkpointed too"
        check_equal(runs.counts, [2, 2, 2], "runs of an outer, an inner, a lone one", cause=cause)
        cause = "the caller's input is made to require a gradient, to please the checkpoint"
        check_equal(x.requires_grad, False, "x.requires_grad afterwards", cause=cause)

    @pytest.mark.exact
    def test_selective_recomputation_runs_no_matrix_product_again(self, answer, device):
        """FLOPs of forward and backward together; beyond the plain model's they are recomputed."""
        totals = {}
        for name, keep in (("plain", None), ("all", ()), ("dear", answer.DEAR)):
            model, x = transformer(device, 2)
            if keep is not None:
                answer.checkpoint_blocks(model, Block, keep=keep)
            # Around both: a mode in the forward pass alone would see other operations than the
            # recomputation.
            with FlopCounterMode(display=False) as flops:
                back(model(x))
            totals[name] = flops.get_total_flops()
        again = totals["all"] - totals["plain"]
        check(
            again > 0,
            expected="FLOPs recomputed without keep",
            got=again,
            cause="nothing is recomputed",
        )
        cause = "keep is not heeded, or what it keeps is recomputed all the same"
        left = totals["dear"] - totals["plain"]
        check_equal(left, 0, f"FLOPs recomputed with keep=DEAR, of {again}", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("kept", ["addmm", "gelu", "native_layer_norm", "attention", "matmuls"])
    def test_keeps_the_results_of_the_given_operations_and_of_no_others(self, answer, device, kept):
        """Calls of each operator, against the plain model's: equal for what is kept, more for the
        others. Keeping the matrix products alone still recomputes attention."""
        model, x = transformer(device, 2)
        with Calls() as plain:
            back(model(x))
        groups = {
            "attention": [op for op in plain.counts if _is_attention(op)],
            "addmm": [torch.ops.aten.addmm.default],
            "gelu": [torch.ops.aten.gelu.default],
            "native_layer_norm": [torch.ops.aten.native_layer_norm.default],
        }
        attention = set(groups["attention"])
        keep = [op for op in answer.DEAR if op not in attention] + [torch.ops.aten.gelu.default]
        groups["matmuls"] = keep
        answer.checkpoint_blocks(model, Block, keep=set(groups[kept]))
        with Calls() as calls:
            back(model(x))
        for group in ("addmm", "gelu", "native_layer_norm", "attention"):
            op = groups[group][0]
            more = calls.counts[op] - plain.counts[op]
            check(
                (more == 0) == (op in groups[kept]),
                expected=f"{group} {'not ' if op in groups[kept] else ''}run again, if {kept} "
                + ("is" if kept != "matmuls" else "and gelu are")
                + " kept",
                got=f"{more} runs more than in the plain model",
                cause="keep is not what decides: a fixed set does, or all is kept, or nothing is",
            )

    @pytest.mark.saves
    @STRANGERS
    def test_gpt2_and_vit_peak_at_one_input_a_block_and_one_inside(
        self, answer, reference, device, name
    ):
        """(blocks + 4) inputs + 1 inside, measured on one block of the library by itself.

        Two inputs more than for a LargeModel: embeddings and a last normalisation have results too.
        """
        stranger = Stranger(name, device)
        block = stranger.blocks(stranger.model)[0]
        inside = peak(block, stranger.hidden, lambda: _first(block(stranger.hidden)))
        check_bar(
            f"peak above the baseline, {name} with 4 blocks",
            stranger_peak(name, device, answer),
            (stranger.layers + 4) * one_input(stranger.hidden) + inside,
            plain=stranger_peak(name, device),
            reference=stranger_peak(name, device, reference),
            formula="(4 + 4) inputs + 1 inside",
            cause="blocks are not checkpointed one by one",
        )

    @pytest.mark.saves
    def test_selective_recomputation_holds_less_than_the_plain_model(
        self, answer, reference, device
    ):
        """The peak with full recomputation + 9.125 inputs a block for the results that DEAR keeps.

        Of a block these are qkv 3, attention 1 (and its logsumexp, heads / width = 2 / 16), out 1,
        up 3 and down 1. Kept besides, the GELU's result alone would be 3 more.
        """
        model, x = transformer(device, 1)
        inside = peak(model, x)
        plain = transformer_peak(device)
        full = transformer_peak(device, answer)
        check_bar(
            "peak above the baseline, 6 blocks, all recomputed",
            full,
            (6 + 2) * one_input(x) + inside,
            plain=plain,
            reference=transformer_peak(device, reference),
            formula="(6 + 2) inputs + 1 inside",
            cause="more than one block's inside is held at a time",
        )
        check_bar(
            "peak above the baseline, 6 blocks, keep=DEAR",
            transformer_peak(device, answer, dear=True),
            full + 6 * (9 + 2 / WIDTH) * one_input(x),
            plain=plain,
            reference=transformer_peak(device, reference, dear=True),
            formula="all recomputed + 6 x 9.125 inputs",
            cause="more is kept than the results of the operations in keep",
        )


def _is_attention(op: object) -> bool:
    return "scaled_dot_product" in str(op) and "backward" not in str(op)


def _first(output: object) -> torch.Tensor:
    """Older versions of the library return a tuple from a block."""
    return output[0] if isinstance(output, tuple) else output
