"""A model with a checkpoint for each block: values, how often blocks run, and bytes."""

from __future__ import annotations

import functools

import pytest
import torch

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal
from specs.checkpointed_model.common import (
    WIDTH,
    back,
    by_hand,
    held_after_backward,
    held_after_forward,
    inputs,
    large_inputs,
    one_input,
    peak_of_block,
    peak_of_model,
    runs_of,
)


@functools.cache
def held_by(module, device: torch.device, *, use: bool = True) -> int:
    model = module.LargeModel(5, WIDTH, dropout=0.25, use_checkpoint=use).to(device)
    return held_after_forward(model, large_inputs(device))


class TestPart1LargeModel:
    subject = "LargeModel"

    @pytest.mark.works
    @pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
    def test_a_block_adds_its_feed_forward_to_its_input(self, answer, device, training):
        """x + down(dropout(relu(up(x)))), and nothing is added where the mask is False."""
        block = answer.MemoryIntensiveBlock(WIDTH, dropout=0.25).to(device).train(training)
        shapes = tuple(block.up.weight.shape), tuple(block.down.weight.shape)
        cause = "the inside is not four times as wide"
        check_equal(
            shapes, ((4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)), "shapes of up and down", cause=cause
        )
        check_equal(block.dropout.p, 0.25, "dropout.p", cause="the argument is not handed on")
        children = sorted(name for name, _ in block.named_children())
        cause = "a layer has another name, or is a function where the contract has a child"
        check_equal(children, ["down", "dropout", "relu", "up"], "children", cause=cause)
        x, mask = inputs(device), draw.rand(3, 5, device=device) < 0.6
        for given in (None, mask):
            draw.seed(3)
            got = block(x, mask=given)
            draw.seed(3)
            want = by_hand(block, x, given)
            what = "output" if given is None else "output under a mask"
            cause = "the input is not added, something is left out, or the mask is turned round"
            check_equal(got.detach(), want.detach(), what, cause=cause)
        x[~mask] = 3e38 * block.up.weight[0].detach().sign()  # finite, and the update is not
        got = block(x, mask=mask)[~mask].detach()
        cause = "the update is multiplied by the mask, and 0 times infinity is no number"
        check_equal(got, x[~mask], "where the mask is False, and x very large", cause=cause)

    @pytest.mark.works
    @pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
    def test_a_model_is_its_blocks_one_after_another(self, answer, device, training):
        model = answer.LargeModel(5, WIDTH, dropout=0.25).to(device).train(training)
        check_equal(len(model.layers), 5, "len(layers)", cause="num_layers is not the number")
        own = len({id(p) for p in model.layers.parameters()})
        check_equal(
            own, 5 * 4, "parameters", cause="one block is repeated, with one set of weights"
        )
        rates = [block.dropout.p for block in model.layers]
        check_equal(rates, 5 * [0.25], "dropout of the blocks", cause="it is not handed on")
        usual = [answer.LargeModel(1, WIDTH).layers[0], answer.MemoryIntensiveBlock(WIDTH)]
        rates = [block.dropout.p for block in usual]
        check_equal(rates, 2 * [0.1], "dropout by default", cause="that is another default")
        x, mask = inputs(device), draw.rand(3, 5, device=device) < 0.6
        for given in (None, mask):
            draw.seed(3)
            got = model(x, mask=given)
            draw.seed(3)
            want = x
            for block in model.layers:
                want = by_hand(block, want, given)
            what = "output" if given is None else "output under a mask"
            cause = "a block is left out, or runs out of order, or without its mask"
            check_equal(got.detach(), want.detach(), what, cause=cause)

    @pytest.mark.exact
    def test_each_block_runs_once_more_in_training(self, answer, device):
        """Once in the forward pass, once in the backward pass: 1, then 2 in all."""
        model = answer.LargeModel(6, WIDTH).to(device)
        runs = runs_of(model)
        output = model(inputs(device))
        cause = "blocks run more than once in the forward pass itself"
        check_equal(runs.counts, 6 * [1], "runs of each block after the forward pass", cause=cause)
        back(output)
        check_equal(
            runs.counts,
            6 * [2],
            "runs of each block after the backward pass",
            cause="1: that block is not checkpointed, so all of its inside is held; 3: it has two"
            " checkpoints; all on the last: a lambda looks its block up when it runs",
        )

    @pytest.mark.exact
    @pytest.mark.parametrize("when", ["eval", "no_grad", "inference_mode", "switched_off"])
    def test_each_block_runs_once_where_nothing_is_recomputed(self, answer, device, when):
        """huggingface/diffusers#10107: checkpoints that stay on in validation.

        In eval mode gradients can be on: the blocks run once all the same.
        """
        model = answer.LargeModel(6, WIDTH, use_checkpoint=when != "switched_off").to(device)
        model.train(when != "eval")
        runs = runs_of(model)
        if when == "no_grad":
            with torch.no_grad():
                output = model(inputs(device))
        elif when == "inference_mode":
            with torch.inference_mode():
                output = model(inputs(device))
        else:
            output = model(inputs(device))
            back(output)
        cause = (
            "self.training, or use_checkpoint, is not asked: recomputing costs, and saves nothing"
        )
        check_equal(runs.counts, 6 * [1], f"runs of each block ({when})", cause=cause)
        if when in ("no_grad", "inference_mode"):
            cause = "gradients are switched on again inside"
            check_equal(output.requires_grad, False, f"requires_grad ({when})", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize(
        "case", ["mask", "autocast", "input_with_gradient", "frozen_biases", "frozen_blocks"]
    )
    def test_recomputes_in_every_case(self, answer, device, case):
        """A frozen block behind a trained one passes its gradient on, and so has an inside."""
        model = answer.LargeModel(6, WIDTH).to(device)
        if case == "frozen_blocks":
            model.layers[1:].requires_grad_(False)
        if case == "frozen_biases":
            for block in model.layers:
                block.up.bias.requires_grad_(False)
        runs = runs_of(model)
        mask = draw.rand(3, 5, device=device) < 0.6 if case == "mask" else None
        x = inputs(device, grad=case == "input_with_gradient")
        with torch.autocast(device.type, torch.bfloat16, enabled=case == "autocast"):
            output = model(x, mask=mask)
        back(output)
        cause = "checkpoints are left out in this case"
        check_equal(runs.counts, 6 * [2], f"runs of each block ({case})", cause=cause)

    @pytest.mark.saves
    @pytest.mark.parametrize("layers", [5, 12], ids=["5_blocks", "12_blocks"])
    def test_peaks_at_one_input_a_block_and_one_inside(self, answer, reference, device, layers):
        """(num_layers + 2) inputs + 1 inside.

        The inside is measured on one plain block: forward, loss and backward. Two of the inputs are
        room: for the loss, and for other ways to write the loop.
        """
        check_bar(
            f"peak above the baseline, {layers} blocks",
            peak_of_model(answer, layers, 1, device),
            (layers + 2) * one_input(large_inputs(device)) + peak_of_block(answer, device),
            plain=peak_of_model(reference, layers, 1, device, use=False),
            reference=peak_of_model(reference, layers, 1, device),
            formula=f"{layers + 2} inputs + 1 inside",
            cause="the backward pass holds more than one block's inside at a time: one checkpoint"
            " around everything, checkpoints around the layers within a block, or no checkpoint",
        )

    @pytest.mark.saves
    def test_needs_less_than_half_of_the_plain_model(self, answer, reference, device):
        """0.45 x the plain model's peak.

        On the cpu a plain block holds 13 inputs: its own input, and 4 each for the result of the
        ReLU, the mask of the dropout and their product. So 5 blocks take 69, and 21 checkpointed.
        """
        plain = peak_of_model(reference, 5, 1, device, use=False)
        check_bar(
            "peak above the baseline, 5 blocks",
            peak_of_model(answer, 5, 1, device),
            0.45 * plain,
            plain=plain,
            reference=peak_of_model(reference, 5, 1, device),
            formula="0.45 x the plain model",
            cause="the inside of all blocks is there at once",
        )

    @pytest.mark.saves
    def test_holds_one_input_a_block_between_forward_and_backward(self, answer, reference, device):
        """The input of each block but the first, which is the baseline's, and the output: 5 inputs.

        The inside of a single block would be 12 more; the bar adds 2.
        """
        check_bar(
            "held after the forward pass, 5 blocks",
            held_by(answer, device),
            7 * one_input(large_inputs(device)),
            plain=held_by(reference, device, use=False),
            reference=held_by(reference, device),
            formula="(num_layers + 2) inputs",
            cause="a block is not checkpointed, or something of its inside is kept",
        )

    @pytest.mark.saves
    @pytest.mark.parametrize("size", [1, 2], ids=["each_block", "segments_of_2"])
    def test_holds_nothing_after_the_backward_pass(self, answer, device, size):
        model = answer.LargeModel(5, WIDTH, segment_size=size).to(device)
        x = large_inputs(device)
        held = held_after_backward(model, x)
        check(
            held <= 0,
            expected="0 bytes more than before the step, whose gradients were in place",
            got=f"{held} bytes, which are {held / one_input(x):.1f} inputs",
            cause="inputs of blocks, or the graph, are kept on the model or in a list",
        )
