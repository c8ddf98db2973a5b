"""One window of tokens, in every world of tokens.py, and its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.laws.checks import check_close
from specs.gradient_accumulation import memory
from specs.gradient_accumulation.laws import OF_TOKENS
from specs.gradient_accumulation.tokens import rows


class TestPart2AccumulateTokens:
    @pytest.mark.works("accumulate_tokens", "divisor")
    def test_takes_the_step_of_tokens_that_one_can_take_by_hand(self, answer, device):
        """Logits of 0 for two classes: p = 1/2, and a token with label 0 has gradient (-1/2, 1/2).

        One sample has token 0 three times, with labels; three samples have token 1 once, one with
        a label. The mean is over four labels: with lr 8 the rows move by (3, -3) and (-1, 1).
        """
        model = nn.Embedding(2, 2).to(device)
        nn.init.zeros_(model.weight)
        ids = torch.tensor([[0, 0, 0], [1, 1, 1]], device=device)
        labels = torch.tensor([[0, 0, 0], [1, -100, -100]], device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
        answer.accumulate_tokens(
            model, [(ids[:1], labels[:1]), (ids[1:].T, labels[1:].T)], optimizer
        )

        check_close(
            model.weight.cpu(),
            rows(3, 1),
            "both rows of the weight",
            cause="do the step by hand and compare",
            suspects={
                "a mean of means: a token counts for more where there are few": rows(2, 2),
                "tokens without a label are in the divisor": rows(2, 2 / 3),
                "the sum over the tokens is not divided by their number": rows(12, 4),
                "a step for each micro-batch": rows(9, 2),
                "the targets are shifted once more; they are already": rows(4, 0),
                "no step was taken": rows(0, 0),
                "means weighted by samples: count labelled tokens": rows(1, 3),
            },
        )

    @pytest.mark.exact("accumulate_tokens", "divisor")
    def test_every_labelled_token_counts_once(self, answer, device):
        """With equal numbers a mean of means is right to 1e-7; with 12, 6, 3 and 1 it is far off.

        huggingface/transformers#24725, and meta-pytorch/torchtune#1875 for the remedy.
        """
        OF_TOKENS.hold(answer, device, "divisor")

    @pytest.mark.exact("accumulate_tokens", "ignore_index")
    def test_honours_ignore_index_in_the_loss_and_in_the_count(self, answer, device):
        """0 is the padding of many tokenizers, and a class like any other for F.cross_entropy."""
        OF_TOKENS.hold(answer, device, "ignore_index")

    @pytest.mark.exact("accumulate_tokens", "window")
    def test_steps_once_with_the_gradients_of_this_window(self, answer, device):
        OF_TOKENS.hold(answer, device, "window")

    @pytest.mark.saves("accumulate_tokens", "window")
    @memory.CASES_OF_TOKENS
    def test_a_window_of_tokens_peaks_as_one_micro_batch(self, answer, reference, device, case):
        """Whatever the number of micro-batches; the formulas are in memory.py."""
        memory.check_peak(
            memory.of_tokens(case, device),
            lambda module, c, optimizer: module.accumulate_tokens(c.model, c.batches, optimizer),
            *(answer, reference),
        )

    @pytest.mark.survives("accumulate_tokens", "window")
    def test_the_same_of_tokens_in_unusual_surroundings(self, answer, device):
        OF_TOKENS.hold(answer, device, "unusual")

    @pytest.mark.survives("accumulate_tokens", 1)
    def test_a_micro_batch_without_labels_adds_nothing(self, answer, device):
        """A mean over no tokens is 0 / 0, and one NaN is in every gradient after it."""
        OF_TOKENS.hold(answer, device, "no labels")

    @pytest.mark.survives("accumulate_tokens", 2)
    def test_takes_slices_and_transposed_logits(self, answer, device):
        """F.cross_entropy looks for classes in dimension 1, and does not say so if it fits."""
        OF_TOKENS.hold(answer, device, "strides")

    @pytest.mark.survives("accumulate_tokens", 3)
    def test_the_loss_of_a_model_in_sixteen_bits_is_float32(self, answer, device):
        """A sum of losses over a few thousand tokens is infinite in float16."""
        OF_TOKENS.hold(answer, device, "16 bits")

    @pytest.mark.survives("accumulate_tokens", 4)
    def test_other_parameters_and_errors_are_as_in_accumulate(self, answer, device):
        OF_TOKENS.hold(answer, device, "others")

    @pytest.mark.survives("accumulate_tokens", "Raises")
    def test_refuses_bad_tokens_anywhere_before_anything_is_changed(self, answer, device):
        OF_TOKENS.hold(answer, device, "bad")
