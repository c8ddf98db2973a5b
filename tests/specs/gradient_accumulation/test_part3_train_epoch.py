"""Windows one after another in float32, in the worlds of scenarios.py, and their bytes."""

import math

import pytest
import torch

from kit.laws import twists
from kit.laws.checks import check_close
from kit.laws.twists import BAD_PAIRS, option, put, refused
from specs.gradient_accumulation import memory, scenarios
from specs.gradient_accumulation.laws import EPOCH
from specs.gradient_accumulation.scenarios import HALF


class TestPart3TrainEpoch:
    @pytest.mark.works("train_epoch", "windows")
    def test_takes_the_steps_that_one_can_take_by_hand(self, answer, device):
        """w = 1, x = 1, y = 0, -1 and then -0.75, in windows of two; lr = 0.25.

        Errors 1 and 2: loss (1 + 4) / 2 = 2.5, gradient (2 + 4) / 2 = 3, and w becomes 0.25. The
        last window has one micro-batch: error 1, loss 1, gradient 2, and w becomes -0.25. Divided
        by two, like a full window, its loss would be 0.5.
        """
        found, _ = scenarios.steps_by_hand(answer, device)
        check_close(
            torch.tensor(found),
            torch.tensor([2.5, 3.0, 1.0, 2.0, -0.25]),
            "loss and norm of each window, and the weight",
            cause="do the steps by hand and compare",
            suspects={
                "the last window is divided by 2 although it has 1": [2.5, 3.0, 0.5, 1.0, 0.0],
                "the last window is dropped because it is not full": [2.5, 3.0, 0.25],
                "more micro-batches to a step than `window`": [2.6875, 3 + 1 / 6, 0.25 - 1 / 24],
            },
        )

    @pytest.mark.exact("train_epoch", "windows")
    @EPOCH.spec()
    def test_every_window_is_as_in_accumulate(self):
        """Lightning-AI/pytorch-lightning#19987 divided a short last window by the full number.

        timoschick/pet#36 never stepped on it.
        """
        yield ("seven micro-batches in windows of 3",)
        yield "samples of several lengths", scenarios.sequences
        yield "the same micro-batch again", scenarios.repeated
        yield "a model in float64", scenarios.in_float64
        yield from scenarios.STEPS
        yield from scenarios.MODES
        yield from scenarios.NO_GRADIENT
        yield scenarios.LOSS

    @pytest.mark.exact("train_epoch", "data")
    @EPOCH.spec()
    def test_takes_no_micro_batch_before_the_previous_window_has_stepped(self):
        """Data may be endless, or generated with the current weights."""
        yield "six micro-batches", scenarios.only(*range(6))

    @pytest.mark.exact("train_epoch", "clipping")
    @EPOCH.spec()
    def test_clips_the_whole_windows_gradient_once(self):
        yield "a loss with parameters, clipped", twists.loss_with_parameters, HALF
        yield "max_norm 12", option(max_norm=12)
        yield "a group for each parameter, clipped", HALF, put(groups=True)
        yield "a parameter that one micro-batch uses, clipped", scenarios.rare, HALF
        yield "a parameter of another optimizer", twists.foreign, scenarios.tag("foreign"), HALF

    @pytest.mark.exact("train_epoch", "scheduler")
    @EPOCH.spec()
    def test_the_schedule_advances_once_for_each_step(self):
        """One that advances with every micro-batch ends too early (huggingface/accelerate#963)."""
        yield "windows of 2, with a schedule", option(window=2)

    @pytest.mark.saves("train_epoch", "windows")
    @memory.CASES
    def test_a_window_of_an_epoch_peaks_as_one_micro_batch(self, answer, reference, device, case):
        memory.check_peak(memory.of_samples(case, device), memory.epoch, answer, reference)

    @pytest.mark.survives("train_epoch", "end")
    @EPOCH.spec()
    def test_leaves_no_gradients(self):
        yield "a loss with parameters, windows of 2", twists.loss_with_parameters, option(window=2)
        yield from scenarios.failing(backward=5, step=3)

    @pytest.mark.survives("train_epoch", 1)
    @EPOCH.spec()
    def test_earlier_steps_remain_when_an_error_ends_the_epoch(self):
        yield from scenarios.failing(model=4, loss=5, data=6)
        yield from scenarios.bad(BAD_PAIRS, 4, 6)

    @pytest.mark.survives("train_epoch", "Raises")
    @EPOCH.spec()
    def test_refuses_options_and_an_empty_epoch_before_anything_is_changed(self):
        for n in (0, -3):
            yield f"window {n}", *refused(option(window=n), mentions=[n])
        for norm in (-2.5, 0.0, math.nan):
            yield f"max_norm {norm}", *refused(option(max_norm=norm), mentions=[norm])
        yield *scenarios.NOTHING, scenarios.tag("bad micro-batch")
