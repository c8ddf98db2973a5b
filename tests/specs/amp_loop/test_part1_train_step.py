"""One step in any precision, in every world of scenarios.py, and its bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_bar, check_equal
from kit.laws.precisions import DTYPES, HALVES, SCALE, scaler_for
from kit.laws.toys import mlp, mse
from kit.memory.ruler import bytes_of, measure
from specs.amp_loop.laws import STEP


class TestPart1TrainStep:
    @pytest.mark.works("train_step", "loss")
    @DTYPES
    def test_does_the_step_that_one_can_do_by_hand(self, answer, device, dtype):
        """w = 3, x = 1 and 2, y = 1: errors 2 and 5, so the loss is (4 + 25) / 2 = 14.5.

        The gradient is (2 x 2 x 1 + 2 x 5 x 2) / 2 = 12: with lr 0.25 the weight becomes 0.
        """
        model = nn.Linear(1, 1, bias=False).to(device)
        nn.init.constant_(model.weight, 3.0)
        batch = torch.tensor([[1.0], [2.0]], device=device), torch.ones(2, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        scaler = scaler_for(dtype, device)
        result = answer.train_step(model, batch, mse, optimizer, scaler, dtype=dtype)
        numbers = float(result.loss), float(result.grad_norm), model.weight.item(), result.skipped
        check_equal(
            numbers,
            (14.5, 12.0, 0.0, False),
            "loss, grad_norm, weight and skipped",
            cause="do the step by hand and compare",
            suspects={
                "the loss is still scaled": (14.5 * SCALE, 12.0, 0.0, False),
                "the gradients are still scaled when the norm is taken": (
                    14.5,
                    12.0 * SCALE,
                    0.0,
                    False,
                ),
                "the loss is from after the step": (1.0, 12.0, 0.0, False),
                "no step was taken": (14.5, 12.0, 3.0, False),
                "a step that was taken is called skipped": (14.5, 12.0, 0.0, True),
            },
        )

    @pytest.mark.exact("train_step", "autocast")
    def test_forward_and_loss_run_under_autocast_and_backward_does_not(self, answer, device):
        STEP.hold(answer, device, "autocast")

    @pytest.mark.exact("train_step", "loss")
    def test_a_float16_loss_does_not_overflow_under_a_large_scale(self, answer, device):
        """mean() of a float16 output is float16, and 65536 times it is above 65504: infinite."""
        STEP.hold(answer, device, "a large scale")

    @pytest.mark.exact("train_step", "gradients")
    def test_gradients_are_of_this_step_alone(self, answer, device):
        STEP.hold(answer, device, "gradients")

    @pytest.mark.exact("train_step", "max_norm")
    def test_clips_what_is_longer_than_max_norm_and_nothing_else(self, answer, device):
        STEP.hold(answer, device, "max_norm")

    @pytest.mark.exact("train_step", "grad_norm")
    def test_the_norm_is_over_all_that_the_optimizer_holds(self, answer, device):
        STEP.hold(answer, device, "grad_norm")

    @pytest.mark.exact("train_step", "skipped")
    def test_skips_on_an_overflow_and_on_nothing_else(self, answer, device):
        STEP.hold(answer, device, "skipped")
        STEP.hold(answer, device, "skipped in float16")

    @pytest.mark.saves("train_step", "memory")
    @HALVES
    def test_holds_activations_in_sixteen_bits(self, answer, reference, device, dtype):
        """Activations halve; float32 gradients stay, and 16-bit copies of the weights come on top.

        R = 1024 rows and four hidden layers of 96 make A = 4 * R * 4 * 96 = 1.57 MB of activations
        against W = 0.12 MB of weights. At the peak the backward pass has one more layer in flight:
        float32 takes 5/4 A + W, 16 bits half of that 5/4 A and W + W/2. That is 0.55 of it, and the
        bar is 0.60.
        """
        widths = (24, 96, 96, 96, 96, 8)
        rows = 1024 if device.type == "cpu" else 16 * 1024

        def peak(module: object, dtype: torch.dtype) -> int:
            model = mlp(*widths, device=device)
            batch = draw.randn(rows, 24, device=device), draw.randn(rows, 8, device=device)
            return _step_bytes(module, model, batch, mse, dtype).above_baseline

        plain = peak(reference, torch.float32)
        check_bar(
            "peak of a step above its baseline",
            peak(answer, dtype),
            0.60 * plain,
            plain=plain,
            reference=peak(reference, dtype),
            formula="0.60 x the float32 step",
            cause="activations are kept in float32, or in both precisions",
        )

    @pytest.mark.saves("train_step", "memory")
    @DTYPES
    def test_does_not_hold_a_wide_output_through_the_backward_pass(
        self, answer, reference, device, dtype
    ):
        """8,192 classes for 64 rows are L = 2 MiB of float32 logits, and nearly all there is.

        In the backward pass there are the log-probabilities that the loss has saved, their gradient
        and that of the logits: 3 L, and a weight W = 4 x 8,192 x 4 bytes with its gradient. Logits
        that a name still holds make 4 L (float32) or 3.5 L (16 bits). The bar is 3.25 L + 3 W.
        """
        rows, classes, width = 64, 8192, 4
        logits, weight = 4 * rows * classes, 4 * width * classes
        batch = (
            draw.randn(rows, width, device=device),
            draw.randint(classes, (rows,), device=device),
        )

        def peak(module: object) -> int:
            model = mlp(width, classes, device=device)
            return _step_bytes(module, model, batch, F.cross_entropy, dtype).above_baseline

        check_bar(
            "peak of a step with a wide output",
            peak(answer),
            3.25 * logits + 3 * weight,
            plain=4 * logits + 3 * weight,
            reference=peak(reference),
            formula="3.25 x the logits + 3 x the weight; plain holds the output",
            cause="a name still holds the output, or the float32 copy of it, in the backward pass",
        )

    @pytest.mark.saves("train_step", "memory")
    @HALVES
    def test_leaves_the_bytes_of_state_as_they_are(self, answer, reference, device, dtype):
        """Weights and Adam's moments are 12 bytes a parameter, with AMP and without."""

        def state(module: object, dtype: torch.dtype) -> int:
            model = mlp(64, 96, 32, device=device)
            batch = draw.randn(9, 64, device=device), draw.randn(9, 32, device=device)
            reading = _step_bytes(module, model, batch, mse, dtype, torch.optim.Adam)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            return bytes_of(*model.parameters()) + reading.retained - bytes_of(*grads)

        plain = state(reference, torch.float32)
        # A scaler holds a few scalars of 512 bytes; a 16-bit copy of the weights would be 12 %.
        check_bar(
            "weights and optimizer state",
            state(answer, dtype),
            1.05 * plain,
            plain=plain,
            reference=state(reference, dtype),
            formula="what float32 holds + 5 %",
            cause="a second copy of the weights is kept, or of the gradients",
        )

    @pytest.mark.survives("train_step", "batch")
    def test_takes_a_list_for_a_pair(self, answer, device):
        STEP.hold(answer, device, "a list")

    @pytest.mark.survives("train_step", 1)
    def test_does_not_step_what_got_no_gradient(self, answer, device):
        """Weight decay and momentum move a parameter whose old gradient is kept, as zeros too."""
        STEP.hold(answer, device, "no gradient")

    @pytest.mark.survives("train_step", 2)
    def test_leaves_parameters_alone_that_the_optimizer_does_not_hold(self, answer, device):
        STEP.hold(answer, device, "foreign parameters")

    @pytest.mark.survives("train_step", 3)
    def test_a_huge_but_finite_gradient_is_no_overflow(self, answer, device):
        """The square of 1e30 is not a float32."""
        STEP.hold(answer, device, "huge gradients")

    @pytest.mark.survives("train_step", 4)
    def test_dtype_holds_inside_an_autocast_of_the_caller(self, answer, device):
        STEP.hold(answer, device, "the caller's autocast")

    @pytest.mark.survives("train_step", "untouched")
    def test_the_mode_is_the_callers(self, answer, device):
        STEP.hold(answer, device, "the caller's mode")

    @pytest.mark.survives("train_step", 5)
    def test_an_error_comes_through_and_no_step_is_taken(self, answer, device):
        STEP.hold(answer, device, "errors")

    @pytest.mark.survives("train_step", "Raises")
    def test_refuses_a_batch_that_is_no_pair(self, answer, device):
        STEP.hold(answer, device, "no pairs")

    @pytest.mark.survives("train_step", "Raises")
    def test_refuses_options_that_do_not_fit(self, answer, device):
        STEP.hold(answer, device, "options")


def _step_bytes(module, model, batch, loss, dtype, optimizer_class=torch.optim.SGD):
    """What one step does to memory."""
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    scaler = scaler_for(dtype, batch[0].device)
    return measure(
        lambda: module.train_step(model, batch, loss, optimizer, scaler, dtype=dtype),
        batch[0].device,
        known=[model, optimizer, *batch],
    )
