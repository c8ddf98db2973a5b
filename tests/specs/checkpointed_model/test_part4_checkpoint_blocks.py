"""Checkpoints in models of others: which blocks, the same bits, and bytes."""

from functools import partial

import pytest
import torch
from torch import nn

from kit.laws.toys import Block
from kit.private_torch import tree_leaves
from specs.checkpointed_model.blocks import (
    Counting,
    Deeper,
    Mixer,
    Nest,
    Normed,
    chain,
    checkpointed,
    failed,
    mixers,
    two_noisy,
)
from specs.checkpointed_model.large import (
    RETAINED,
    check_limit,
    held,
    large_inputs,
    one_input,
    peak,
)
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast
from specs.checkpointed_model.strangers import Stranger, stranger

FLOAT = torch.float32


class TestPart4CheckpointBlocks:
    @pytest.mark.works("checkpoint_blocks", "blocks")
    @checkpointed("the search stops too early, goes by names, or compares classes with ==")
    def test_finds_every_block_wherever_it_is(self):
        yield "a list of 12", chain(partial(mixers, 12)), [12]
        yield "at several depths", chain(partial(mixers, 4), tree=_deep), [4]
        yield "names that begin alike", chain(partial(mixers, 3), tree=_alike), [3]
        yield "a frozen block", chain(lambda: [*mixers(), Mixer().requires_grad_(False)]), [3]
        inside = lambda: [Nest(Nest(Deeper())), Deeper(Nest())]  # noqa: E731
        yield "blocks inside a block", chain(inside), [2]
        yield "a block in two places", chain(lambda: mixers(1) * 2, tree=_two_places), [1]
        other = lambda run, block, x: block(x, x.mean((0, 1)))  # noqa: E731
        yield "with other arguments each time", chain(lambda: mixers(1) * 3, call=other), [1]

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.works("checkpoint_blocks", "same bits")
    @checkpointed("the second run has other arguments, or draws other numbers")
    def test_works_on_models_of_the_transformers_library(self):
        yield "gpt2", stranger(), [3]
        yield "gpt2 in eval mode", stranger(train=False), [3], 1

    @pytest.mark.exact("checkpoint_blocks", "runs")
    @checkpointed("the block's own mode is not asked, or not at each of its calls")
    def test_recomputes_where_it_trains(self):
        ready = lambda model: model.eval() and None  # noqa: E731
        yield "handed in in eval mode", chain(mixers, prepared=ready, later=nn.Module.train), [2]
        yield "in eval mode later", chain(mixers, later=nn.Module.eval), [2], 1
        yield "blocks in eval mode", chain(lambda: [block.eval() for block in mixers()]), [2], 1
        yield "layers in training mode, in blocks in eval mode", chain(_layers_alone), [2], 1
        yield "only blocks in training mode", chain(mixers, later=_blocks_alone), [2]
        yield "after an error in a block", chain(mixers, later=failed), [2]
        for mode in (torch.no_grad, torch.inference_mode):
            yield mode.__name__, chain(mixers, step={"outer": mode}), [2], 1

    @pytest.mark.exact("checkpoint_blocks", "same bits")
    @checkpointed("the second run draws other numbers, or changes buffers again")
    def test_blocks_change_no_bit(self):
        yield "two forward passes", chain(two_noisy, passes=2), [2]
        yield "x without gradient", chain(two_noisy, grad=False), [2]
        yield "counters", chain(lambda: [Counting(), Counting()], passes=2), [2]
        for dtype in HALVES:
            yield f"{dtype}", chain(two_noisy, step={"outer": autocast(dtype)}), [2]
        norms = lambda: [Normed(nn.BatchNorm1d(WIDTH)), Normed(nn.BatchNorm1d(WIDTH).eval())]  # noqa: E731
        yield "norms", chain(norms, passes=2, shape=(4, WIDTH, 3)), [2]
        yield "in eval mode by then", chain(two_noisy, spoil=lambda model, *_: model.eval()), [2]
        yield "an empty batch", chain(two_noisy, shape=(0, *SHAPE[1:])), [2]

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.saves("checkpoint_blocks", "held")
    def test_gpt2_peaks_at_one_input_a_block_and_one_inside(self, answer, reference, device):
        """(blocks + 4) inputs + 1 inside, measured on one block of the library by itself.

        Two inputs more than for a LargeModel: embeddings and a last norm have results too.
        """
        gpt2 = Stranger(device)
        block, hidden = gpt2.blocks[0], gpt2.hidden
        inside = peak(block, hidden, lambda: tree_leaves(block(hidden))[0])  # of some, a tuple

        def reads(module):
            gpt2 = Stranger(device)
            if module:
                module.checkpoint_blocks(gpt2.model, gpt2.block_type)
            return peak(gpt2.model, gpt2.x, gpt2.forward, retain=True)

        title = f"peak above the baseline, GPT-2 with 3 blocks, {RETAINED}"
        limit, formula = 7 * one_input(hidden) + inside, "(3 + 4) inputs + 1 inside"
        cause = "blocks are not checkpointed one by one"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)

    @pytest.mark.saves("checkpoint_blocks", "held")
    def test_holds_one_input_a_block_of_others(self, answer, reference, device):
        """Of 4 blocks 3 inputs, as x is the baseline's, and the output. The bar adds 1."""
        x = large_inputs(device)

        def reads(module):
            model = nn.ModuleList(Block(WIDTH, heads=2) for _ in range(4)).to(device)
            if module:
                module.checkpoint_blocks(model, Block)

            def forward():
                y = x
                for block in model:
                    y = block(x=y)
                return y

            return held(model, x, forward)

        title, formula = "held between the passes, 4 blocks, called by keyword", "(4 + 1) inputs"
        limit, cause = 5 * one_input(x), "more is held than inputs"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)


def _deep(blocks):
    inner = nn.ModuleDict({"late": nn.Sequential(nn.ModuleList(blocks[2:3]))})
    tree = {"early": nn.ModuleList(blocks[:2]), "deeper": inner, "last": blocks[3]}
    return nn.ModuleDict(tree)


def _alike(blocks):
    """None of these is inside another."""
    return nn.ModuleDict(dict(zip(("block", "block2", "block2_norm"), blocks, strict=True)))


def _two_places(blocks):
    return nn.ModuleDict({"one": nn.Sequential(blocks[0]), "two": nn.ModuleList(blocks[1:])})


def _blocks_alone(model):
    model.training = model.tree.training = False


def _layers_alone():
    blocks = [block.eval() for block in mixers()]
    for block in blocks:
        block.up.train()
    return blocks
