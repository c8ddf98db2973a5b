"""Windows in bfloat16 and float16, and the learning rate of a larger batch."""

import math

import pytest
import torch

from kit.laws import twists
from kit.laws.checks import check_equal
from kit.laws.precisions import HALVES, PRECISIONS, scaler_for
from kit.laws.scenarios import scenarios as tried
from kit.laws.twists import fails, gradient, option, put, refused, unused
from specs.gradient_accumulation import memory, scenarios
from specs.gradient_accumulation.laws import EPOCH
from specs.gradient_accumulation.scenarios import HALF, tag

DISABLED = {"enabled": False}  # a scaler


@tried("learning rate")
def follows(answer, device, name, want, *options):
    *numbers, rule = options
    return float(f"{answer.scaled_lr(*numbers, rule=rule):.9g}"), want


@tried("the error")
def refuses(answer, device, name, want, *options):
    *numbers, rule = options
    wanted = f"a ValueError that names {want}"
    try:
        return f"none, and a rate of {answer.scaled_lr(*numbers, rule=rule)}", wanted
    except ValueError as error:
        return wanted if str(want) in str(error) else str(error), wanted


class TestPart5MixedPrecision:
    @pytest.mark.works("train_epoch", 2)
    @HALVES
    def test_takes_the_same_steps_in_sixteen_bits(self, answer, device, dtype):
        """The numbers of part 3 are exact in 16 bits too, at a scale of 64."""
        options = {"dtype": dtype, "scaler": scaler_for(dtype, device)}
        found, results = scenarios.steps_by_hand(answer, device, **options)
        check_equal(
            [*found, *(result.skipped for result in results)],
            [2.5, 3.0, 1.0, 2.0, -0.25, False, False],
            "loss and norm of each window, the weight, and whether each was skipped",
            cause="do the steps by hand and compare",
            suspects={
                "skipped is true after a step": [2.5, 3.0, 1.0, 2.0, -0.25, True, True],
                "the losses are still scaled": [160.0, 3.0, 64.0, 2.0, -0.25, False, False],
                "the norm is taken before unscale_": [2.5, 192.0, 1.0, 128.0, -0.25, False, False],
                # ((1 x 64 / 64 + 2 x 64) / 64) / 64, and so on.
                "unscale_ after each micro-batch: the first is divided again": [
                    *(2.5, 0.031494140625, 3.03521728515625, 0.054443359375, 0.978515625),
                    *(False, False),
                ],
            },
        )

    @pytest.mark.works("scaled_lr", "linear")
    @follows("the ratio is inverted or an integer, the rules are swapped, or the rate is rounded")
    def test_the_rate_grows_as_the_batch(self):
        """Goyal et al.: 0.1 for 256 is 3.2 for 8192."""
        yield "0.1 at 256 to 8192", 3.2, 0.1, 256, 8192, "linear"
        yield "0.3 at 6 to 10", 0.5, 0.3, 6, 10, "linear"
        yield "0.4 at 4 to 1", 0.1, 0.4, 4, 1, "linear"
        yield "2e-6 at 512 to 3", 1.171875e-8, 2e-6, 512, 3, "linear"

    @pytest.mark.works("scaled_lr", "sqrt")
    @follows("the ratio is inverted or an integer, the rules are swapped, or the rate is rounded")
    def test_the_rate_grows_as_the_root_of_the_batch(self):
        yield "0.6 at 4 to 9", 0.9, 0.6, 4, 9, "sqrt"
        yield "1.6 at 65,536 to 256", 0.1, 1.6, 65536, 256, "sqrt"

    @pytest.mark.exact("train_epoch", 2)
    @EPOCH.spec("bf16", "fp16")
    def test_runs_forward_and_loss_under_autocast_and_backward_outside(self):
        yield ("a plain epoch",)
        yield "the model fails at 4", fails("model", 4)

    @pytest.mark.exact("train_epoch", 3)
    @EPOCH.spec("fp16")
    def test_unscales_and_updates_once_a_window(self):
        yield "a parameter without a gradient", unused, HALF
        often = twists.scaled(growth_interval=1, backoff_factor=0.9)
        yield "a scale that grows in every window, and falls little", often, gradient(math.inf, 4)
        yield "an overflow, with max_norm", gradient(math.inf, 4), HALF

    @pytest.mark.exact("train_epoch", 4)
    @EPOCH.spec("bf16", "fp16")
    def test_an_overflow_in_any_micro_batch_skips_the_window_and_nothing_else_does(self):
        yield "an infinite gradient at 1", gradient(math.inf)
        yield "a NaN gradient at 7", gradient(math.nan, 7), twists.trained_before
        fused = put(sgd={"lr": 0.02, "momentum": 0.9, "fused": True}), tag("fused")
        yield "a fused optimizer", gradient(math.inf, 4), *fused, twists.trained_before
        still = put(sgd={"lr": 0.0, "momentum": 0.9}), option(window=1)
        yield "seven overflows in a row, rate 0", *still, twists.scaled(init_scale=2.0**60)

    @pytest.mark.saves("train_epoch", "windows")
    @pytest.mark.parametrize("case", ["gradients-fp16", "activations-bf16", "wide_output-bf16"])
    def test_a_window_in_sixteen_bits_peaks_as_one_micro_batch(
        self, answer, reference, device, case
    ):
        name, _, precision = case.partition("-")
        made = memory.of_samples(name, device, PRECISIONS[precision])
        memory.check_peak(made, memory.epoch, answer, reference)

    @pytest.mark.survives("train_epoch", 3)
    @EPOCH.spec()
    def test_takes_an_enabled_scaler_with_float16_and_no_other_dtype(self):
        on = {"init_scale": 2.0}
        for dtype, scaler, *named in (
            ("float64", None),
            ("float16", None, "None"),
            ("float16", DISABLED, "Scaler"),
            ("bfloat16", on, "Scaler"),
            ("float32", on, "Scaler"),
        ):
            chosen = put(dtype=getattr(torch, dtype), scaler=scaler)
            yield f"{dtype}, scaler {scaler}", *refused(chosen, mentions=[(dtype, *named)])
        for dtype in (torch.float32, torch.bfloat16):
            yield f"a disabled scaler, {dtype}", put(dtype=dtype, scaler=DISABLED), HALF

    @pytest.mark.survives("scaled_lr", "Raises")
    @refuses("this input is not refused, or the message does not name the wrong value")
    def test_scaled_lr_refuses_what_has_no_meaning(self):
        yield "rule 'cubic'", "cubic", 0.1, 4, 8, "cubic"
        for rule in ("linear", "sqrt"):
            for lr in (0.0, math.nan):
                yield f"lr {lr}, {rule}", lr, lr, 4, 8, rule
            for size in (0, -4):
                yield f"batch_size {size}, {rule}", size, 0.1, size, 8, rule
                yield f"new_batch_size {size}, {rule}", size, 0.1, 4, size, rule
