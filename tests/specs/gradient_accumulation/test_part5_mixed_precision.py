"""Windows in bfloat16 and float16, and the learning rate of a larger batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kit.laws.checks import check_equal
from kit.laws.precisions import HALVES, scaler_for
from kit.laws.scenarios import scenarios
from kit.laws.toys import mse
from specs.gradient_accumulation import memory
from specs.gradient_accumulation.laws import OF_AN_EPOCH


@scenarios("learning rate")
def follows(answer, device, name, want, *options):
    *numbers, rule = options
    return round(answer.scaled_lr(*numbers, rule=rule), 9), want


@scenarios("the value that a ValueError names")
def refuses(answer, device, name, want, *options):
    *numbers, rule = options
    try:
        return f"{answer.scaled_lr(*numbers, rule=rule)}, and no error", str(want)
    except ValueError as error:
        return str(want) if str(want) in str(error) else str(error), str(want)


class TestPart5MixedPrecision:
    @pytest.mark.works("train_epoch", 3)
    @HALVES
    def test_takes_the_same_steps_in_sixteen_bits(self, answer, device, dtype):
        """The numbers of part 3 are whole in 16 bits too, at a scale of 64."""
        model = nn.Linear(1, 1, bias=False).to(device)
        nn.init.constant_(model.weight, 1.0)
        one = torch.ones(1, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        data = [(one, 0 * one), (one, -one), (one, -0.75 * one)]
        scaler = scaler_for(dtype, device)
        results = answer.train_epoch(
            model, data, mse, optimizer, window=2, dtype=dtype, scaler=scaler
        )
        numbers = [float(number) for result in results for number in result[:2]]
        check_equal(
            [*numbers, model.weight.item(), *(result.skipped for result in results)],
            [2.5, 3.0, 1.0, 2.0, -0.25, False, False],
            "loss and norm of each window, the weight, and what was skipped",
            cause="do the steps by hand and compare",
            suspects={
                "the losses are still scaled": [160.0, 3.0, 64.0, 2.0, -0.25, False, False],
                "the norm is taken before unscale_": [2.5, 192.0, 1.0, 128.0, -0.25, False, False],
            },
        )

    @pytest.mark.works("scaled_lr", "linear")
    @follows("the ratio is upside down or whole numbers only, or the rules are exchanged")
    def test_the_rate_grows_as_the_batch(self):
        """Goyal et al.: 0.1 for 256 is 3.2 for 8192."""
        yield "0.1 at 256 to 8192", 3.2, 0.1, 256, 8192, "linear"
        yield "0.3 at 6 to 10", 0.5, 0.3, 6, 10, "linear"
        yield "0.1 at 256 to 65,536", 25.6, 0.1, 256, 65536, "linear"
        yield "25.6 at 65,536 to 256", 0.1, 25.6, 65536, 256, "linear"

    @pytest.mark.works("scaled_lr", "sqrt")
    @follows("the ratio is upside down or whole numbers only, or the rules are exchanged")
    def test_the_rate_grows_as_the_root_of_the_batch(self):
        yield "0.6 at 4 to 9", 0.9, 0.6, 4, 9, "sqrt"
        yield "0.1 at 256 to 65,536", 1.6, 0.1, 256, 65536, "sqrt"
        yield "1.6 at 65,536 to 256", 0.1, 1.6, 65536, 256, "sqrt"

    @pytest.mark.exact("train_epoch", 3)
    def test_runs_forward_and_loss_under_autocast_and_backward_outside(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "autocast")

    @pytest.mark.exact("train_epoch", 4)
    def test_unscales_and_updates_once_a_window(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "scaler")

    @pytest.mark.exact("train_epoch", 5)
    def test_an_overflow_in_any_micro_batch_skips_the_window_and_nothing_else_does(
        self, answer, device
    ):
        OF_AN_EPOCH.hold(answer, device, "skipped")
        OF_AN_EPOCH.hold(answer, device, "not skipped")

    @pytest.mark.saves("train_epoch", 6)
    @pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param("activations", torch.bfloat16, id="activations-bf16"),
            pytest.param("gradients", torch.float16, id="gradients-fp16"),
            pytest.param("wide_output", torch.bfloat16, id="wide_output-bf16"),
        ],
    )
    def test_a_window_in_sixteen_bits_peaks_as_one_micro_batch(
        self, answer, reference, device, case, dtype
    ):
        """One micro-batch in that precision; the formulas are in memory.py."""
        memory.check_peak(
            memory.of_samples(case, device, dtype),
            memory.epoch_of_one_window,
            *(answer, reference),
        )

    @pytest.mark.survives("train_epoch", 2)
    def test_an_error_in_sixteen_bits_comes_through(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "errors in 16 bits")

    @pytest.mark.survives("train_epoch", "Raises")
    def test_refuses_a_dtype_or_a_scaler_that_does_not_fit(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "precisions")

    @pytest.mark.survives("scaled_lr", "Raises")
    @refuses("this input is not checked, or the message does not say which value was wrong")
    def test_scaled_lr_refuses_what_has_no_meaning(self):
        for rule in ("cubic", "", "lin", "ear", "linear ", "Linear", "linearsqrt"):
            yield f"rule {rule!r}", rule, 0.1, 4, 8, rule
            yield f"rule {rule!r}, one size", rule, 0.1, 4, 4, rule
        for rule in ("linear", "sqrt"):
            for lr in (0.0, -0.1, math.nan):
                yield f"lr {lr}, {rule}", lr, lr, 4, 8, rule
                yield f"lr {lr}, {rule}, one size", lr, lr, 4, 4, rule
            for size in (0, -4):
                yield f"batch_size {size}, {rule}", size, 0.1, size, 8, rule
                yield f"new_batch_size {size}, {rule}", size, 0.1, 4, size, rule
                yield f"both sizes {size}, {rule}", size, 0.1, size, size, rule
