"""A model with a checkpoint for each block: precisions, frozen blocks, copies, bad input."""

import copy
from functools import partial
from itertools import product

import pytest
import torch

from kit.laws.checks import check_raises
from specs.checkpointed_model.large import as_without, guarded, large, stepped
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast, twice


class TestPart1LargeModelDetails:
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
        for numbers, size, grad in (
            ("0", 1, False),
            ("01", 2, False),
            ("12", 1, True),
            ("02", 2, True),
            ("02", 1, False),
            ("012", 2, True),
            ("012", 1, False),
        ):
            name = f"frozen are {[*numbers]}, segments of {size}, x with gradient: {grad}"
            yield name, large(frozen=partial(_in_blocks, numbers), size=size, grad=grad), None

    @pytest.mark.survives("LargeModel", 3)
    @as_without("what the second run needs is kept on the model, where another pass overwrites it")
    def test_several_forward_passes_before_one_backward(self):
        """Micro-batches in one loss, or a siamese model."""
        for size, masks in ((1, 2), (2, 1)):
            name = f"2 passes, {masks} of them with a mask, segments of {size}"
            yield name, large(passes=2, masks=masks, size=size), None

    @pytest.mark.survives("LargeModel", 4)
    @as_without("a reentrant checkpoint, or a Function, knows the first backward() alone")
    def test_gradients_may_be_taken_in_other_ways(self):
        for size in (1, 2):
            yield f"twice, segments of {size}", large(size=size, backward=twice), None
        for order, size in ((1, 1), (2, 2)):
            yield f"autograd.grad {order}, segments of {size}", _of_order(order, size), None

    @pytest.mark.survives("LargeModel", 5)
    @guarded("the second run reads it as it is by then: in a closure, or on the model")
    def test_notices_what_is_changed_between_the_passes(self):
        """Autograd refuses a saved tensor that has changed; a checkpoint saves what it is given."""
        changes = {
            "the input": lambda model, x, mask: x.detach().zero_(),
            "the mask": lambda model, x, mask: mask.logical_not_(),
            "a weight": lambda model, *_: model.layers[1].up.weight.detach().mul_(2),
            "a bias": lambda model, *_: model.layers[0].up.bias.detach().mul_(2),
            "the mode": lambda model, *_: model.eval(),
            "a block's mode": lambda model, *_: model.layers[1].eval(),
        }
        for (what, spoil), size, frozen in product(changes.items(), (1, 2), "10"):
            grad = frozen == "1"  # with block 0 frozen nothing before block 1 has a gradient
            options = {"size": size, "masks": 1, "grad": grad}
            options["frozen"] = partial(_in_blocks, frozen)
            name = f"{what}, segments of {size}, frozen is {frozen}, x with gradient: {grad}"
            yield name, *(large(**options, spoil=s) for s in (spoil, None))
        held = []

        def spoilt_between(loss):
            loss.backward(retain_graph=True)
            held[-1].layers[1].up.weight.detach().mul_(2)
            loss.backward()

        spoilt = large(spoil=lambda model, *_: held.append(model), backward=spoilt_between)
        yield "a weight, between two backward passes", spoilt, large(backward=twice)

    @pytest.mark.survives("LargeModel", 6)
    @as_without("something made in __init__, or in a step, still holds the original's blocks")
    def test_a_copy_is_a_model_of_its_own(self):
        """facebookresearch/fairscale#816: a copy that goes on calling the original's blocks."""
        for size, steps in ((1, 0), (2, 1)):
            name = f"segments of {size}, copied after {steps} steps"
            yield name, large(size=size, before=partial(_copied, steps)), None

    @pytest.mark.survives("LargeModel", 7)
    @as_without("the switch, or the size, is read when the model is made and not when it runs")
    def test_follows_switches_that_are_set_later(self):
        yield "switched on", large(use=False, before=_then(use_checkpoint=True))
        yield "switched off", large(before=_then(use_checkpoint=False)), 1
        yield "eval after training", large(before=_then(train=False)), 1
        yield "training after eval", large(train=False, before=_then(train=True))
        yield "segments of 2, then 1", large(size=2, before=_then(segment_size=1))
        for name, value in (("segment_size", 1), ("use_checkpoint", False)):
            spoil = lambda model, *_, given=(name, value): setattr(model, *given)  # noqa: E731
            yield f"{name} between the passes", large(size=2, spoil=spoil), None

    @pytest.mark.survives("LargeModel", "Raises")
    def test_refuses_numbers_out_of_range(self, answer):
        bad = {"num_layers": (0, -3), "hidden_dim": (0, -2), "dropout": (-0.25, 1.75)}
        for name, values in {**bad, "segment_size": (0, -1, 6)}.items():
            for value in values:
                given = {"num_layers": 5, "hidden_dim": WIDTH, name: value}
                call, when = partial(answer.LargeModel, **given), f"for LargeModel with {given}"
                check_raises(call, ValueError, mentions=[value], when=when)

    @pytest.mark.survives("LargeModel", 7)
    @pytest.mark.parametrize("size", [0, -1, 4])
    def test_refuses_a_size_out_of_range_that_is_set_later(self, answer, size):
        for way, train, use in (
            ("", True, True),
            (" in eval mode", False, True),
            (" unused", True, False),
        ):
            model = answer.LargeModel(3, WIDTH, use_checkpoint=use).train(train)

            def call(model=model):
                model.segment_size = size
                model(torch.ones(SHAPE))

            when = f"for segment_size={size}, set later{way}"
            check_raises(call, ValueError, mentions=[size], when=when)
            if model.segment_size == size:  # it was not refused when it was set
                call = partial(model, torch.ones(SHAPE))
                check_raises(call, ValueError, mentions=[size], when=f"{when}, in a later forward")

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


def _of_order(order, size):
    """Gradients by torch.autograd.grad, or the gradient of a penalty on them."""

    def build(answer, device, is_answer):
        step = large(size=size)(answer, device, is_answer)
        leaves = [*step.model.parameters(), *step.leaves]

        def backward(loss):
            grads = torch.autograd.grad(loss, leaves, create_graph=order == 2)
            if order == 2:
                torch.stack([g.square().sum() for g in grads]).sum().backward()
            else:
                for leaf, grad in zip(leaves, grads, strict=True):
                    leaf.grad = grad

        step.backward = backward
        return step

    return build


def _in_blocks(numbers, name):
    return name.startswith(tuple(f"layers.{n}." for n in numbers))


def _copied(steps, model):
    """A copy, with other weights, of a model that has made some steps."""
    for _ in range(steps):
        stepped(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    return twin


def _then(train=None, **values):
    """Changes after a step."""

    def before(model):
        stepped(model)
        for name, value in values.items():
            setattr(model, name, value)
        return model if train is None else model.train(train)

    return before
