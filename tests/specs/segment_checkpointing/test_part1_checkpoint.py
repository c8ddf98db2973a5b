"""A checkpoint and the plain call, side by side: results, gradients, runs and bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_equal
from kit.laws.toys import mlp
from kit.memory.ruler import measure
from specs.segment_checkpointing.common import (
    chain,
    check_not_torchs_own,
    check_same,
    loss_of,
    peak_of,
    plain_call,
    plain_peak,
    train,
    wide_blocks,
    zero_grads,
)

Call = Callable[..., Tensor]  # the checkpoint, or plain_call in its place
Case = tuple[Callable[[Call], Tensor], dict[str, Tensor]]  # a loss, and the leaves it reaches


def _module(device: torch.device) -> Case:
    model, x = mlp(7, 13, 5, device=device), _leaf(11, 7, device=device)
    return lambda call: loss_of(call(model, x)), {"x": x, **dict(model.named_parameters())}


def _no_module(device: torch.device) -> Case:
    weight, x = _leaf(7, 3, device=device), _leaf(11, 7, device=device)
    return lambda call: loss_of(call(lambda t: (t @ weight).tanh(), x)), {"x": x, "weight": weight}


def _two_arguments(device: torch.device) -> Case:
    x, weight, fixed = _leaf(11, 7, device=device), _leaf(7, 3, device=device), torch.ones(3)
    fixed = fixed.to(device)
    return (
        lambda call: loss_of(call(lambda a, b, c: (a + (c @ b.t())).exp(), x, weight, fixed)),
        {"x": x, "weight": weight, "fixed (which needs none)": fixed},
    )


def _one_twice(device: torch.device) -> Case:
    x = _leaf(11, 7, device=device)
    return lambda call: loss_of(call(lambda a, b: a.sin() * b, x, x)), {"x": x}


def _unused(device: torch.device) -> Case:
    x, other = _leaf(11, 7, device=device), _leaf(2, 3, device=device)
    return lambda call: loss_of(call(lambda a, _: a.sin(), x, other)), {"x": x, "unused": other}


def _tied(device: torch.device) -> Case:
    layer, x = nn.Linear(7, 7).to(device), _leaf(11, 7, device=device)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    return lambda call: loss_of(call(model, x)), {"x": x, **dict(layer.named_parameters())}


def _frozen(device: torch.device) -> Case:
    model, x = mlp(7, 13, 9, 5, device=device), _leaf(11, 7, device=device)
    model[2].requires_grad_(False)
    return lambda call: loss_of(call(model, x)), {"x": x, **dict(model.named_parameters())}


def _in_a_row(device: torch.device) -> Case:
    layers, x = [nn.Linear(7, 7).to(device) for _ in range(4)], _leaf(11, 7, device=device)

    def loss(call: Call) -> Tensor:
        out = call(layers[1], layers[0](x).tanh())
        return loss_of(layers[3](call(nn.Sequential(layers[2], nn.Tanh()), out)))

    return loss, {"x": x, **dict(nn.ModuleList(layers).named_parameters())}


def _used_outside_too(device: torch.device) -> Case:
    layer, x = nn.Linear(7, 7).to(device), _leaf(11, 7, device=device)
    return (
        lambda call: loss_of(x + call(lambda a: layer(a).tanh(), x)) + layer.weight.square().sum(),
        {"x": x, **dict(layer.named_parameters())},
    )


def _many(device: torch.device) -> Case:
    """test_checkpointing of torch's test_autograd: one module, many checkpoints in one graph."""
    layer, x = nn.Linear(1, 3).to(device), _leaf(40, 1, device=device)
    return (
        lambda call: loss_of(torch.stack([call(lambda a: layer(a).exp(), row) for row in x])),
        {"x": x},
    )


CASES = {
    "a_module": _module,
    "a_function_that_uses_a_leaf": _no_module,
    "several_arguments": _two_arguments,
    "one_argument_twice": _one_twice,
    "an_unused_argument": _unused,
    "a_layer_used_twice": _tied,
    "a_frozen_layer": _frozen,
    "checkpoints_in_a_row": _in_a_row,
    "used_outside_too": _used_outside_too,
    "many_in_one_graph": _many,
}


def _leaf(*shape: int, device: torch.device) -> Tensor:
    return draw.randn(*shape, device=device).requires_grad_()


class TestPart1Checkpoint:
    subject = "checkpoint"

    @pytest.mark.works
    def test_gives_the_result_and_a_gradient_to_everything(self, answer, device):
        """Behaviour: test_checkpoint of torch's test_utils."""
        loss, leaves = _module(device)
        want = train(lambda: loss(plain_call), leaves)
        got = train(lambda: loss(answer.checkpoint), leaves)
        check_same(got, want, cause=_lost)

    @pytest.mark.works
    def test_runs_once_forward_and_once_more_backward(self, answer, device):
        """Behaviour: test_checkpoint_trigger of torch's test_utils."""
        layers, log = chain(1, device)
        out = answer.checkpoint(layers[0], _leaf(3, 5, device=device))
        check_equal(len(log), 1, "runs in the forward pass", cause="it runs twice at once")
        loss_of(out).backward()
        cause = "nothing is run again, so everything was kept" if len(log) < 2 else "once is enough"
        check_equal(len(log), 2, "runs after the backward pass", cause=cause)

    @pytest.mark.works
    def test_is_not_torchs_own(self, answer, device):
        model, x = mlp(7, 13, 5, device=device), _leaf(11, 7, device=device)
        check_not_torchs_own(lambda: loss_of(answer.checkpoint(model, x)).backward())

    @pytest.mark.exact
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_loss_and_gradients_are_the_plain_ones_to_the_bit(self, answer, device, case):
        """Running the same operations again gives the same bits.

        test_checkpoint and test_checkpointing_without_reentrant_correct_grad of torch's tests.
        """
        draw.seed(3)
        loss, leaves = case(device)
        want = train(lambda: loss(plain_call), leaves)
        check_same(train(lambda: loss(answer.checkpoint), leaves), want, cause=_values)

    @pytest.mark.exact
    @pytest.mark.parametrize("kind", ["numbers", "indices"])
    def test_parameters_get_gradients_though_no_argument_needs_one(self, answer, device, kind):
        """The first layer's input is data (pytorch#6884, pytorch#7617).

        Behaviour: test_checkpointing_without_reentrant[input_requires_grad=False] of torch.
        """
        if kind == "numbers":
            model, x = mlp(7, 13, 5, device=device), draw.randn(11, 7, device=device)
        else:
            model = nn.Sequential(nn.Embedding(17, 7), nn.Tanh()).to(device)
            x = draw.randint(17, (4, 3), device=device)
        out = answer.checkpoint(model, x)
        check(out.requires_grad, expected="an output with a graph", got="none", cause=_anchor)
        leaves = dict(model.named_parameters())
        want = train(lambda: loss_of(model(x)), leaves)
        got = train(lambda: loss_of(answer.checkpoint(model, x)), leaves)
        check_same(got, want, cause=_anchor)

    @pytest.mark.exact
    def test_adds_to_the_gradients_that_are_there(self, answer, device):
        model, x = mlp(7, 13, 5, device=device), _leaf(11, 7, device=device)
        leaves = {"x": x, **dict(model.named_parameters())}

        def twice(call: Call) -> Tensor:
            loss_of(model(x)).backward()
            return loss_of(call(model, x))

        want = train(lambda: twice(plain_call), leaves)
        cause = "gradients are set, not added to those of an earlier backward pass"
        check_same(train(lambda: twice(answer.checkpoint), leaves), want, cause=cause)

    @pytest.mark.saves
    def test_keeps_its_arguments_and_nothing_else(self, answer, reference, device):
        """Alive after the forward pass: the argument, which only the graph knows, and the loss.

        Bar: the argument + 8 KiB for the loss, a random state, and what the answer needs of that
        kind. The output is of another size, 24 KiB, and `sum` does not need it.
        """
        model, x = mlp(32, 256, 48, device=device), draw.randn(128, 32, device=device)
        x.requires_grad_()

        def held(call: Call) -> int:
            kept: list[Tensor] = []
            return measure(
                lambda: kept.append(call(model, x * 2).sum()), device, known=[model, x]
            ).retained

        check_bar(
            "bytes between forward and backward",
            held(answer.checkpoint),
            x.nbytes + 8192,
            plain=held(plain_call),
            reference=held(reference.checkpoint),
            formula="one argument + 8 KiB",
            cause=_kept,
        )

    @pytest.mark.saves
    def test_the_peak_is_one_block_and_an_input_for_each_of_the_others(
        self, answer, reference, device
    ):
        """Six blocks with a checkpoint each.

        Bar: 6 outputs, and 3 more of that size (the gradient on its way, an output that is there
        again, and one to spare) + the plain peak of one block.
        """
        blocks, x = wide_blocks(6, device), _leaf(128, 32, device=device)
        known = zero_grads(blocks, x)

        def peak(call: Call) -> int:
            def step() -> None:
                y = x
                for block in blocks:
                    y = call(block, y)
                loss_of(y).backward()

            return peak_of(step, known, device)

        check_bar(
            "peak of 6 checkpointed blocks",
            peak(answer.checkpoint),
            (6 + 3) * x.nbytes + plain_peak(blocks[:1], x),
            plain=plain_peak(blocks, x),
            reference=peak(reference.checkpoint),
            formula="6 + 3 inputs + one block's plain peak",
            cause="the graph of the first run is kept: it must run without gradients; or the "
            "second run's in a cycle of references",
        )

    @pytest.mark.saves
    def test_the_backward_pass_frees_what_was_kept(self, answer, reference, device):
        """After it, with the output still in hand: the output, and no argument.

        Bar: the output + 8 KiB. The argument has 32 KiB.
        """
        model, x = mlp(32, 64, 48, device=device), draw.randn(256, 32, device=device)
        known = zero_grads(model, x.requires_grad_())

        def left(call: Call) -> int:
            kept: list[Tensor] = []

            def step() -> None:
                kept.append(call(model, x * 2))
                loss_of(kept[0]).backward()

            return measure(step, device, known=known).retained

        check_bar(
            "bytes after the backward pass",
            left(answer.checkpoint),
            256 * 48 * 4 + 8192,
            plain=left(plain_call),
            reference=left(reference.checkpoint),
            formula="the output + 8 KiB",
            cause="the arguments hang on the graph's node: save_for_backward would free them",
        )


_lost = (
    "the graph is cut at the argument and never joined again, or the second run's gradients go "
    "to the arguments only: the parameters inside need backward(), not grad()"
)
_values = "the second run is not the first one's, or a gradient lands with the wrong argument"
_anchor = "a Function none of whose inputs needs a gradient is left out of the graph"
_kept = "the first run builds a graph, or the outputs are kept with the arguments"
