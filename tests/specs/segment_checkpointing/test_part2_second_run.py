"""The second run sees what the first one saw: random numbers, autocast, arguments, outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_close, check_equal
from specs.segment_checkpointing.common import (
    Layer,
    chain,
    check_random,
    check_same,
    loss_of,
    named,
    plain_call,
    run,
    train,
)


class _Caster(nn.Module):
    """A linear layer that notes the dtype that autocast gives it each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.dtypes.append(x.dtype)
        return x.exp()


def _mixture(
    a: Tensor, none: None, scale: int, b: Tensor, which: Tensor, name: object
) -> tuple[object, ...]:
    """Tensors and other things in and out, in no particular order."""
    return scale, (a * b).sin() * scale, None, True, a.exp() + b, name, which.flip(0), b[which]


class TestPart2SecondRun:
    subject = "checkpoint"

    @pytest.mark.works
    def test_arguments_and_outputs_may_be_anything(self, answer, device):
        """Behaviours: test_checkpoint_non_tensor, test_checkpoint_non_tensor_inputs_outputs and
        test_nested_checkpoint_non_tensor_inputs_and_outputs of torch's tests."""
        a, b = (draw.randn(5, device=device, requires_grad=True) for _ in range(2))
        which = torch.tensor([3, 1, 3], device=device)

        def loss(call: Callable[..., tuple]) -> Tensor:
            out = call(function, a, None, 3, b, which, name)
            outputs.append(out)
            # Each output with a weight of its own, so that none can stand in for another.
            return out[1].sum() + 5 * out[4].square().sum() + 7 * out[7].sum()

        def function(*args: Any) -> tuple[object, ...]:
            names.append(args[-1])
            return _mixture(*args)

        name, names, outputs = object(), [], []
        want = train(lambda: loss(plain_call), {"a": a, "b": b})
        got = train(lambda: loss(answer.checkpoint), {"a": a, "b": b})
        check_equal(
            [type(item) for item in outputs[1]],
            [type(item) for item in outputs[0]],
            "types of the outputs",
            cause="only tensors come through",
        )
        for place in (0, 2, 3, 5, 6):
            cause = "an output that is not trained does not come through as it is"
            check_equal(outputs[1][place], outputs[0][place], f"output {place}", cause=cause)
        check_same(got, want, cause=_pairs)
        cause = "what is no tensor is copied: the second run gets another object"
        check_equal(names, [name] * 3, "objects that the function was given", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("draws", [0, 3], ids=["at_once", "other_draws_in_between"])
    def test_dropout_drops_the_same_again(self, answer, device, draws):
        """Behaviour: test_checkpoint_rng_cpu of torch's test_utils (pytorch#14253).

        One module, twice: each run has a random state of its own.
        """
        layer = Layer(0, [], 5, dropout=0.4).to(device)
        x = draw.randn(13, 5, device=device, requires_grad=True)

        def loss(call: Callable[..., Tensor]) -> Tensor:
            out = call(layer, torch.nn.functional.dropout(x, 0.3))
            out = loss_of(call(layer, out))
            draw.next_random(device, draws)
            return out

        leaves = {"x": x, **dict(layer.named_parameters())}
        want = train(lambda: loss(plain_call), leaves)
        check_same(train(lambda: loss(answer.checkpoint), leaves), want, cause=_random)

    @pytest.mark.exact
    def test_the_random_stream_goes_on_as_if_nothing_ran_twice(self, answer, device):
        layers, _ = chain(3, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        between: list[Tensor] = []

        def loss(call: Callable[..., Tensor]) -> Tensor:
            out = layers[2](call(layers[1], call(layers[0], x)))
            between.append(draw.next_random(device))
            return loss_of(out)

        want = train(lambda: loss(plain_call), {"x": x})
        got = train(lambda: loss(answer.checkpoint), {"x": x})
        cause = "the first run's draws are taken back, and what follows draws them again"
        check_equal(between[1], between[0], "random numbers after the forward pass", cause=cause)
        cause = "the random state of the forward pass stays in force after the second run"
        check_random(got, want, cause=cause)

    @pytest.mark.gpu
    @pytest.mark.exact
    def test_random_numbers_of_the_gpu_are_the_same_too(self, answer):
        """Behaviour: test_checkpoint_rng_gpu of torch's test_utils."""
        device = torch.device("cuda")
        layers, _ = chain(2, device)
        x = draw.randn(13, 5, device=device, requires_grad=True)
        leaves = {"x": x, **named(layers)}

        def loss(call: Callable[..., Tensor]) -> Tensor:
            out = loss_of(call(layers[1], call(layers[0], x)))
            draw.next_random(device)
            return out

        want = train(lambda: loss(plain_call), leaves)
        got = train(lambda: loss(answer.checkpoint), leaves)
        check_same(got, want, cause="the state of the cuda generator is not restored")
        cause = "the state of the cuda generator is not put back after the second run"
        check_random(got, want, cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_runs_again_in_the_dtype_of_the_first_run(self, answer, device, dtype):
        """backward() is called outside the autocast block (pytorch#71124).

        Behaviour: test_checkpointing_non_reentrant_autocast_cpu and _gpu of torch's test_autograd.
        A wrong dtype changes the gradients by some 0.5 % only, hence the dtypes and the bits.
        """
        before, model = nn.Linear(7, 7).to(device), _Caster().to(device)
        x = draw.randn(11, 7, device=device, requires_grad=True)
        leaves = {"x": x, **named([before, model])}

        def loss(call: Callable[..., Tensor]) -> Tensor:
            out = before(x)  # in float32, and so is its backward pass
            with torch.autocast(device.type, dtype):
                out = call(model, out)
            return loss_of(out)

        want = train(lambda: loss(plain_call), leaves)
        model.dtypes.clear()
        got = train(lambda: loss(answer.checkpoint), leaves)
        check_equal(model.dtypes, [dtype, dtype], "dtypes of the two runs", cause=_autocast)
        check_same(got, want, cause=_autocast)

    @pytest.mark.exact
    def test_runs_again_without_autocast_where_it_was_off(self, answer, device):
        model = _Caster().to(device)
        x = draw.randn(11, 7, device=device, requires_grad=True)
        with torch.autocast(device.type, torch.bfloat16):
            with torch.autocast(device.type, enabled=False):
                loss = loss_of(answer.checkpoint(model, x))
            loss.backward()
        cause = "the second run has the autocast of the backward pass"
        check_equal(model.dtypes, [torch.float32] * 2, "dtypes of the two runs", cause=cause)

    @pytest.mark.exact
    def test_the_backward_pass_itself_is_outside_the_autocast_of_the_first_run(
        self, answer, device
    ):
        """In float32 inside an autocast block: its backward pass is in float32 too."""
        outer, inner = (nn.Linear(7, 7).to(device) for _ in range(2))
        x = draw.randn(11, 7, device=device, requires_grad=True)
        leaves = {"x": x, **named([outer, inner])}

        def function(t: Tensor) -> Tensor:
            t = outer(t)
            with torch.autocast(device.type, enabled=False):
                return inner(t.float()).sin()

        def loss(call: Callable[..., Tensor]) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return loss_of(call(function, x))

        want = train(lambda: loss(plain_call), leaves)
        cause = "backward() runs where autocast is restored for the second run, and is cast"
        check_same(train(lambda: loss(answer.checkpoint), leaves), want, cause=cause)

    @pytest.mark.exact
    def test_a_weight_that_autocast_has_cast_before_gets_its_gradient(self, answer, device):
        """One weight inside and outside the checkpoint, and backward inside the autocast block.

        In torch 2.6 autocast finds the copy of the weight that the first run has cast without a
        graph (pytorch#112583). Held to the float32 gradient, within bfloat16's precision.
        """
        layer = nn.Linear(7, 7).to(device)
        x = draw.randn(11, 7, device=device, requires_grad=True)
        leaves = {"x": x, **dict(layer.named_parameters())}
        want = train(lambda: loss_of(layer(layer(x))), leaves)

        def step() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(layer(answer.checkpoint(layer, x)))
                loss.backward()
            return loss

        got = run(step, leaves)
        for name, grad in want.grads.items():
            value = got.grads[name]
            cause = (
                "one of its two gradients is lost: autocast has a copy without a graph, or not +="
            )
            check(value is not None, expected=f"a gradient for {name}", got="None", cause=cause)
            error = (value - grad).norm() / grad.norm()
            what = f"error of the gradient of {name}, relative to its length,"
            check_close(error, 0.0, what, atol=4 * 2**-8, rtol=0, cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("cached", [True, False], ids=["cached", "not_cached"])
    def test_a_weight_that_is_used_twice_under_autocast_adds_up_in_its_dtype(
        self, answer, device, cached
    ):
        """Autocast casts a weight once and adds the gradients of its uses in 16 bits: to the bit.

        A run that casts at each use, as with cache_enabled=False, adds them in float32.
        """
        layer = nn.Linear(33, 33).to(device)
        x = draw.randn(17, 33, device=device, requires_grad=True)
        leaves = {"x": x, **dict(layer.named_parameters())}

        def loss(call: Callable[..., Tensor]) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=cached):
                out = call(lambda t: layer(layer(t).tanh()), x)
            return loss_of(out)

        want = train(lambda: loss(plain_call), leaves)
        cause = "the second run casts a weight at each use: autocast's cache is off"
        if not cached:
            cause = "autocast's cache was off in the first run, and is on in the second"
        check_same(train(lambda: loss(answer.checkpoint), leaves), want, cause=cause)


_pairs = "gradients are handed to other outputs or arguments than theirs, or outputs lose theirs"
_random = "the second run draws other random numbers than the first"
_autocast = "the second run does not have the autocast of the first: on or off, and its dtype"
