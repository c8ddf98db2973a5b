"""One window of tokens, in the worlds of scenarios.py and tokens.py, and its bytes."""

import pytest
import torch
from torch import nn

from kit.laws.checks import check_close
from kit.laws.twists import refused, trained_before
from specs.gradient_accumulation import memory, scenarios, tokens
from specs.gradient_accumulation.laws import TOKENS
from specs.gradient_accumulation.tokens import UNEQUAL, no_labels, of, rows, transposed


class TestPart2AccumulateTokens:
    @pytest.mark.works("accumulate_tokens", "divisor")
    def test_takes_the_step_of_tokens_that_one_can_take_by_hand(self, answer, device):
        """Logits of 0 for two classes: p = 1/2, and a token with label 0 has gradient (-1/2, 1/2).

        One sample has token 0 three times, labelled; three samples have token 1 once, and one is
        labelled. The mean is over four labels: with lr 8 the rows move by (3, -3) and (-1, 1).
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
                "the targets are shifted once more, and counted before that": rows(2, 0),
                "means weighted by samples: count labelled tokens": rows(1, 3),
                "logits are reshaped where they should be transposed": rows(1, 1),
            },
        )

    @pytest.mark.exact("accumulate_tokens", "divisor")
    @TOKENS.spec()
    def test_every_labelled_token_counts_once(self):
        """With equal numbers a mean of means is right to 1e-7; with 12, 6, 3 and 1 it is far off.

        huggingface/transformers#24725; meta-pytorch/torchtune#1875 has the fix.
        """
        yield ("12, 6, 3 and 1 labelled tokens",)
        yield "2,049 of 2,400 tokens labelled", of((4, 600, 2049), (1, 4, 4))
        yield "logits of hundreds", tokens.hundreds

    @pytest.mark.exact("accumulate_tokens", "ignore_index")
    @TOKENS.spec()
    def test_honours_ignore_index_in_the_loss_and_in_the_count(self):
        """0 is the padding of many tokenizers, and a class like any other for F.cross_entropy."""
        for n in (0, -1, 255):
            yield f"ignore_index {n}", of(*UNEQUAL, ignore_index=n)
        yield "ignore_index 0, its logits -inf", of(*UNEQUAL, ignore_index=0), tokens.never_0

    @pytest.mark.exact("accumulate_tokens", "window")
    @TOKENS.spec()
    def test_steps_once_with_the_gradients_of_this_window(self):
        yield from scenarios.STEPS
        yield from scenarios.MODES
        yield from scenarios.NO_GRADIENT
        yield "an adapter", tokens.adapter, trained_before

    @pytest.mark.saves("accumulate_tokens", "window")
    @memory.CASES_OF_TOKENS
    def test_a_window_of_tokens_peaks_as_one_micro_batch(self, answer, reference, device, case):
        memory.check_peak(
            memory.of_tokens(case, device),
            lambda module, c, optimizer: module.accumulate_tokens(c.model, c.batches, optimizer),
            *(answer, reference),
        )

    @pytest.mark.survives("accumulate_tokens", 1)
    @TOKENS.spec()
    def test_a_micro_batch_without_labels_adds_nothing(self):
        """A mean over no tokens is 0 / 0, and one NaN spreads to every gradient."""
        yield "no label in the first micro-batch", *no_labels(0)
        yield "no label in the last micro-batch", *no_labels(3)

    @pytest.mark.survives("accumulate_tokens", 2)
    @TOKENS.spec()
    def test_takes_slices_and_transposed_logits(self):
        """F.cross_entropy expects classes in dimension 1, and is silently wrong if sizes fit."""
        yield "logits transposed", transposed

    @pytest.mark.survives("accumulate_tokens", 3)
    @TOKENS.spec()
    def test_the_loss_of_a_model_in_sixteen_bits_is_float32(self):
        """A sum of losses over a few thousand tokens is infinite in float16."""
        yield "a model in float16", tokens.IN_FLOAT16
        yield "a model in bfloat16, logits transposed", tokens.IN_BFLOAT16, transposed

    @pytest.mark.survives("accumulate_tokens", "Raises")
    @TOKENS.spec()
    def test_refuses_bad_tokens_anywhere_before_anything_is_changed(self):
        yield from scenarios.bad(tokens.BAD, 0, 3)
        yield scenarios.NOTHING
        yield "no label in any place", *refused(of((2, 3, 0), (1, 5, 0)), mentions=[0])
