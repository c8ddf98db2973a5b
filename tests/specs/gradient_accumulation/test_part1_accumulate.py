"""One window of samples, in every world of scenarios.py, and its bytes."""

import pytest
import torch
from torch import nn

from kit.laws.checks import check_close
from kit.laws.toys import mse
from kit.laws.twists import BAD_PAIRS
from specs.gradient_accumulation import memory, scenarios
from specs.gradient_accumulation.laws import ACCUMULATED


class TestPart1Accumulate:
    @pytest.mark.works("accumulate", "gradients")
    def test_takes_the_step_that_one_can_take_by_hand(self, answer, device):
        """w = 3. One sample x = 1, y = 0: loss 9, gradient 6. Three of x = 1, y = 2: 1 and 2.

        The mean over four samples is (9 + 3 x 1) / 4 = 3, its gradient (6 + 3 x 2) / 4 = 3: SGD
        with lr 1 takes w to 0. A mean of the two means is 5, with gradient 4.
        """
        model = nn.Linear(1, 1, bias=False).to(device)
        nn.init.constant_(model.weight, 3.0)
        one, three = torch.ones(1, 1, device=device), torch.ones(3, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = answer.accumulate(model, [(one, 0 * one), (three, 2 * three)], mse, optimizer)
        check_close(
            torch.tensor([float(loss), model.weight.item()]),
            torch.tensor([3.0, 0.0]),
            "loss and weight",
            cause="do the step by hand and compare",
            suspects={
                "a mean of means: every micro-batch counts the same": [5.0, -1.0],
                "the micro-batches' means are added up: nothing is divided": [10.0, -5.0],
                "gradients are cleared inside the window": [3.0, 1.5],
                "the loss is the mean of the means, although the step is right": [5.0, 0.0],
                "the loss is the last micro-batch's share": [0.75, 0.0],
                "every micro-batch is taken to be as large as the first": [6.0, -3.0],
                "a step for each micro-batch, and one at the end": [2.4375, 0.0],
                "a step for each micro-batch": [2.4375, 0.75],
                "a step for each micro-batch, on its gradients alone": [2.4375, 2.25],
                "no step was taken": [3.0, 3.0],
            },
        )

    @pytest.mark.exact("accumulate", "gradients")
    @ACCUMULATED.spec()
    def test_gradients_and_loss_are_those_of_the_window_in_one_batch(self):
        """An average of averages lived in frameworks for years (huggingface/transformers#24725)."""
        yield ("9, 1 and 4 samples",)
        yield "the same micro-batch again", scenarios.repeated
        yield "samples of several lengths", scenarios.sequences
        yield scenarios.LOSS

    @pytest.mark.exact("accumulate", "step")
    @ACCUMULATED.spec()
    def test_steps_once_with_the_whole_windows_gradients(self):
        yield from scenarios.STEPS

    @pytest.mark.exact("accumulate", "passes")
    @ACCUMULATED.spec()
    def test_runs_the_model_once_on_each_micro_batch_in_the_mode_that_it_is_in(self):
        yield from scenarios.MODES

    @pytest.mark.saves("accumulate", "memory")
    @memory.CASES
    def test_peaks_as_one_micro_batch(self, answer, reference, device, case):
        """The formulas are in memory.py."""
        memory.check_peak(
            memory.of_samples(case, device),
            lambda module, c, optimizer: module.accumulate(c.model, c.batches, c.loss, optimizer),
            *(answer, reference),
        )

    @pytest.mark.survives("accumulate", 1)
    @ACCUMULATED.spec()
    def test_does_not_step_what_gets_no_gradient(self):
        """Weight decay and momentum move a parameter whose gradient is old, or zeros."""
        yield from scenarios.NO_GRADIENT

    @pytest.mark.survives("accumulate", "Raises")
    @ACCUMULATED.spec()
    def test_refuses_a_bad_micro_batch_anywhere_before_anything_is_changed(self):
        yield from scenarios.bad(BAD_PAIRS, 0, 2)
        yield scenarios.NOTHING
