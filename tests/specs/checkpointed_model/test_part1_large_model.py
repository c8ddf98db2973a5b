"""A model with a checkpoint for each block: values, runs, the same bits, and bytes."""

import pytest
import torch
import torch.nn.functional as F

from kit.laws import draw
from kit.laws.checks import check_close, check_equal
from kit.laws.scenarios import scenarios
from specs.checkpointed_model.large import (
    RETAINED,
    as_without,
    check_model,
    check_nothing_left,
    held,
    inside,
    large,
    large_inputs,
    one_input,
    peak,
    replaced,
)
from specs.checkpointed_model.steps import SHAPE, WIDTH, autocast


def by_hand(block, x, mask=None):
    """What a block computes, from its weights."""
    hidden = F.relu(F.linear(x, block.up.weight, block.up.bias))
    hidden = F.dropout(hidden, block.dropout.p, block.training)
    update = F.linear(hidden, block.down.weight, block.down.bias)
    return (x + (update if mask is None else torch.where(mask.unsqueeze(-1), update, 0.0))).detach()


@scenarios("number of parameters, and dropout of each block")
def holds(answer, device, words, parameters, rates):
    model = eval(words, {"LargeModel": answer.LargeModel, "Block": answer.MemoryIntensiveBlock})
    blocks = getattr(model, "layers", [model])
    got = [sum(p.numel() for p in model.parameters()), [block.dropout.p for block in blocks]]
    return got, [parameters, rates]


class TestPart1LargeModel:
    @pytest.mark.works("MemoryIntensiveBlock", "children")
    @pytest.mark.parametrize("how", ["training", "eval", "autocast"])
    def test_a_block_adds_its_feed_forward_to_its_input(self, answer, device, how):
        """x + down(dropout(relu(up(x))))."""
        block, ran = answer.MemoryIntensiveBlock(WIDTH, dropout=0.25).to(device), []
        for name, child in block.train(how != "eval").named_children():
            child.register_forward_hook(lambda *_, name=name: ran.append(name))
        shapes = [tuple(block.up.weight.shape), tuple(block.down.weight.shape)]
        want = [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
        cause = "it is not four times as wide inside"
        check_equal(shapes, want, "shapes of up and down", cause=cause)
        x = draw.randn(*SHAPE, device=device).transpose(0, 1)
        draw.seed(3)
        with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
            got = block(x)
            draw.seed(3)
            want = by_hand(block, x)
            suspects = {"the input is not added": want - x}
            suspects["dropout is left out"] = by_hand(block.eval(), x)
        cause = "something is left out, or another is put in"
        check_close(got, want, "output", cause=cause, suspects=suspects)
        cause = "a layer has another name, or is a function where the contract has a child"
        check_equal(ran, ["up", "relu", "dropout", "down"], "children that run", cause=cause)

    @pytest.mark.works("MemoryIntensiveBlock", "mask")
    def test_a_mask_lets_the_input_through(self, answer, device):
        block = answer.MemoryIntensiveBlock(WIDTH, dropout=0.0).to(device)
        x, mask = draw.randn(*SHAPE, device=device), draw.rand(*SHAPE[:2], device=device) < 0.6
        suspects = {"the mask is turned round": by_hand(block, x, ~mask)}
        suspects["the mask is not used"] = by_hand(block, x)
        want, cause = by_hand(block, x, mask), "something else is masked than the update"
        check_close(block(x, mask=mask), want, "output", cause=cause, suspects=suspects)
        x[~mask] = 3e38 * block.up.weight[0].detach().sign()  # finite, and the update is not
        cause = "the update is multiplied by the mask, and 0 times infinity is no number"
        check_equal(block(x, mask=mask)[~mask].detach(), x[~mask], "large inputs", cause=cause)

    @pytest.mark.works("LargeModel", "num_layers")
    @holds("a block is repeated, or an argument not handed on")
    def test_a_model_has_blocks_of_its_own(self):
        """A block has 4 * n * n weights twice, and biases of 4 * n and n."""
        block = 8 * 16 * 16 + 5 * 16
        yield "LargeModel(5, 16, dropout=0.25)", 5 * block, [0.25] * 5
        yield "LargeModel(3, 16)", 3 * block, [0.1] * 3
        yield "Block(16)", block, [0.1]
        yield "LargeModel(1, 1, dropout=0.0)", 13, [0.0]
        yield "LargeModel(2, 1, dropout=1.0, segment_size=2)", 26, [1.0] * 2

    @pytest.mark.exact("LargeModel", "runs")
    @as_without("it is not asked at each call whether to checkpoint, or not in this case")
    def test_each_block_runs_once_more(self):
        """Once in the forward pass, once in the backward pass; once in all in eval mode."""
        yield "11 blocks", large(11)
        yield "one row", large(rows=1)
        yield "a mask", large(masks=1)
        yield "autocast", large(outer=autocast(torch.bfloat16))
        yield "float64", large(dtype=torch.float64)
        biases = lambda name: name.endswith("bias")  # noqa: E731
        yield "frozen biases, x without gradient", large(frozen=biases, grad=False)
        yield "the first block in eval mode", large(before=_first_in_eval)
        late = lambda name: name.startswith("layers.2.")  # noqa: E731
        yield "frozen blocks that gradients pass", large(frozen=late)
        yield "all frozen, x with gradient", large(frozen=lambda name: True)
        for name, options in {"eval": {"train": False}, "switched off": {"use": False}}.items():
            yield name, large(**options), 1
        for mode in (torch.no_grad, torch.inference_mode):
            yield mode.__name__, large(outer=mode), 1
        yield "an empty batch", large(rows=0, masks=1)

    @pytest.mark.exact("LargeModel", "same bits")
    @as_without("the second run draws other numbers, or sets a stream and does not put it back")
    def test_changes_no_bit(self):
        """huggingface/transformers#26221: a reentrant checkpoint loses gradients of parameters."""
        yield "dropout", large()
        yield "x without gradient", large(grad=False)
        yield "one block, a mask, no dropout", large(1, masks=1, dropout=0.0)
        for share in (0.0, 1.0):
            yield f"a mask that is {share > 0} everywhere", large(masks=1, share=share)
        yield "a layer replaced by one with dropout", large(dropout=0.0, before=replaced)

    @pytest.mark.exact("LargeModel", "keys")
    def test_has_the_keys_of_the_blocks_alone(self, answer):
        """pytorch/pytorch#77224: a wrapper's prefix keeps weights from being loaded."""
        weights = [f"{child}.{name}" for child in ("down", "up") for name in ("bias", "weight")]
        want = [f"layers.{number}.{name}" for number in range(3) for name in weights]
        cause = "blocks are wrapped in other modules, or registered under a second name"
        for size in (1, 2):
            got = sorted(answer.LargeModel(3, WIDTH, segment_size=size).state_dict())
            check_equal(got, want, "keys of state_dict()", cause=cause)

    @pytest.mark.saves("LargeModel", "peak")
    @pytest.mark.parametrize("case", ["plain", "mask", "autocast", RETAINED])
    def test_peaks_at_one_input_a_block_and_one_inside(self, answer, reference, device, case):
        """Of n blocks: n - 1 inputs (x is the baseline's), the output, its gradient, and that of a
        block's input; besides, the block at work has its inside."""
        limit = (5 + 2) * one_input(large_inputs(device)) + inside(answer, device)
        cause = (
            "the insides of several blocks are there at once, or more than inputs is held: one"
            " checkpoint around everything, or one for each layer"
        )
        given = (limit, "(5 + 2) inputs + 1 inside", answer, reference)
        check_model(peak, 5, 1, case, *given, device=device, cause=cause)

    @pytest.mark.saves("LargeModel", "held")
    @pytest.mark.parametrize("case", ["plain", "x without gradient", "frozen biases"])
    def test_holds_one_input_a_block_between_the_passes(self, answer, reference, device, case):
        """Of 5 blocks 4 inputs, as x is the baseline's, and the output. The bar adds 2; the inside
        of a single block would be 12 more."""
        given = ((5 + 2) * one_input(large_inputs(device)), "(5 + 2) inputs", answer, reference)
        cause = "a block is not checkpointed, or something of its inside is kept"
        check_model(held, 5, 1, case, *given, device=device, cause=cause)

    @pytest.mark.saves("LargeModel", "held")
    def test_holds_nothing_after_the_backward_pass(self, answer, device):
        x = large_inputs(device)
        for size in (1, 2):
            model = answer.LargeModel(5, WIDTH, segment_size=size).to(device)
            check_nothing_left(model, x, lambda model=model: model(x))


def _first_in_eval(model):
    model.layers[0].eval()
    return model
