"""A window on several ranks: real processes, on the CPU whatever --device is."""

import math

import pytest
import torch

from kit.laws.checks import check_bar, check_close, check_equal
from specs.gradient_accumulation import memory, ranks
from specs.gradient_accumulation.plans import CPU, ON_RANKS
from specs.gradient_accumulation.tokens import rows


class TestPart4AccumulateOnRanks:
    @pytest.mark.works("accumulate_on_ranks", "divisor")
    def test_every_rank_takes_the_step_that_one_can_take_by_hand(self, answer, world):
        """As in part 2: three labels on rank 0 and one on rank 1, each with a loss of ln 2.

        Over four labels the rows move by (3, -3) and (-1, 1), and the shares are 3/4 and 1/4 ln 2.
        """
        (one, weight), (other, second) = world.run(answer, ranks.step_by_hand)
        check_close(
            weight,
            rows(3, 1),
            "weight on rank 0",
            cause="do the step by hand and compare",
            suspects={
                "DDP's average over the ranks is not multiplied away": rows(1.5, 0.5),
                "each rank divides by its own tokens: a mean of the ranks' means": rows(2, 2),
                "each rank divides by its own tokens: a sum of the ranks' means": rows(4, 4),
                "rank 0 steps with its own gradients: nothing is synchronised": rows(6, 0),
            },
        )
        check_equal(second, weight, "weight on rank 1, as on 0", cause="a rank does not step")
        shares, mean = torch.tensor([3.0, 1.0]) * math.log(2) / 4, torch.ones(2) * math.log(2)
        check_close(
            torch.stack([one, other]),
            shares,
            "both ranks' shares",
            cause="a share is the sum over the rank's tokens, divided by the tokens of all ranks",
            suspects={
                "each rank returns a mean (its own, or that of all), and not its share": mean,
                "each rank returns the mean of what all return": mean / 2,
            },
        )

    @pytest.mark.exact("accumulate_on_ranks", "divisor")
    def test_the_gradient_is_that_of_one_process_with_all_the_data(self, answer, world):
        """DDP averages over ranks: (g_0 + g_1) / 2. Wanted is the sum over all tokens by T.

        So g_r has to be 2 / T times the sum over the tokens of rank r, T being those of all ranks
        (meta-pytorch/torchtune#1917 has the same arithmetic).
        """
        ON_RANKS.hold_on(world, answer, "divisor")

    @pytest.mark.saves("accumulate_on_ranks", "sends")
    def test_sends_the_gradients_once_a_window(self, answer, reference, world):
        """Bytes that a rank sends <= 4 for each trained number + 8 counts of 8 bytes.

        Whatever the number of micro-batches: a backward pass outside no_sync() sends all of them.
        """
        yours, theirs = (world.run(module, ranks.sent)[0] for module in (answer, reference))
        trained = yours["trained"]
        check_bar(
            "bytes that rank 0 sends in a window of 4",
            yours["bytes"],
            4 * trained + 8 * 8,
            plain=4 * 4 * trained,
            reference=theirs["bytes"],
            formula="one set of trained gradients + 8 numbers; plain sends one per micro-batch",
            cause="gradients are sent more than once (forward belongs in no_sync() too)",
        )
        what = "whether a call sends at most 8 numbers"
        cause = "each gradient is sent separately, or flags, losses or logs have their own calls"
        check_equal(yours["small"], [True, False], what, cause=cause)
        what = "gradients sent by DDP in a backward pass"
        cause = "gradients are sent by hand: in one more copy, and bypassing DDP's hooks"
        check_equal(yours["by DDP"], trained, what, cause=cause)
        order = ["forward"] * 4 + ["gradients"]
        cause = "a backward pass other than the last sends gradients"
        check_equal(yours["order"], order, "order of passes", cause=cause)

    @pytest.mark.saves("accumulate_on_ranks", "window")
    @memory.CASES
    def test_a_ranks_window_peaks_as_one_micro_batch(self, answer, reference, world, case):
        """As in part 2, plus DDP's buckets: one more set of gradients."""
        made = memory.of_tokens(case, CPU)
        (limit, plain, formula), buckets = memory.limit_of(made), memory.gradients_of(made)
        yours, theirs = (world.run(module, ranks.peak, case)[0] for module in (answer, reference))
        check_bar(
            f"peak of a window of {len(made.batches)} on rank 0",
            yours,
            limit + buckets,
            plain=plain + buckets,
            reference=theirs,
            formula=f"{formula}; plus DDP's buckets",
            cause=memory.CAUSES[case],
        )

    @pytest.mark.survives("accumulate_on_ranks", 1)
    def test_any_micro_batch_or_rank_may_be_without_labels(self, answer, world):
        ON_RANKS.hold_on(world, answer, 1)

    @pytest.mark.survives("accumulate_on_ranks", 2)
    def test_counts_the_ranks_of_the_models_process_group(self, answer, world):
        """Each rank trains a model of its own: its process group has that rank only."""
        ON_RANKS.hold_on(world, answer, 2)

    @pytest.mark.survives("accumulate_on_ranks", "Raises")
    def test_a_bad_window_on_one_rank_is_refused_by_all(self, answer, world):
        ON_RANKS.hold_on(world, answer, "Raises")
