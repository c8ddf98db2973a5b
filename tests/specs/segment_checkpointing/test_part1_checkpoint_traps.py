"""A checkpoint where there is nothing to do, and where it cannot do what is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_equal, fail
from kit.laws.toys import mlp
from specs.segment_checkpointing.common import chain, check_same, loss_of, train


def _refuses_or_is_right(
    call: Callable[[], Tensor], want: Tensor, what: str, *, cause: str
) -> None:
    """Fail if `call` gives anything but `want` without an error."""
    __tracebackhide__ = True
    try:
        got = call()
    except NotImplementedError:
        raise
    except RuntimeError:
        return
    if got is None or got.shape != want.shape or not torch.allclose(got, want):
        fail(expected=f"a RuntimeError, or the right {what}", got=f"{got}", cause=cause)


class TestPart1CheckpointTraps:
    subject = "checkpoint"

    @pytest.mark.survives
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients_it_is_the_plain_call(self, answer, device, mode):
        layers, log = chain(1, device)
        with mode():
            x = draw.randn(3, 5, device=device)
            draw.seed(1)
            out = answer.checkpoint(layers[0], x)
            draw.seed(1)
            want = layers[0](x)
        cause = f"torch.{mode.__name__}() is not asked for"
        check_equal(out, want, "output", cause=cause)
        check_equal(out.requires_grad, False, "requires_grad of the output", cause=cause)
        check_equal(len(log), 1 + 1, "runs, with the plain one", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("where", ["all_frozen", "no_grad_inside"])
    def test_a_function_without_gradients_stops_nothing(self, answer, device, where):
        """A frozen backbone under a head that trains.

        Behaviour: test_checkpointing_without_reentrant_detached_tensor of torch's test_autograd,
        whose reentrant form raises "none of output has requires_grad=True".
        """
        draw.seed(3)
        body, head = mlp(7, 13, 5, device=device), nn.Linear(5, 2).to(device)
        x = draw.randn(11, 7, device=device)
        function: Callable[[Tensor], Tensor] = body
        if where == "all_frozen":
            body.requires_grad_(False)
        else:
            function = torch.no_grad()(body.forward)
        leaves = dict(head.named_parameters())
        want = train(lambda: loss_of(head(function(x))), leaves)

        def loss() -> Tensor:
            return loss_of(head(answer.checkpoint(function, x)))

        try:
            got = train(loss, leaves)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            fail(
                expected="a backward pass that goes on without it",
                got=f"{type(error).__name__}: {error}",
                cause="backward is called on a second output that has no graph",
            )
        check_same(got, want, cause="gradients are lost around a function that has none")

    @pytest.mark.survives
    @pytest.mark.parametrize("how", ["grad_of_the_argument", "grad_of_a_parameter", "inputs="])
    def test_refuses_what_would_lose_gradients(self, answer, device, how):
        """autograd.grad() must change no .grad, but a backward() inside would.

        Behaviour: test_checkpoint_valid and test_checkpoint_valid_reset_on_error of torch's tests:
        the next backward pass is as good as ever.
        """
        draw.seed(3)
        model = mlp(7, 13, 5, device=device)
        x = draw.randn(11, 7, device=device, requires_grad=True)
        leaves = {"x": x, **dict(model.named_parameters())}
        want = train(lambda: loss_of(model(x)), leaves)
        model.zero_grad()
        x.grad = None
        loss = loss_of(answer.checkpoint(model, x))

        def ask() -> Tensor:
            if how == "inputs=":
                loss.backward(inputs=[x])
                return x.grad
            leaf = x if how == "grad_of_the_argument" else model[0].weight
            return torch.autograd.grad(loss, leaf)[0]

        true = want.grads["0.weight" if how == "grad_of_a_parameter" else "x"]
        cause = "backward does not ask torch.autograd._is_checkpoint_valid()"
        _refuses_or_is_right(ask, true, "gradient", cause=cause)
        moved = [name for name, p in model.named_parameters() if p.grad is not None]
        check(
            not moved,
            expected="no parameter's .grad changed by it",
            got=f"gradients in {', '.join(moved)}",
            cause=cause,
        )
        got = train(lambda: loss_of(answer.checkpoint(model, x)), leaves)
        check_same(got, want, cause="the refusal leaves something behind")

    @pytest.mark.survives
    @pytest.mark.filterwarnings("ignore:Using backward")
    def test_refuses_a_second_derivative(self, answer, device):
        """The part of it that comes from inside the checkpoint would be missing without a word."""
        x = torch.tensor([0.5, 2.0, 3.0], device=device, requires_grad=True)

        def second(call: Callable[..., Tensor]) -> Tensor:
            x.grad = None
            loss = (call(torch.exp, x) + x**3).sum()
            loss.backward(create_graph=True)
            first, x.grad = x.grad, None
            first.square().sum().backward()
            return x.grad

        want = second(lambda function, *args: function(*args))
        _refuses_or_is_right(
            lambda: second(answer.checkpoint),
            want,
            "second derivative",
            cause="the second run's gradients have no graph, and create_graph=True goes unnoticed",
        )

    @pytest.mark.survives
    def test_an_error_in_the_function_reaches_the_caller(self, answer, device):
        words = "an error in the first run"

        def function(x: Tensor) -> Tensor:
            raise KeyError(words)

        try:
            answer.checkpoint(function, torch.ones(3, device=device, requires_grad=True))
            got = "no error"
        except NotImplementedError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
        want = f"KeyError: {KeyError(words)}"
        check_equal(got, want, "the function's own error", cause="errors are caught on their way")
        cause = "gradients are switched off without `with` or try/finally"
        check_equal(torch.is_grad_enabled(), True, "gradients enabled after the error", cause=cause)
