"""One window: the gradients of the whole, in the memory of one micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_close, check_equal
from kit.laws.toys import mlp, mse
from kit.memory.ruler import measure
from specs.gradient_accumulation.common import (
    Batch,
    check_vector,
    count_steps,
    deep_model,
    gradient,
    gradient_bytes,
    gradient_in,
    joined,
    lopsided,
    one_micro_batch,
    regression,
    sequence_gradients,
    sequences,
)

SIZES = pytest.mark.parametrize(
    "sizes",
    [(9, 1, 4), (1, 2), (3, 3, 3, 3, 2), (6,)],
    ids=["unequal", "two", "short_last", "one_micro_batch"],
)


class TestPart1Accumulate:
    subject = "accumulate"

    @pytest.mark.works
    def test_steps_once_and_returns_the_mean_loss(self, answer, device):
        """9, 1 and 4 samples: the loss is the mean over 14, not over three means."""
        model, batches = regression(device, 9, 1, 4)
        before = model[0].weight.detach().clone()
        losses = [mse(model(x), y).item() for x, y in batches]
        want = mse(model(joined(batches)[0]), joined(batches)[1]).item()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = count_steps(optimizer)
        loss = answer.accumulate(model, batches, mse, optimizer)
        check_equal(len(steps), 1, "optimizer steps", cause="a step for each micro-batch, or none")
        moved = not torch.equal(before, model[0].weight)
        check(moved, expected="weights that moved", got="none did", cause="there is no gradient")
        check(
            isinstance(loss, Tensor) and loss.dim() == 0 and not loss.requires_grad,
            expected="the loss as a tensor without dimensions and without a graph",
            got=f"{type(loss).__name__} {loss}",
            cause="a loss that is kept with its graph keeps the graph alive: detach it",
        )
        guesses = {
            "it is the mean of the micro-batches' means": sum(losses) / 3,
            "the micro-batches' means are added up": sum(losses),
            "it is the loss of the last micro-batch only": losses[-1],
            "it is the last micro-batch's share only": losses[-1] * 4 / 14,
        }
        fits = [cause for cause, guess in guesses.items() if abs(loss.item() - guess) < 1e-4]
        cause = fits[0] if fits else "the shares of the micro-batches do not add up to the whole"
        check_close(loss, want, "mean loss over the 14 samples", cause=cause)

    @pytest.mark.exact
    @SIZES
    def test_leaves_the_gradients_of_the_window_in_one_batch(self, answer, device, sizes):
        """d/dw of sum_i loss_i / N, whatever the sizes of the micro-batches.

        An average of averages is right only where all are of one size, and that is why it lived in
        training frameworks for years (huggingface/transformers#24725).
        """
        model, batches = regression(device, *sizes)
        each = [gradient(model, mse(model(x), y)) for x, y in batches]
        x, y = joined(batches)
        want = gradient(model, mse(model(x), y))
        answer.accumulate(model, batches, mse, torch.optim.SGD(model.parameters(), lr=0.1))
        added, last = torch.stack(each).sum(0), each[-1] * (sizes[-1] / sum(sizes))
        hard_coded = want * (sum(sizes) / (sizes[0] * len(sizes)))
        check_vector(
            gradient_in(model),
            want,
            "gradient of the window",
            guesses={
                "a mean of means: every micro-batch counts the same": added / len(sizes),
                "the micro-batches' gradients are added up: no divisor": added,
                "only the last micro-batch's is left: zero_grad() inside the window": last,
                "the divisor is the first one's size x their number, not what is there": hard_coded,
            },
            otherwise="the weights of the micro-batches are not their shares of the samples",
        )

    @pytest.mark.exact
    def test_a_sample_counts_once_however_long_it_is(self, answer, device):
        """3, 1 and 2 samples of 2, 9 and 4 places: shares of 3/6, 1/6 and 2/6."""
        model, batches = sequences(device)
        want, guesses = sequence_gradients(model, batches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answer.accumulate(model, batches, lopsided, optimizer)
        otherwise = "the weights of the micro-batches are not their shares of the samples"
        got = gradient_in(model)
        check_vector(got, want, "gradient", guesses=guesses, otherwise=otherwise)

    @pytest.mark.exact
    def test_steps_with_the_gradients_of_the_whole_window(self, answer, device):
        """SGD with lr 1 moves by the gradient itself, at one and the same weights."""
        model, batches = regression(device, 2, 7, 3)
        x, y = joined(batches)
        want = gradient(model, mse(model(x), y))
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        answer.accumulate(model, batches, mse, torch.optim.SGD(model.parameters(), lr=1.0))
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        check_vector(
            before - after,
            want,
            "step of SGD with lr 1",
            guesses={},
            otherwise="the step is taken before the window's last gradient is there",
        )

    @pytest.mark.exact
    def test_trains_as_with_large_batches_over_three_windows(self, answer, device):
        """Weights after three windows with momentum, a frozen and a tied parameter among them."""

        def train(accumulated: bool) -> Tensor:
            _, batches = regression(device, 4, 1, 2)
            draw.seed(5)
            model = mlp(7, 7, 7, 5, device=device)
            model[2].weight = model[0].weight
            model[4].bias.requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for _ in range(3):
                if accumulated:
                    answer.accumulate(model, batches, mse, optimizer)
                else:
                    optimizer.zero_grad()
                    mse(model(joined(batches)[0]), joined(batches)[1]).backward()
                    optimizer.step()
            return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

        check_vector(
            train(accumulated=True),
            train(accumulated=False),
            "weights after three windows",
            guesses={},
            otherwise="a window's gradients reach into the next one, or the step is not its last",
        )

    @pytest.mark.saves
    def test_a_window_peaks_as_one_micro_batch(self, answer, reference, device):
        """Peak of 4 micro-batches <= 1.05 x one micro-batch's with one set of gradients.

        256 rows through four hidden layers of 96 are 4 * 256 * 96 * 4 = 0.39 MB of activations;
        the gradients are a quarter of that.
        """

        def peak(module: object) -> int:
            model, batches = deep_model(device, 4)
            return peak_of(module, model, batches)

        model, batches = deep_model(device, 4)
        check_bar(
            "peak of a window of 4 above its baseline",
            peak(answer),
            1.05 * one_micro_batch(model, batches[1], mse),
            plain=one_micro_batch(model, joined(batches), mse),
            reference=peak(reference),
            formula="1.05 x one micro-batch and its gradients; plain is the full batch",
            cause="graphs are kept until the window's end, or micro-batches are joined",
        )

    @pytest.mark.saves
    def test_the_peak_is_the_same_for_2_4_and_8_micro_batches(self, answer, reference, device):
        """Equal within 1 %: all that may grow is a number for each micro-batch's loss."""

        def peaks(module: object) -> list[int]:
            return [peak_of(module, *deep_model(device, count)) for count in (2, 4, 8)]

        yours, theirs = peaks(answer), peaks(reference)
        check_bar(
            "highest of the peaks of windows of 2, 4 and 8",
            max(yours),
            1.01 * min(yours),
            reference=max(theirs),
            formula="1.01 x the lowest of them",
            cause="something as large as a tensor is kept for each micro-batch",
        )

    @pytest.mark.saves
    def test_takes_the_kth_part_of_the_full_batchs_activations(self, answer, reference, device):
        """Peak <= A / k + G: A the full batch's activations, G one set of gradients, k = 6.

        A is the peak of the full batch less its gradients. The temporary that autograd adds to each
        weight's gradient does not shrink with the batch: slack of the largest weight, 96 x 96 x 4.
        """
        model, batches = deep_model(device, 6)
        gradients = gradient_bytes(model)
        full = one_micro_batch(model, joined(batches), mse)
        slack = 96 * 96 * 4
        check_bar(
            "peak of a window of 6 above its baseline",
            peak_of(answer, model, batches),
            (full - gradients) / 6 + gradients + slack,
            plain=full,
            reference=peak_of(reference, *deep_model(device, 6)),
            formula="full batch's activations / 6 + gradients + one weight",
            cause="graphs are kept until the window's end, or micro-batches are joined",
        )

    @pytest.mark.saves
    def test_holds_one_set_of_gradients(self, answer, reference, device):
        """Where gradients are nearly all: peak <= 1.05 x one micro-batch's, gradients included.

        Eight weights of 128 x 128 and three rows. A second buffer would make it 1.8 times that.
        """

        def setup() -> tuple[torch.nn.Module, list[Batch]]:
            data = draw.randn(5, 3, 128, device=device)
            return mlp(*[128] * 9, device=device), [(x, x) for x in data]

        model, batches = setup()
        check_bar(
            "peak of a window of 5 above its baseline",
            peak_of(answer, *setup()),
            1.05 * one_micro_batch(model, batches[1], mse),
            plain=2 * gradient_bytes(model),
            reference=peak_of(reference, *setup()),
            formula="1.05 x one micro-batch and its gradients; plain is two sets of gradients",
            cause="gradients are copied: backward() adds to what is there by itself",
        )


def peak_of(module: object, model: torch.nn.Module, batches: list[Batch]) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reading = measure(
        lambda: module.accumulate(model, batches, mse, optimizer),
        batches[0][0].device,
        known=[model, batches],
    )
    return reading.above_baseline
