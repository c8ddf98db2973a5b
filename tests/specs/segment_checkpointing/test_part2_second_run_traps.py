"""A second run that would see something else, or that does not get to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check_equal, check_raises, fail
from specs.segment_checkpointing.common import check_same, loss_of, train

CHANGED = ("input", "mask_without_gradient", "view_of_it", "indices")


def _changed(which: str, *args: Tensor) -> Tensor:
    """The argument, or the view of one, of that name."""
    return dict(zip(CHANGED, (*args[:2], args[0][1:], args[2]), strict=True))[which]


class TestPart2SecondRunTraps:
    subject = "checkpoint"

    @pytest.mark.survives
    @pytest.mark.parametrize("which", CHANGED)
    def test_refuses_an_argument_that_was_changed_since(self, answer, device, which):
        """The second run would compute the gradients of another function."""
        x = draw.randn(5, device=device, requires_grad=True)
        h, mask, index = x * 1, draw.rand(5, device=device), torch.arange(3, device=device)
        loss = answer.checkpoint(lambda a, b, i: (a * b).exp()[i], h, mask, index).sum()
        with torch.no_grad():
            _changed(which, h, mask, index).add_(1)
        cause = "arguments are kept on ctx: only save_for_backward looks for changes in place"
        _check_refused(loss.backward, f"from backward(), after {which} was changed", cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("which", CHANGED)
    def test_refuses_a_function_that_changes_its_argument(self, answer, device, which):
        """relu_() on the input, and the second run starts where the first has ended."""
        x = draw.randn(5, device=device, requires_grad=True)
        h, mask, index = x * 1, draw.rand(5, device=device), torch.arange(3, device=device)

        def function(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
            _changed(which, a, b, i).add_(1)
            return (a * b).exp()[i]

        cause = "no version (tensor._version) is compared before and after the first run"
        when = f"from the forward pass, when the function changes {which}"
        _check_refused(lambda: answer.checkpoint(function, h, mask, index), when, cause)

    @pytest.mark.survives
    def test_a_function_may_change_its_own_tensors_in_place(self, answer, device):
        layer, x = nn.Linear(5, 5).to(device), draw.randn(3, 5, device=device)
        leaves = {"x": x.requires_grad_(), **dict(layer.named_parameters())}

        def function(a: Tensor) -> Tensor:
            return layer(a).mul_(2).relu_()

        want = train(lambda: loss_of(function(x)), leaves)
        got = train(lambda: loss_of(answer.checkpoint(function, x)), leaves)
        check_same(got, want, cause="more is refused than changes of the arguments")

    @pytest.mark.survives
    def test_an_error_in_the_second_run_leaves_the_random_state_as_it_was(self, answer, device):
        """The random stream goes on, and the next checkpoint works."""
        layer, runs = nn.Linear(5, 5).to(device), []
        x = draw.randn(3, 5, device=device, requires_grad=True)

        def function(a: Tensor) -> Tensor:
            runs.append(1)
            out = torch.nn.functional.dropout(layer(a), 0.5)
            if len(runs) == 2:
                raise KeyError("the second run's own error")
            return out.exp()

        loss = loss_of(answer.checkpoint(function, x))
        draw.seed(8)
        want = draw.next_random(device)
        draw.seed(8)
        check_raises(
            loss.backward,
            KeyError,
            mentions=["the second run's own error"],
            when="which is what the function raised in its second run",
        )
        cause = "what is set for the second run is not put back when it fails: use `with`"
        check_equal(draw.next_random(device), want, "the next random numbers", cause=cause)
        leaves = {"x": x, **dict(layer.named_parameters())}
        want_run = train(lambda: loss_of(function(x)), leaves)
        got = train(lambda: loss_of(answer.checkpoint(function, x)), leaves)
        check_same(got, want_run, cause="the failed run leaves something behind")

    @pytest.mark.survives
    def test_integers_and_tensors_without_gradient_get_none(self, answer, device):
        """Behaviours: test_checkpoint_partial_grad and test_checkpoint_no_tensors of torch's
        test_utils."""
        x = draw.randn(4, 5, device=device, requires_grad=True)
        fixed, which = draw.randn(5, device=device), torch.tensor([2, 0], device=device)
        mask = torch.tensor([True, False, True, True, False], device=device)

        def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor, times: float) -> Tensor:
            seen.append((a.requires_grad, b.requires_grad))
            return ((a + b)[c] * d).exp() * times

        seen: list[tuple[bool, bool]] = []
        leaves = {"x": x, "fixed": fixed}
        want = train(lambda: loss_of(function(x, fixed, which, mask, 0.5)), leaves)
        try:
            loss = answer.checkpoint(function, x, fixed, which, mask, 0.5)
            got = train(lambda: loss_of(loss), leaves)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            fail(
                expected="gradients for x only",
                got=f"{type(error).__name__}: {error}",
                cause="a gradient is asked for a tensor that cannot have one",
            )
        check_same(got, want, cause="a tensor gets a gradient that it does not require")
        cause = "the second run's tensors require other gradients than the arguments"
        check_equal(seen[-1], (True, False), "requires_grad in the second run", cause=cause)
        numbers = answer.checkpoint(lambda a, b: (a + b, None), 1, 2)
        cause = "a function without any tensor is its result"
        check_equal(numbers, (3, None), "checkpoint of numbers", cause=cause)


def _check_refused(call: Callable[[], object], when: str, cause: str) -> None:
    __tracebackhide__ = True
    try:
        call()
    except NotImplementedError:
        raise
    except RuntimeError:
        return
    fail(expected=f"a RuntimeError {when}", got="no error", cause=cause)
