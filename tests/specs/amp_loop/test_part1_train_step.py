"""One step in each precision: its results, its errors and its bytes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw, twists
from kit.laws.bars import bar
from kit.laws.precisions import HALVES, PRECISIONS, scaler_for
from kit.laws.scalers import SCALERS
from kit.laws.toys import mlp, mse
from kit.laws.trace import PlantedInterrupt
from kit.laws.twists import fails, foreign, gradient, huge, option, put, trained_before
from kit.memory.ruler import measure
from specs.amp_loop.laws import STEP, laid_otherwise

in_each_precision, half = STEP.spec(*PRECISIONS), option(max_norm=0.5)


def by_hand(w):
    """One weight of 3, inputs 1 and 2, targets of 1."""
    w.model, w.sgd = nn.Linear(1, 1, bias=False), {"lr": 0.25}
    nn.init.constant_(w.model.weight, 3.0)
    w.batches = [(torch.tensor([[1.0], [2.0]]), torch.ones(2, 1))]


def by_columns(w):
    """A weight is stored by columns, and so is its gradient."""
    w.model[0].weight.data = laid_otherwise(w.model[0].weight.data)


def inside_bfloat16(w):
    """The caller is already inside an autocast."""
    w.inside.append(lambda: torch.autocast(w.device.type, torch.bfloat16))


class TestPart1TrainStep:
    @pytest.mark.works("train_step", "loss")
    @in_each_precision
    def test_does_the_step_that_one_can_do_by_hand(self):
        """w = 3, x = 1 and 2, y = 1: errors 2 and 5, so the loss is (4 + 25) / 2 = 14.5.

        The gradient is (2 x 2 x 1 + 2 x 5 x 2) / 2 = 12: with lr 0.25 the weight becomes 0.
        """
        yield "w = 3", by_hand

    @pytest.mark.exact("train_step", "autocast")
    @in_each_precision
    def test_forward_and_loss_run_under_autocast_and_backward_does_not(self):
        yield ("a plain step",)
        yield "a loss that ends in a matrix product", twists.loss_with_a_matrix_product
        mean = put(loss=lambda out, y: out.mean())
        yield "a mean under a scale of 65536", mean, twists.scaled(init_scale=65536.0)
        yield "inputs of 2**20", twists.large_inputs
        yield "token ids", twists.token_ids

    @pytest.mark.exact("train_step", "gradients")
    @in_each_precision
    def test_gradients_are_of_this_step_alone(self):
        yield "stale gradients", twists.stale
        yield "a loss with parameters", twists.loss_with_parameters, half

    @pytest.mark.exact("train_step", "max_norm")
    @in_each_precision
    def test_clips_what_is_longer_than_max_norm_and_nothing_else(self):
        yield "clipped", half
        yield "max_norm inf", option(max_norm=math.inf)
        zero = put(loss=lambda out, y: mse(out, y) * 0)
        yield "gradients of zero", option(max_norm=1.0), zero

    @pytest.mark.exact("train_step", "grad_norm")
    @in_each_precision
    def test_the_norm_is_over_all_that_the_optimizer_holds(self):
        yield "a group for each parameter", put(groups=True), half
        yield "a weight in column-major order", by_columns, half
        yield "a parameter that the optimizer does not hold", foreign, half

    @pytest.mark.exact("train_step", "skipped")
    @in_each_precision
    def test_skips_on_an_overflow_and_on_nothing_else(self):
        adam = put(adam={"lr": 0.01})
        yield "a NaN gradient, Adam", gradient(math.nan), adam, trained_before
        loss = put(loss=lambda out, y: mse(out, y) + math.inf)
        yield "an infinite loss with finite gradients, Adam", loss, adam
        yield "learning rate 0", put(sgd={"lr": 0.0, "momentum": 0.9})

    @pytest.mark.saves("train_step", "memory")
    @HALVES
    @bar(
        "peak of a step above its baseline",
        "0.60 x the float32 step + the batch",
        "activations are saved in float32, or in both precisions",
    )
    def test_holds_activations_in_sixteen_bits(self, device, dtype, reference):
        """The float32 peak is 5/4 A + W; in 16 bits it is 5/8 A + 3/2 W, which is 0.55 of it.

        A = 4 * 1024 * 4 * 96 = 1.57 MB of activations, of which one layer more is in flight; W =
        0.12 MB of float32 gradients. The 16-bit copies of the weights are W / 2.
        """
        rows = 1024 if device.type == "cpu" else 16 * 1024

        def peak(module, dtype=dtype):
            model = mlp(24, 96, 96, 96, 96, 8, device=device)
            batch = draw.randn(rows, 24, device=device), draw.randn(rows, 8, device=device)
            return measured_step(module, model, batch, mse, dtype).above_baseline

        plain = peak(reference, torch.float32)
        return peak, 0.60 * plain + 4 * rows * (24 + 8), plain

    @pytest.mark.saves("train_step", "memory")
    @pytest.mark.parametrize("dtype", PRECISIONS.values(), ids=PRECISIONS)
    @bar(
        "peak of a step with a wide output",
        "3.25 x the logits + 3 x the weight; plain holds the output",
        "a variable still holds the output, or its float32 copy, in the backward pass",
    )
    def test_does_not_hold_a_wide_output_through_the_backward_pass(self, device, dtype):
        """8,192 classes for 64 rows make L = 2 MiB of float32 logits, most of the memory.

        Backward holds the log-probabilities, their gradient and that of the logits: 3 L. A
        variable for the logits makes it 4 L (float32) or 3.5 L (16 bits).
        """
        logits, weight = 4 * 64 * 8192, 4 * 4 * 8192
        batch = draw.randn(64, 4, device=device), draw.randint(8192, (64,), device=device)

        def peak(module):
            model = mlp(4, 8192, device=device)
            return measured_step(module, model, batch, F.cross_entropy, dtype).above_baseline

        return peak, 3.25 * logits + 3 * weight, 4 * logits + 3 * weight

    @pytest.mark.saves("train_step", "memory")
    @HALVES
    @bar(
        "gradients and optimizer state after a step",
        "the float32 step's + 5 %",
        "a second copy of the weights or of the gradients is kept",
    )
    def test_leaves_the_bytes_of_state_as_they_are(self, device, dtype, reference):
        """Gradients and Adam's moments: 12 bytes a parameter. A 16-bit copy would be 17 % more."""

        def state(module, dtype=dtype):
            model = mlp(64, 96, 32, device=device)
            batch = draw.randn(9, 64, device=device), draw.randn(9, 32, device=device)
            return measured_step(module, model, batch, mse, dtype, torch.optim.Adam).retained

        plain = state(reference, torch.float32)
        return state, 1.05 * plain, plain

    @pytest.mark.survives("train_step", "skipped")
    @STEP.spec("fp16")
    def test_skipped_is_what_any_scaler_did(self):
        for name, scaler in SCALERS.items():
            yield f"a scaler {name}", scaler, trained_before, half
            yield f"a scaler {name}, overflow", scaler, trained_before, half, gradient(-math.inf)
        never = lambda w: setattr(w.grad_scaler, "step", lambda optimizer: None)  # noqa: E731
        yield "a scaler that skips for another rank's overflow", put(after=[never])

    @pytest.mark.survives("train_step", 1)
    @in_each_precision
    def test_does_not_step_what_got_no_gradient(self):
        """With a gradient of zeros, weight decay and momentum would move it."""
        yield "a parameter without a gradient, clipped", twists.unused, half
        yield "frozen, with an old gradient", twists.stale, twists.frozen

    @pytest.mark.survives("train_step", 2)
    @in_each_precision
    def test_a_huge_but_finite_gradient_is_no_overflow(self):
        """The square of 1e30 overflows float32."""
        clipped = option(max_norm=3.0), put(sgd={"lr": 0.5}), twists.scaled(init_scale=1.0)
        yield "a gradient of 1e30, clipped", huge(1e30), *clipped

    @pytest.mark.survives("train_step", 3)
    @in_each_precision
    def test_the_step_is_the_same_inside_an_autocast_of_the_caller(self):
        twice = lambda w: w.tags.add("twice")  # noqa: E731
        yield "two steps inside bfloat16", inside_bfloat16, twice

    @pytest.mark.survives("train_step", 4)
    @in_each_precision
    def test_an_error_comes_through_and_the_next_call_works(self):
        """The same call afterwards does what it would have done without the error."""
        yield "the loss fails", trained_before, foreign, fails("loss")
        interrupted = trained_before, fails("step", 1, PlantedInterrupt)
        name = "with the protocol's methods alone"
        yield f"Ctrl-C in the optimizer, a scaler {name}", *interrupted, SCALERS[name]

    @pytest.mark.survives("train_step", "Raises")
    @STEP.spec()
    def test_refuses_what_does_not_fit(self):
        yield "a pair in a list", twists.in_lists
        yield from twists.bad_batches()
        for dtype, scaler, *named in (
            (torch.float64, None, "float64"),
            (torch.float16, None, "float16", "None"),
            (torch.bfloat16, {"init_scale": 2.0}, "bfloat16", "Scaler"),
            (torch.float32, {"init_scale": 2.0}, "float32", "Scaler"),
        ):
            options = put(dtype=dtype, scaler=scaler)
            yield f"{dtype}, scaler {scaler}", *twists.refused(options, mentions=[(*named,)])
        for value in (-2.5, 0.0):
            yield f"max_norm {value}", *twists.refused(option(max_norm=value), mentions=[value])


def measured_step(module, model, batch, loss, dtype, optimizer=torch.optim.SGD):
    optimizer, device = optimizer(model.parameters(), lr=0.01), batch[0].device
    scaler = scaler_for(dtype, device)
    step = lambda: module.train_step(model, batch, loss, optimizer, scaler, dtype=dtype)  # noqa: E731
    return measure(step, device, known=[model, optimizer, *batch])
