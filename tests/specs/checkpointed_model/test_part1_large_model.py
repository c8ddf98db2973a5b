"""A model with a checkpoint for each block: values, runs, the same bits, and bytes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kit.laws import draw
from kit.laws.checks import check_equal, check_raises
from kit.laws.scenarios import scenarios
from specs.checkpointed_model.large import (
    FROZEN,
    RETAINED,
    as_without,
    check_model,
    check_nothing_left,
    held,
    large,
    large_inputs,
    peak,
    stepped,
)
from specs.checkpointed_model.steps import (
    HALVES,
    SHAPE,
    WIDTH,
    autocast,
    draw_on,
    under_autocast,
)


def by_hand(block, x, mask):
    """What a block computes, from its weights, and the children that run."""
    hidden = F.relu(F.linear(x, block.up.weight, block.up.bias))
    hidden = F.dropout(hidden, block.dropout.p, block.training)
    update = F.linear(hidden, block.down.weight, block.down.bias)
    return x + (update if mask is None else torch.where(mask.unsqueeze(-1), update, 0.0))


def nearly(got, want):
    """The same, with the other's gradients where they differ by rounding only."""
    alike = lambda k: k.startswith("gradient") and torch.allclose(got[k], want[k], 1e-4, 1e-6)  # noqa: E731
    return {k: want[k] if alike(k) else got[k] for k in got}


@scenarios("the block")
def computed(answer, device, name, how="training", masked=False, factor=1.0):
    """Where the mask is False, x is at most 1 in size, times `factor`."""
    block, ran = answer.MemoryIntensiveBlock(WIDTH, dropout=0.25).to(device), []
    for child, module in block.train(how != "eval").named_children():
        module.register_forward_hook(lambda *_, child=child: ran.append(child))
    x = draw.randn(*SHAPE, device=device).transpose(0, 1)
    mask = draw.rand(*x.shape[:2], device=device) < 0.6 if masked else None
    x = torch.where(mask.unsqueeze(-1), x, x.clamp(-1, 1) * factor) if masked else x
    if factor != 1.0:
        block.up.weight.data *= 100  # so that the update overflows
    leaves = {"x": x.requires_grad_(), **dict(block.named_parameters())}

    def seen(run):
        draw.seed(3)
        with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
            output = run()
        if factor != 1.0:
            return {"x comes through": torch.equal(output[~mask], x[~mask])}
        loss = output.float().square().sum()
        grads = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
        found = {f"gradient of {k}": g for k, g in zip(leaves, grads, strict=True)}
        return {"dtype": output.dtype, "output": output.detach(), **found}

    got, want = seen(lambda: block(x, mask=mask)), seen(lambda: by_hand(block, x, mask))
    key, children = "children that run", ["up", "relu", "dropout", "down"]
    return nearly(got, want) | {key: ran}, want | {key: children}


class TestPart1LargeModel:
    @pytest.mark.works("MemoryIntensiveBlock", "children")
    @computed("a layer is missing, extra or misnamed, or is a function and not a child module")
    def test_a_block_adds_its_feed_forward_to_its_input(self):
        for how in ("training", "eval", "autocast"):
            yield how, how

    @pytest.mark.works("MemoryIntensiveBlock", "mask")
    @computed("something other than the update is masked, or the input loses its gradient")
    def test_a_mask_lets_the_input_through(self):
        yield "a mask", "training", True
        yield "large finite inputs whose update overflows", "eval", True, 3e38

    @pytest.mark.works("LargeModel", "num_layers")
    def test_each_layer_has_its_own_weights(self, answer):
        """A block has 4 * n * n weights twice, and biases of 4 * n and n."""
        model, one = answer.LargeModel(5, WIDTH, dropout=0.25), 8 * WIDTH * WIDTH + 5 * WIDTH
        suspects = {"[block] * n is one block": one}
        count = sum(p.numel() for p in model.parameters())
        cause = "a block is missing, has another inner width or another dropout rate"
        check_equal(count, 5 * one, "number of parameters", cause=cause, suspects=suspects)
        rates = [block.dropout.p for block in (*model.layers, *answer.LargeModel(1, WIDTH).layers)]
        check_equal(rates, [0.25] * 5 + [0.1], "dropout of each block", cause=cause)

    @pytest.mark.exact("LargeModel", "runs")
    @as_without("whether to checkpoint is not decided at each call, or this case was forgotten")
    def test_each_block_runs_once_more(self):
        yield "11 blocks", large(11)
        yield "a mask", large(masks=1)
        yield "autocast", large(outer=autocast(torch.bfloat16))
        biases = lambda name: name.endswith("bias")  # noqa: E731
        yield "frozen biases, x without gradient", large(frozen=biases, grad=False)
        late = lambda name: name.startswith("layers.2.")  # noqa: E731
        yield "frozen blocks that gradients pass", large(frozen=late)
        yield "eval", large(train=False), 1
        yield "switched off", large(use=False), 1
        yield "no_grad", large(outer=torch.no_grad), 1

    @pytest.mark.exact("LargeModel", "same bits")
    @as_without("the second run draws other numbers, or does not restore the random stream")
    def test_changes_no_bit(self):
        """huggingface/transformers#26221: a reentrant checkpoint loses gradients of parameters."""
        yield "x without gradient", large(grad=False)
        yield "one block, a mask, no dropout", large(1, masks=1, dropout=0.0)
        halve = lambda block, args, output: output / 2  # noqa: E731
        hooked = lambda model: model.layers[1].register_forward_hook(halve)  # noqa: E731
        yield "a hook that changes what a block gives", large(before=hooked)

    @pytest.mark.exact("LargeModel", "keys")
    def test_state_dict_has_only_the_blocks_keys(self, answer):
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
        """n blocks: n - 1 inputs (x is in the baseline), the output, its gradient, the gradient of
        a block's input, and the inside of the block at work."""
        check_model(peak, 5, 1, case, 5 + 2, "5 + 2", answer, reference, device)

    @pytest.mark.saves("LargeModel", "held")
    @pytest.mark.parametrize("case", ["plain", FROZEN])
    def test_holds_one_input_a_block_between_the_passes(self, answer, reference, device, case):
        """5 blocks: 4 inputs (x is in the baseline) and the output. The bar adds 2; a single
        block's inside would be 12 more."""
        cause = "a block is not checkpointed, or part of its inside is kept"
        check_model(held, 5, 1, case, 5 + 2, "5 + 2", answer, reference, device, cause)

    @pytest.mark.saves("LargeModel", "held")
    def test_holds_nothing_after_the_backward_pass(self, answer, device):
        x, model = large_inputs(device), answer.LargeModel(5, WIDTH).to(device)
        check_nothing_left(model, x, lambda: model(x))

    @pytest.mark.survives("LargeModel", 1)
    @as_without("the second run has the backward pass's autocast, or its default dtype")
    def test_recomputes_in_the_precision_of_the_forward_pass(self):
        """pytorch/pytorch#71124: the dtype was lost."""
        bfloat, half = map(autocast, HALVES)
        yield "bfloat16, segments of 2", large(outer=bfloat, size=2), None
        yield "float16", large(outer=half)
        yield "the backward pass alone is under it", large(backward=under_autocast)

    @pytest.mark.survives("LargeModel", 2)
    @as_without("requires_grad is changed, or demanded, for the checkpoint's sake")
    def test_trains_around_frozen_blocks(self):
        """huggingface/transformers#23170. Blocks before the first trained one do not run again."""
        for numbers, size, grad in (("0", 1, False), ("12", 1, True), ("02", 2, True)):
            name = f"frozen are {[*numbers]}, segments of {size}, x with gradient: {grad}"
            yield name, large(frozen=partial(_in_blocks, numbers), size=size, grad=grad), None
        yield "all are frozen, segments of 2", large(frozen=lambda name: True, size=2), None
        yield "all are frozen, x too", large(frozen=lambda name: True, grad=False), None

    @pytest.mark.survives("LargeModel", 3)
    @as_without("what the second run needs is kept on the model, where another pass overwrites it")
    def test_several_forward_passes_before_one_backward(self):
        yield "2 passes, 2 of them with a mask", large(passes=2, masks=2), None
        yield "segments of 2, 2 passes with a mask", large(passes=2, masks=2, size=2), None

    @pytest.mark.survives("LargeModel", 4)
    @as_without("a reentrant checkpoint or a custom Function supports one loss.backward() only")
    def test_supports_autograd_grad_and_two_backward_passes(self):
        for size in (1, 2):
            yield f"twice, segments of {size}", large(size=size, late=draw_on), None
            once = large(size=size, backward=_by_grad)
            yield f"torch.autograd.grad, segments of {size}", once, None

    @pytest.mark.survives("LargeModel", 5)
    @as_without("use_checkpoint is read when the model is made")
    def test_follows_a_switch_that_is_set_later(self):
        yield "switched on", large(use=False, before=partial(_switched, True))
        yield "switched off", large(before=partial(_switched, False)), 1

    @pytest.mark.survives("LargeModel", "Raises")
    def test_refuses_numbers_out_of_range(self, answer):
        for name, values in {"num_layers": (0, -3), "segment_size": (0, -1, 6)}.items():
            for value in values:
                given = {"num_layers": 5, "hidden_dim": WIDTH, name: value}
                call, when = partial(answer.LargeModel, **given), f"for LargeModel with {given}"
                check_raises(call, ValueError, mentions=[value], when=when)

    @pytest.mark.survives("LargeModel.forward", "Raises")
    def test_refuses_wrong_shapes(self, answer, device):
        model, x = answer.LargeModel(3, WIDTH).to(device), torch.ones(SHAPE).to(device)
        for shape in ((3, 5, 23), (3, 5, 9), (5, WIDTH), (2, 3, 5, WIDTH)):
            call, when = partial(model, x.new_ones(shape)), f"for x of shape {shape}"
            check_raises(call, ValueError, mentions=[str(shape)[1:-1]], when=when)
        for shape in ((5, 3), (5,), (3, 5, 1), (1, 5), (3, 1)):
            call = partial(model, x, mask=x.new_ones(shape) > 0)
            when, shown = f"for x of shape {SHAPE} and a mask of shape {shape}", str(shape)[1:-1]
            check_raises(call, ValueError, mentions=[shown.rstrip(",")], when=when)


def _by_grad(loss, leaves):
    for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        leaf.grad = grad


def _in_blocks(numbers, name):
    return name.startswith(tuple(f"layers.{n}." for n in numbers))


def _switched(use, model):
    stepped(model)
    model.use_checkpoint = use
