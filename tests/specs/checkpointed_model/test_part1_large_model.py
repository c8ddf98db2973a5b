"""A model with a checkpoint for each block: values, runs, the same bits, and bytes."""

import copy
from functools import partial
from itertools import product
from math import nan

import pytest
import torch
import torch.nn.functional as F

from kit.laws import draw
from kit.laws.checks import check_close, check_equal, check_raises
from kit.laws.scenarios import scenarios
from specs.checkpointed_model.large import (
    FROZEN,
    RETAINED,
    as_without,
    check_model,
    check_nothing_left,
    guarded,
    held,
    large,
    large_inputs,
    peak,
    replaced,
    stepped,
    twin_of,
)
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast, twice


def computed(block, x, mask=None):
    """What a block computes, from its weights."""
    hidden = F.relu(F.linear(x, block.up.weight, block.up.bias))
    hidden = F.dropout(hidden, block.dropout.p, block.training)
    update = F.linear(hidden, block.down.weight, block.down.bias)
    return x + (update if mask is None else torch.where(mask.unsqueeze(-1), update, 0.0))


def by_hand(*given):
    return computed(*given).detach()


def gradients(block, x, run):
    """Of the input, and of the parameters by name."""
    draw.seed(3)
    leaves = {"x": x.detach().requires_grad_(), **dict(block.named_parameters())}
    loss = run(leaves["x"]).float().square().sum()
    found = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def check_gradients(block, x, mask=None):
    __tracebackhide__ = True
    got = gradients(block, x, lambda x: block(x, mask=mask))
    for name, want in gradients(block, x, lambda x: computed(block, x, mask)).items():
        cause = "the input, or the update, is cut off from its graph"
        check_close(got[name], want, f"gradient of {name}", cause=cause, rtol=1e-4, atol=1e-6)


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
        order = ["up", "relu", "dropout", "down"]
        if ran != order and sorted(ran) == sorted(order):
            suspects[f"the layers run in another order: {', '.join(ran)}"] = got
        cause = "something is left out, or another is put in"
        check_close(got, want, "output", cause=cause, suspects=suspects)
        cause = "a layer has another name, or is a function where the contract has a child"
        check_equal(ran, order, "children that run", cause=cause)
        if how != "autocast":
            check_gradients(block.train(how != "eval"), x)

    @pytest.mark.works("MemoryIntensiveBlock", "mask")
    def test_a_mask_lets_the_input_through(self, answer, device):
        block = answer.MemoryIntensiveBlock(WIDTH, dropout=0.0).to(device)
        x, mask = draw.randn(*SHAPE, device=device), draw.rand(*SHAPE[:2], device=device) < 0.6
        suspects = {"the mask is turned round": by_hand(block, x, ~mask)}
        suspects["the mask is not used"] = by_hand(block, x)
        masked = by_hand(block, x).where(mask.unsqueeze(-1), torch.zeros_like(x))
        suspects["the whole output is masked, and not the update alone"] = masked
        want, cause = by_hand(block, x, mask), "something else is masked than the update"
        check_close(block(x, mask=mask), want, "output", cause=cause, suspects=suspects)
        check_gradients(block, x, mask)
        want, cause = by_hand(block, x, mask.logical_not_()), "the mask of the call before is used"
        check_close(block(x, mask=mask), want, "output, the mask filled anew", cause=cause)
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
        yield "LargeModel(2, 1, dropout=1.0, segment_size=2)", 26, [1.0] * 2

    @pytest.mark.exact("LargeModel", "runs")
    @as_without("it is not asked at each call whether to checkpoint, or not in this case")
    def test_each_block_runs_once_more(self):
        """Once in the forward pass, once in the backward pass; once in all in eval mode."""
        yield "11 blocks", large(11)
        yield "a mask", large(masks=1)
        yield "autocast", large(outer=autocast(torch.bfloat16))
        yield "float64", large(dtype=torch.float64)
        biases = lambda name: name.endswith("bias")  # noqa: E731
        yield "frozen biases, x without gradient", large(frozen=biases, grad=False)
        in_eval = lambda model: model.layers[0].eval() and None  # noqa: E731
        yield "the first block in eval mode", large(before=in_eval)
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
        yield "a hook that changes what a block gives", large(before=_hooked)

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
        check_model(peak, 5, 1, case, 5 + 2, "5 + 2", answer, reference, device)

    @pytest.mark.saves("LargeModel", "held")
    @pytest.mark.parametrize("case", ["plain", FROZEN, "frozen biases"])
    def test_holds_one_input_a_block_between_the_passes(self, answer, reference, device, case):
        """Of 5 blocks 4 inputs, as x is the baseline's, and the output. The bar adds 2; the inside
        of a single block would be 12 more."""
        cause = "a block is not checkpointed, or something of its inside is kept"
        check_model(held, 5, 1, case, 5 + 2, "5 + 2", answer, reference, device, cause)

    @pytest.mark.saves("LargeModel", "held")
    def test_holds_nothing_after_the_backward_pass(self, answer, device):
        x, model = large_inputs(device), answer.LargeModel(5, WIDTH).to(device)
        check_nothing_left(model, x, lambda: model(x))

    @pytest.mark.survives("LargeModel", 1)
    @as_without("the second run is without autocast, or has its default dtype")
    def test_recomputes_in_the_precision_of_the_forward_pass(self):
        """The backward pass is outside autocast. pytorch/pytorch#71124: the dtype was lost."""
        bfloat, half = map(autocast, HALVES)
        yield "bfloat16, segments of 2", large(outer=bfloat, size=2), None
        yield "float16", large(outer=half)
        yield "float16, x without gradient", large(outer=half, grad=False, masks=1)

    @pytest.mark.survives("LargeModel", 2)
    @as_without("requires_grad is changed, or asked for, to please the checkpoint")
    def test_trains_around_frozen_blocks(self):
        """huggingface/transformers#23170. Before the first trained block nothing runs again."""
        for numbers, size, grad in (("0", 1, False), ("12", 1, True), ("02", 2, True)):
            name = f"frozen are {[*numbers]}, segments of {size}, x with gradient: {grad}"
            yield name, large(frozen=partial(_in_blocks, numbers), size=size, grad=grad), None
        for size in (1, 2):
            frozen = large(frozen=lambda name: True, size=size)
            yield f"all are frozen, segments of {size}", frozen, None
        yield "all are frozen, x too", large(frozen=lambda name: True, grad=False), None

    @pytest.mark.survives("LargeModel", 3)
    @as_without("what the second run needs is kept on the model, where another pass overwrites it")
    def test_several_forward_passes_before_one_backward(self):
        """Micro-batches in one loss, or a siamese model."""
        yield "2 passes, 2 of them with a mask", large(passes=2, masks=2), None
        yield "segments of 2, one pass with a mask", large(passes=2, masks=1, size=2), None
        yield "under one autocast", large(passes=2, outer=autocast(HALVES[0])), None

    @pytest.mark.survives("LargeModel", 4)
    @as_without("a reentrant checkpoint, or a Function, knows the first backward() alone")
    def test_gradients_may_be_taken_in_other_ways(self):
        for size in (1, 2):
            yield f"twice, segments of {size}", large(size=size, backward=twice), None
            yield f"a penalty on gradients, segments of {size}", _penalised(size), None, True

    @pytest.mark.survives("LargeModel", 5)
    @guarded(
        "the second run uses what is there by then, and nobody has looked whether it was changed"
    )
    def test_notices_what_is_changed_between_the_passes(self):
        """Autograd refuses a saved tensor that has changed; a checkpoint saves what it is given."""
        changes = {
            "the input": lambda model, x, mask: x.detach().zero_(),
            "the mask": lambda model, x, mask: mask.logical_not_(),
            "a weight": lambda model, *_: model.layers[1].up.weight.detach().mul_(2),
            "a bias": lambda model, *_: model.layers[0].up.bias.detach().mul_(2),
            "the mode": lambda model, *_: model.eval(),
            "a block's mode": lambda model, *_: model.layers[1].eval(),
            "a dropout's mode": lambda model, *_: model.layers[1].dropout.eval(),
        }
        for (what, spoil), size, frozen in product(changes.items(), (1, 2), "10"):
            grad = frozen == "1"  # with block 0 frozen nothing before block 1 has a gradient
            options = {"size": size, "masks": 1, "grad": grad}
            options["frozen"] = partial(_in_blocks, frozen)
            name = f"{what}, segments of {size}, frozen is {frozen}, x with gradient: {grad}"
            yield name, *(large(**options, spoil=s) for s in (spoil, None))
        seldom = partial(large, before=_updated_but_one, spoil=changes["a weight"])
        for size in (1, 2):
            pair = seldom(size=size), large(size=size, before=_updated_but_one)
            yield f"a weight that is updated less often than others, segments of {size}", *pair
            for of, before in {"a deep copy": copy.deepcopy, "a new layer": replaced}.items():
                other = partial(large, size=size, before=before)
                name = f"a weight of {of}, segments of {size}"
                yield name, other(spoil=changes["a weight"]), other()
        held = []

        def spoilt_between(loss):
            loss.backward(retain_graph=True)
            held[-1].layers[1].up.weight.detach().mul_(2)
            loss.backward()

        bias = lambda model: model.layers[1].up.bias.detach().add_(2)  # noqa: E731
        for size in (1, 2):
            options = {"size": size, "spoil": lambda model, *_: held.append(model)}
            spoilt = large(**options, backward=spoilt_between)
            name = f"a weight, between two backward passes, segments of {size}"
            yield name, spoilt, large(size=size, backward=twice)
            moved = large(size=size, passes=2, meanwhile=bias)
            yield f"a bias, between two forward passes, segments of {size}", moved, moved

    @pytest.mark.survives("LargeModel", 6)
    @as_without("something made in __init__, or in a step, still holds the original's blocks")
    def test_a_copy_is_a_model_of_its_own(self):
        """facebookresearch/fairscale#816: a copy that goes on calling the original's blocks."""
        for size in (1, 2):
            yield f"segments of {size}", large(size=size, before=_copied), None

    @pytest.mark.survives("LargeModel", 7)
    @as_without("the switch, or the size, is read when the model is made, or in the second run too")
    def test_follows_switches_that_are_set_later(self):
        yield "switched on", large(use=False, before=partial(_then, use_checkpoint=True))
        yield "switched off", large(before=partial(_then, use_checkpoint=False)), 1
        yield "segments of 2, then 1", large(size=2, before=partial(_then, segment_size=1))
        for name, value in (("segment_size", 1), ("use_checkpoint", False)):
            spoil = lambda model, *_, given=(name, value): setattr(model, *given)  # noqa: E731
            yield f"{name} between the passes", large(size=2, spoil=spoil), None

    @pytest.mark.survives("LargeModel", "Raises")
    def test_refuses_numbers_out_of_range(self, answer):
        bad = {"num_layers": (0, -3), "hidden_dim": (0, -2), "dropout": (-0.25, 1.75, nan)}
        for name, values in {**bad, "segment_size": (0, -1, 6)}.items():
            for value in values:
                given = {"num_layers": 5, "hidden_dim": WIDTH, name: value}
                call, when = partial(answer.LargeModel, **given), f"for LargeModel with {given}"
                check_raises(call, ValueError, mentions=[value], when=when)

    @pytest.mark.survives("LargeModel", 7)
    @pytest.mark.parametrize("size", [0, -1, 4])
    def test_refuses_a_size_out_of_range_that_is_set_later(self, answer, size):
        for train, use in ((True, True), (False, True), (True, False)):
            model = answer.LargeModel(3, WIDTH, use_checkpoint=use).train(train)

            def call(model=model):
                model.segment_size = size
                model(torch.ones(SHAPE))

            when = f"for segment_size={size}, set later, training: {train}, use_checkpoint: {use}"
            check_raises(call, ValueError, mentions=[size], when=when)

    @pytest.mark.survives("MemoryIntensiveBlock", "Raises")
    @pytest.mark.parametrize("width", [0, -2])
    def test_a_block_refuses_to_have_no_width(self, answer, width):
        call, when = partial(answer.MemoryIntensiveBlock, width), f"for a width of {width}"
        check_raises(call, ValueError, mentions=[width], when=when)

    @pytest.mark.survives("LargeModel.forward", "Raises")
    @pytest.mark.parametrize("train", [True, False], ids=["training", "eval"])
    def test_refuses_wrong_shapes(self, answer, device, train):
        model, x = answer.LargeModel(3, WIDTH).to(device).train(train), torch.ones(SHAPE).to(device)
        for shape in ((3, 5, 23), (3, 5, 9), (5, WIDTH), (2, 3, 5, WIDTH)):
            call, when = partial(model, x.new_ones(shape)), f"for x of shape {shape}"
            check_raises(call, ValueError, mentions=[str(shape)[1:-1]], when=when)
        for shape in ((5, 3), (5,), (3, 5, 1), (1, 5), (3, 1)):
            call = partial(model, x, mask=x.new_ones(shape) > 0)
            when, shown = f"for x of shape {SHAPE} and a mask of shape {shape}", str(shape)[1:-1]
            check_raises(call, ValueError, mentions=[shown.rstrip(",")], when=when)


def _penalised(size):
    """The gradient of a penalty on gradients, which torch.autograd.grad has given."""

    def build(*given):
        step = large(size=size)(*given)
        leaves = [*step.model.parameters(), *step.leaves]

        def backward(loss):
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            torch.stack([g.square().sum() for g in grads]).sum().backward()

        step.backward = backward
        return step

    return build


@torch.no_grad()
def _updated_but_one(model):
    """All but the second block's first weight, as where that was frozen until now."""
    for p in model.parameters():
        for _ in range(3 if p is not model.layers[1].up.weight else 0):
            p.mul_(1)


def _in_blocks(numbers, name):
    return name.startswith(tuple(f"layers.{n}." for n in numbers))


def _hooked(model):
    model.layers[1].register_forward_hook(lambda block, args, out: out * 1.5)


def _copied(model):
    """A copy, with other weights, of a model that has made a step."""
    stepped(model)
    return twin_of(model)


def _then(model, **values):
    """Changes after a step."""
    stepped(model)
    for name, value in values.items():
        setattr(model, name, value)
