"""Several outputs, checkpoints inside checkpoints, and backward more than once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check_bar, check_equal
from specs.segment_checkpointing.common import (
    big_chain,
    big_input,
    chain,
    check_random,
    check_same,
    loss_of,
    named,
    peak_of,
    plain_call,
    plain_peak,
    run,
    train,
    zero_grads,
)


class TestPart2SecondRunOutputs:
    subject = "checkpoint"

    @pytest.mark.exact
    @pytest.mark.parametrize("used", [0, 1], ids=["first_used", "last_used"])
    def test_an_output_that_is_not_used_gets_no_gradient(self, answer, device, used):
        """sqrt has an infinite derivative at 0, and 0 times infinity is nan."""
        x = torch.tensor([0.0, 1.0, 4.0], device=device, requires_grad=True)

        def function(t: Tensor) -> tuple[Tensor, Tensor]:
            return (t * 3, t.sqrt()) if used == 0 else (t.sqrt(), t * 3)

        answer.checkpoint(function, x)[used].sum().backward()
        cause = "zeros stand in for the gradient that is not there, and are multiplied"
        if x.grad is not None and not x.grad.isnan().any():
            cause = "gradients are handed to the outputs in order, without the one that has none"
        check_equal(x.grad, torch.full_like(x, 3), "gradient of x", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize(
        "function",
        [
            lambda x, w: (x * w).unbind(0),
            lambda x, w: (x * w)[:].relu_(),
            lambda x, w: (x, (x * w).view(-1), x[2:]),
            lambda x, w: (x * w,),
        ],
        ids=["views_of_one_tensor", "a_view_changed_in_place", "the_argument_itself", "a_tuple"],
    )
    def test_outputs_may_be_views_arguments_and_tuples(self, answer, device, function):
        """In-place on a view was lost once in torch (pytorch#26546, pytorch#36383).

        Small integers, and sizes that are powers of two: sums are the same in every order.
        """
        x = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0], [-7.0, 8.0]], device=device)
        x.requires_grad_()
        w = torch.tensor(2.0, device=device, requires_grad=True)

        def loss(call: Callable[..., object]) -> Tensor:
            out = call(function, x, w)
            kinds.append(type(out))
            outputs = out if isinstance(out, tuple) else (out,)
            return sum((n * loss_of(item) for n, item in enumerate(outputs, 1)), w * 0)

        kinds: list[type] = []
        want = train(lambda: loss(plain_call), {"x": x, "w": w})
        got = train(lambda: loss(answer.checkpoint), {"x": x, "w": w})
        check_equal(kinds[1], kinds[0], "type of the result", cause="a tuple is not kept a tuple")
        check_same(got, want, cause=_pairs)

    @pytest.mark.exact
    def test_an_output_may_be_a_parameter_or_a_buffer(self, answer, device):
        """As it leaves the function, and it stays a leaf: training goes on with it."""
        weight = draw.randn(5, device=device, requires_grad=True)
        x, fixed = draw.randn(3, 5, device=device, requires_grad=True), draw.rand(5, device=device)

        def loss(call: Callable[..., tuple[Tensor, ...]]) -> Tensor:
            out, kept, mask = call(lambda t: ((t * weight).exp(), weight, fixed), x)
            cause = "a tensor that is returned as it is becomes part of the graph: detach it"
            check_equal(weight.is_leaf, True, "is_leaf of the parameter", cause=cause)
            check_equal(fixed.requires_grad, False, "requires_grad of the buffer", cause=cause)
            return loss_of(out * mask) + loss_of(kept)

        leaves = {"x": x, "weight": weight, "fixed": fixed}
        want = train(lambda: loss(plain_call), leaves)
        check_same(train(lambda: loss(answer.checkpoint), leaves), want, cause=_pairs)

    @pytest.mark.exact
    def test_a_checkpoint_may_stand_inside_another(self, answer, device):
        """Behaviours: test_nested_checkpoint and _two_children of torch's test_autograd."""
        layers, _ = chain(6, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)

        def loss(call: Callable[..., Tensor]) -> Tensor:
            def inner(y: Tensor) -> Tensor:
                return layers[2](call(layers[1], y))

            def outer(y: Tensor) -> Tensor:
                return layers[4](call(layers[3], call(inner, layers[0](y))))

            return loss_of(layers[5](call(outer, x)))

        leaves = {"x": x, **named(layers)}
        want = train(lambda: loss(plain_call), leaves)
        got = train(lambda: loss(answer.checkpoint), leaves)
        cause = "what one checkpoint keeps is overwritten by another: it belongs on its own node"
        check_same(got, want, cause=cause)
        check_random(got, want, cause=cause)

    @pytest.mark.exact
    def test_backward_may_be_called_again_where_the_graph_is_retained(self, answer, device):
        """One output after the other, and the first once more, with dropout.

        Behaviours: test_checkpoint_non_tensor_inputs_outputs of torch's test_utils, and
        test_nested_checkpoint_reentrant_backwards of its test_autograd.
        """
        layers, _ = chain(2, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}

        def both(y: Tensor) -> tuple[Tensor, Tensor]:
            y = layers[0](y)
            return y, layers[1](y)

        def step(call: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
            first, second = (loss_of(out) for out in call(both, x))
            first.backward(retain_graph=True)
            second.backward(retain_graph=True)
            first.backward()
            return first

        want = run(lambda: step(plain_call), leaves)
        got = run(lambda: step(answer.checkpoint), leaves)
        cause = "the first backward pass uses up what the second one needs"
        check_same(got, want, cause=cause)

    @pytest.mark.saves
    def test_nested_checkpoints_save_at_both_levels(self, answer, reference, device):
        """12 layers: a checkpoint for each 4 of them, inside one around all.

        Bar: 3 inputs of the inner ones, and one more of that size (an output that is there
        again) + the plain peak of 4 layers.
        """
        layers, x = big_chain(12, device), big_input(device)
        known = zero_grads(layers, x)

        def peak(call: Callable[..., Tensor]) -> int:
            def outer(y: Tensor) -> Tensor:
                for start in (0, 4, 8):
                    y = call(nn.Sequential(*layers[start : start + 4]), y)
                return y

            return peak_of(lambda: loss_of(call(outer, x)).backward(), known, device)

        check_bar(
            "peak of 12 layers, nested",
            peak(answer.checkpoint),
            4 * x.nbytes + plain_peak(layers[:4], x),
            plain=plain_peak(layers, x),
            reference=peak(reference.checkpoint),
            formula="4 inputs + the plain peak of 4 layers",
            cause="the inner checkpoints do nothing when they run inside another",
        )


_pairs = "gradients are handed to other outputs than theirs, or an output loses its own"
