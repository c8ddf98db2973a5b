"""Windows one after another in float32, in every world of scenarios.py, and their bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.laws.checks import check_close
from kit.laws.toys import mse
from specs.gradient_accumulation import memory
from specs.gradient_accumulation.laws import OF_AN_EPOCH


class TestPart3TrainEpoch:
    @pytest.mark.works("train_epoch", "windows")
    def test_takes_the_steps_that_one_can_take_by_hand(self, answer, device):
        """w = 1, x = 1, y = 0, -1 and then -0.75, in windows of two; lr = 0.25.

        Errors 1 and 2: loss (1 + 4) / 2 = 2.5, gradient (2 + 4) / 2 = 3, and w becomes 0.25. The
        last window has one micro-batch: error 1, loss 1, gradient 2, and w becomes -0.25. Divided
        by two, as a full window is, it would have a loss of 0.5.
        """
        model = nn.Linear(1, 1, bias=False).to(device)
        nn.init.constant_(model.weight, 1.0)
        one = torch.ones(1, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        data = iter([(one, 0 * one), (one, -one), (one, -0.75 * one)])
        results = answer.train_epoch(model, data, mse, optimizer, window=2)
        numbers = [float(number) for result in results for number in result[:2]]
        check_close(
            torch.tensor([*numbers, model.weight.item()]),
            torch.tensor([2.5, 3.0, 1.0, 2.0, -0.25]),
            "loss and norm of each window, and the weight",
            cause="do the steps by hand and compare",
            suspects={
                "the last window is divided by 2 where 1 was there": [2.5, 3.0, 0.5, 1.0, 0.0],
                "the last window is dropped because it is not full": [2.5, 3.0, 0.25],
                "more micro-batches to a step than `window`": [2.6875, 3 + 1 / 6, 0.25 - 1 / 24],
                "no step was taken": [2.5, 3.0, 3.0625, 3.5, 1.0],
            },
        )

    @pytest.mark.exact("train_epoch", "windows")
    def test_every_window_is_as_in_accumulate(self, answer, device):
        """Frameworks divided a short last window by the full number.

        Lightning-AI/pytorch-lightning#19987; timoschick/pet#36 never stepped on it.
        """
        OF_AN_EPOCH.hold(answer, device, "windows")

    @pytest.mark.exact("train_epoch", "data")
    def test_takes_no_micro_batch_before_the_previous_window_has_stepped(self, answer, device):
        """So data may be endless, or be made with the weights of the moment."""
        OF_AN_EPOCH.hold(answer, device, "data")

    @pytest.mark.exact("train_epoch", "clipping")
    def test_clips_the_whole_windows_gradient_once(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "clipping")

    @pytest.mark.exact("train_epoch", "scheduler")
    def test_the_schedule_advances_once_for_each_step(self, answer, device):
        """One that advances with every micro-batch ends too early (huggingface/accelerate#963)."""
        OF_AN_EPOCH.hold(answer, device, "scheduler")

    @pytest.mark.saves("train_epoch", 6)
    @memory.CASES
    def test_every_window_of_an_epoch_peaks_as_one_micro_batch(
        self, answer, reference, device, case
    ):
        """Clipping included; the formulas are in memory.py."""
        memory.check_peak(
            memory.of_samples(case, device), memory.epoch_of_one_window, answer, reference
        )

    @pytest.mark.saves("train_epoch", 6)
    def test_the_peak_does_not_grow_with_the_number_of_windows(self, answer, reference, device):
        """A window's data are gone when those of the next are made; one micro-batch may be left."""
        memory.check_peak(
            memory.of_samples("data", device),
            memory.epoch_of_three_windows,
            *(answer, reference, "peak of three windows above the baseline"),
        )

    @pytest.mark.survives("train_epoch", "windows")
    def test_the_same_of_an_epoch_in_unusual_surroundings(self, answer, device):
        """An autocast of the caller keeps its copies of the weights until it ends, or is told."""
        OF_AN_EPOCH.hold(answer, device, "unusual")

    @pytest.mark.survives("train_epoch", 1)
    def test_parameters_without_a_gradient_and_those_of_others_stay(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "others")

    @pytest.mark.survives("train_epoch", 2)
    def test_what_is_finished_counts_when_an_error_ends_the_epoch(self, answer, device):
        """And no gradient is left of what is not."""
        OF_AN_EPOCH.hold(answer, device, "errors")

    @pytest.mark.survives("train_epoch", "end")
    def test_leaves_no_gradients(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "end")

    @pytest.mark.survives("train_epoch", "Raises")
    def test_refuses_options_and_an_empty_epoch_before_anything_is_changed(self, answer, device):
        OF_AN_EPOCH.hold(answer, device, "options")
