"""One window: stale gradients, parameters without any, bad micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kit.laws.checks import check, check_equal, check_raises, show
from kit.laws.snapshot import Snapshot
from kit.laws.toys import mse
from specs.gradient_accumulation.common import (
    bad_batch,
    check_vector,
    gradient,
    gradient_in,
    joined,
    regression,
)

# The last micro-batch, and what the message must hold of its lengths.
BAD = {
    "empty": ((torch.ones(0, 7), torch.ones(0, 5)), ["0"]),
    "more_inputs": ((torch.ones(6, 7), torch.ones(1, 5)), ["6", "1"]),
    "more_targets": ((torch.ones(1, 7), torch.ones(6, 5)), ["1", "6"]),
    "triple": ((torch.ones(2, 7), torch.ones(2, 5), torch.ones(2)), []),
    "one_tensor": (torch.ones(2, 7), []),  # can be unpacked: it has two rows
}


class TestPart1AccumulateTraps:
    subject = "accumulate"

    @pytest.mark.survives
    def test_ignores_gradients_from_before(self, answer, device):
        model, batches = regression(device, 2, 5)
        x, y = joined(batches)
        want = gradient(model, mse(model(x), y))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1000.0)
        answer.accumulate(model, batches, mse, torch.optim.SGD(model.parameters(), lr=0.1))
        check_vector(
            gradient_in(model),
            want,
            "gradient of the window",
            guesses={"gradients from before the window are in it": want + 1000},
            otherwise="gradients are cleared after the step only: the first window has stale ones",
        )

    @pytest.mark.survives
    def test_clears_the_gradients_of_all_that_it_trains(self, answer, device):
        """The loss may have a parameter of its own, which the optimizer holds in a second group."""
        model, batches = regression(device, 2, 5)
        shift = nn.Parameter(torch.zeros(5, device=device))
        shift.grad = torch.full_like(shift, 1000.0)
        groups = [{"params": model.parameters()}, {"params": [shift], "lr": 0.5}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        answer.accumulate(model, batches, lambda out, y: mse(out + shift, y), optimizer)
        check(
            bool((shift.abs() < 100).all() and shift.any()),
            expected="the loss's own parameter stepped without its old gradient of 1000",
            got=show(shift),
            cause="model.zero_grad() knows the model's parameters only",
        )

    @pytest.mark.survives
    def test_does_not_step_a_parameter_that_gets_no_gradient(self, answer, device):
        """Weight decay and momentum move one whose old gradient is kept as zeros."""
        model, batches = regression(device, 2, 5)
        unused = nn.Parameter(torch.ones(3, device=device))
        model.register_parameter("unused", unused)
        unused.grad = torch.ones_like(unused)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        answer.accumulate(model, batches, mse, optimizer)
        cause = "zero_grad(set_to_none=False): zeros are a gradient too"
        check_equal(unused.detach(), torch.ones_like(unused).detach(), "unused weight", cause=cause)

    @pytest.mark.survives
    def test_runs_the_model_once_on_each_micro_batch(self, answer, device):
        """Batch normalisation and dropout notice a pass too many, and so does the clock.

        The model is in eval mode, as in fine-tuning with dropout off, and stays in it.
        """
        model, batches = regression(device, 4, 2, 3)
        model.eval()
        seen: list[tuple[int, bool]] = []
        modes: set[bool] = set()

        def note(layer: nn.Module, args: tuple[Tensor]) -> None:
            seen.append((len(args[0]), torch.is_grad_enabled()))
            modes.add(layer.training)

        model[0].register_forward_pre_hook(note)
        answer.accumulate(model, batches, mse, torch.optim.SGD(model.parameters(), lr=0.1))
        want = [(2, True), (3, True), (4, True)]
        cause = "a forward pass too many, perhaps for the loss, or micro-batches are cut or joined"
        check_equal(sorted(seen), want, "samples of each forward pass, and grad mode", cause=cause)
        cause = "train() is called: whether dropout is on is the caller's business"
        check_equal(modes, {False}, "layer.training in the forward passes", cause=cause)

    @pytest.mark.survives
    def test_takes_lists_for_pairs_and_a_tuple_for_the_window(self, answer, device):
        """DataLoader gives lists. The window is the caller's, and is the same afterwards."""
        model, batches = regression(device, 1, 3)
        window = tuple([x, y] for x, y in batches)
        inputs = [x.clone() for x, _ in batches]
        x, y = joined(batches)
        want = gradient(model, mse(model(x), y))
        answer.accumulate(model, window, mse, torch.optim.SGD(model.parameters(), lr=0.1))
        got = gradient_in(model)
        check_vector(got, want, "gradient", guesses={}, otherwise="a list is no pair for it")
        for pair, before in zip(window, inputs, strict=True):
            check_equal(pair[0], before, "inputs afterwards", cause="inputs are changed in place")

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", BAD)
    def test_refuses_a_bad_last_micro_batch_before_anything_is_changed(self, answer, device, bad):
        model, batches = regression(device, 3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mse(model(batches[0][0]), batches[0][1]).backward()
        optimizer.step()
        before = Snapshot(model, optimizer)
        batch, lengths = BAD[bad]
        batch, words = bad_batch(batch, device)
        window = [*batches, batch]
        check_raises(
            lambda: answer.accumulate(model, window, mse, optimizer),
            ValueError,
            mentions=lengths,
            when=f"for a last micro-batch of {words}",
        )
        before.check_unchanged("the refused call", cause="micro-batches are checked too late")

    @pytest.mark.survives
    def test_refuses_a_window_without_micro_batches(self, answer, device):
        model, batches = regression(device, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mse(model(batches[0][0]), batches[0][1]).backward()
        optimizer.step()
        before = Snapshot(model, optimizer)
        check_raises(
            lambda: answer.accumulate(model, [], mse, optimizer),
            ValueError,
            mentions=["0"],
            when="for a window of 0 micro-batches",
        )
        before.check_unchanged("the refused call", cause="the window is checked too late")

    @pytest.mark.survives
    def test_the_loss_is_that_of_the_weights_before_the_step(self, answer, device):
        """Dropout is on: the loss is that of the passes that made the gradients."""
        model, batches = regression(device, 4, 2, 3)
        model.insert(1, nn.Dropout(0.5))
        losses: list[Tensor] = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = mse(output, target)
            losses.append(loss.detach().clone() * len(target))
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        got = answer.accumulate(model, batches, loss_fn, optimizer)
        want = torch.stack(losses[:3]).sum() / 9
        check_vector(
            got.reshape(1),
            want.reshape(1),
            "mean loss",
            guesses={},
            otherwise="the loss is computed anew, with other dropout or other weights",
        )
