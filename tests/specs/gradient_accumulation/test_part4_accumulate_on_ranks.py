"""A window on several ranks: real processes, which run on the CPU whatever --device is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from kit.laws.checks import check, check_bar, check_close, check_equal
from specs.gradient_accumulation import ranks
from specs.gradient_accumulation.common import Batch, check_vector, gradient, gradient_bytes
from specs.gradient_accumulation.tokens import (
    UNEQUAL,
    language_model,
    token_losses,
    wide_model,
    window_loss,
)

PLANS = {
    "tokens_12_and_1": ([(3, 4, 12)], [(4, 3, 1)]),
    "micro_batches_4_and_1": (UNEQUAL, [(2, 5, 6)]),
    "micro_batches_1_and_3": ([(2, 5, 6)], [(1, 4, 3), (3, 3, 8), (2, 2, 1)]),
    "rank_1_without_labels": ([(3, 4, 12), (1, 4, 2)], [(2, 3, 0)]),
    "last_without_labels": ([(2, 5, 6), (1, 2, 2)], [(1, 4, 3), (2, 3, 0)]),
}
UNEQUAL_RANKS = PLANS["tokens_12_and_1"]
TOKENS = torch.ones(12, dtype=torch.int64)
# The last micro-batch of a rank, and what its message must hold.
BAD: dict[str, tuple[Any, list[str]]] = {
    "no_micro_batch": (None, ["0"]),
    "bad_shapes": ((TOKENS.view(2, 6), TOKENS.view(6, 2)), ["2", "6"]),
    "an_empty_one": ((TOKENS.view(12, 1)[:, :0], TOKENS.view(12, 1)[:, :0]), ["0"]),
    "inputs_only": (TOKENS.view(2, 6), []),
}


class TestPart4AccumulateOnRanks:
    subject = "accumulate_on_ranks"

    @pytest.mark.works
    def test_every_rank_steps_once_and_the_shares_add_up(self, answer, world):
        """12 and 1 labelled tokens: the two shares are the mean over 13, not two means."""
        model, batches = language_model("cpu"), ranks.joined(UNEQUAL_RANKS, 0)
        each = [token_losses(model, batch).detach() for batch in batches]
        start = parameters_to_vector(model.parameters()).detach()
        results = world.run(answer, ranks.train, UNEQUAL_RANKS, 1)
        for result in results:
            (loss,) = result["losses"]
            check(
                isinstance(loss, Tensor) and loss.dim() == 0 and not loss.requires_grad,
                expected="the share as a tensor without dimensions and without a graph",
                got=f"{type(loss).__name__} {loss}",
                cause="a loss that is kept with its graph keeps the graph alive: detach it",
            )
            check_equal(result["steps"], 1, "steps of each rank", cause="a rank does not step")
            moved = not torch.equal(result["weights"], start)
            check(moved, expected="weights that moved", got="none did", cause="no gradient")
        got = torch.stack([result["losses"][0] for result in results])
        want = torch.stack([losses.sum() for losses in each]) / 13
        guesses = {
            "each rank returns its own mean": torch.stack([losses.mean() for losses in each]),
            "each rank returns the loss of all": want.sum().expand(2),
            "each rank returns the mean of what all return": want.mean().expand(2),
            "its share is multiplied by the number of ranks": 2 * want,
        }
        otherwise = "the shares are not sums over the rank's tokens by the tokens of all"
        check_vector(got, want, "both ranks' shares", guesses=guesses, otherwise=otherwise)

    @pytest.mark.exact
    @pytest.mark.parametrize("plan", PLANS)
    def test_the_gradient_is_that_of_one_process_with_all_the_data(self, answer, world, plan):
        """DDP averages over ranks: (g_0 + g_1) / 2. Wanted is the sum over all tokens by T.

        So g_r has to be 2 / T times the sum over the tokens of rank r, T being those of all ranks
        (meta-pytorch/torchtune#1917 has the same arithmetic).
        """
        one, other = world.run(answer, ranks.train, PLANS[plan], 1)
        want, guesses = _gradient_and_guesses(ranks.windows(PLANS[plan], 0))
        for rank, result in enumerate((one, other)):
            check_vector(
                result["gradient"],
                want,
                f"gradient on rank {rank}",
                guesses=guesses,
                otherwise="a rank's loss is not the sum over its tokens by the tokens of all",
            )
        loss = window_loss(language_model("cpu"), ranks.joined(PLANS[plan], 0))
        cause = "a rank without labels has a share of 0, and no other"
        shares = one["losses"][0] + other["losses"][0]
        check_close(shares, loss, "sum of both ranks' shares", cause=cause)
        cause = "only one of them has stepped, or their gradients differ in the last bits"
        check_equal(other["weights"], one["weights"], "weights on rank 1, as on 0", cause=cause)

    @pytest.mark.exact
    def test_trains_as_one_process_over_three_windows(self, answer, world):
        plan = PLANS["micro_batches_4_and_1"]
        results = world.run(answer, ranks.train, plan)
        model, losses = language_model("cpu"), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            optimizer.zero_grad()
            loss = window_loss(model, ranks.joined(plan, number))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        check_vector(
            results[0]["weights"],
            parameters_to_vector(model.parameters()).detach(),
            "weights after three windows",
            guesses={},
            otherwise="a later window is not synchronised, or an earlier one reaches into it",
        )
        got = torch.stack([torch.stack(result["losses"]) for result in results]).sum(0)
        cause = "the shares do not add up in every window"
        check_close(got, torch.stack(losses), "losses of the windows", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("ignore_index", [0, 3])
    def test_honours_ignore_index_on_every_rank(self, answer, world, ignore_index):
        plan = PLANS["micro_batches_1_and_3"]
        result = world.run(answer, ranks.train, plan, 1, ignore_index)[0]
        model, batches = language_model("cpu"), ranks.joined(plan, 0, ignore_index)
        want = gradient(model, window_loss(model, batches, ignore_index))
        cause = "ignore_index is not heeded both in the loss and in the count"
        check_vector(result["gradient"], want, "gradient", guesses={}, otherwise=cause)

    @pytest.mark.saves
    @pytest.mark.parametrize("count", [1, 4])
    def test_sends_the_gradients_once_a_window(self, answer, reference, world, count):
        """Bytes that a rank sends <= 4 for each trained number + 8 counts of 8 bytes.

        Whatever the number of micro-batches: a backward pass outside no_sync() sends all of them.
        """
        plan = UNEQUAL[:count], UNEQUAL[-count:]
        yours, theirs = (world.run(module, ranks.sent, plan)[0] for module in (answer, reference))
        trained = yours["trained"]
        check_bar(
            f"bytes that rank 0 sends in a window of {count}",
            yours["bytes"],
            4 * trained + 8 * 8,
            plain=count * 4 * trained,
            reference=theirs["bytes"],
            formula="one set of trained gradients + 8 numbers; plain sends one a micro-batch",
            cause="gradients are sent for every micro-batch: forward too belongs in no_sync()",
        )
        few = [size <= 8 for size in yours["sizes"]]
        cause = "one call for the counts, and one for all gradients: each tensor is sent by itself,"
        cause += " or counts are more than 8 numbers, or flags or losses have calls of their own"
        what = "whether a call sends at most 8 numbers, in order"
        check_equal(few, [True, False], what, cause=cause)
        what = "gradients sent by DDP in a backward pass"
        cause = "gradients are sent by hand: in one more copy, and behind the back of DDP's hooks"
        check_equal(yours["by DDP"], trained, what, cause=cause)

    @pytest.mark.saves
    def test_a_ranks_peak_is_the_same_for_2_and_8_micro_batches(self, answer, reference, world):
        """Equal within 1 %: no_sync() is for the communication, and graphs still go at once."""

        def peaks(module: object) -> list[int]:
            return [world.run(module, ranks.peak, count)[0] for count in (2, 8)]

        yours, theirs = peaks(answer), peaks(reference)
        check_bar(
            "peak of a window of 8 on rank 0",
            yours[1],
            1.01 * yours[0],
            plain=8 * yours[0] - 7 * gradient_bytes(wide_model("cpu")),
            reference=theirs[1],
            formula="1.01 x the peak of a window of 2; plain keeps all graphs",
            cause="graphs are kept until one backward pass at the end",
        )

    @pytest.mark.survives
    def test_a_window_on_ranks_starts_without_gradients(self, answer, world):
        world.run(answer, ranks.starts_clean, PLANS["micro_batches_1_and_3"])

    @pytest.mark.survives
    @pytest.mark.parametrize("bad_rank", [0, 1])
    @pytest.mark.parametrize("kind", BAD)
    def test_a_bad_window_on_one_rank_is_refused_by_all(self, answer, world, kind, bad_rank):
        """Who raises alone leaves the others waiting for ever."""
        plan = ranks.windows(UNEQUAL_RANKS, 5)
        batch, words = BAD[kind]
        plan[bad_rank] = [] if batch is None else [*plan[bad_rank], batch]
        mentions = [words if rank == bad_rank else [] for rank in (0, 1)]
        when = f"on every rank, where rank {bad_rank} has {kind.replace('_', ' ')}"
        world.run(answer, ranks.refused, plan, mentions, when)

    @pytest.mark.survives
    def test_no_labelled_token_on_any_rank_is_refused_by_all(self, answer, world):
        plan = ranks.windows(([(2, 3, 0), (1, 4, 0)], [(3, 2, 0)]), 5)
        when = "on every rank, where all ranks together have 0 labelled tokens"
        world.run(answer, ranks.refused, plan, [[], []], when)

    @pytest.mark.survives
    def test_trains_on_after_a_refused_window(self, answer, world):
        good, when = ranks.windows(UNEQUAL_RANKS, 5), "on every rank, where rank 1 has no window"
        got = world.run(answer, ranks.refused_then_good, [good[0], []], when)
        model = language_model("cpu")
        want = gradient(model, window_loss(model, ranks.joined(ranks.GOOD, 1)))
        cause = "something of the refused window is left: gradients, or no_sync()"
        for rank in (0, 1):
            what = f"gradient of the next window on rank {rank}"
            check_vector(got[rank], want, what, guesses={}, otherwise=cause)

    @pytest.mark.survives
    def test_ddp_synchronises_again_after_a_window(self, answer, world):
        """An ordinary step after it has the mean of both ranks' gradients."""
        got = world.run(answer, ranks.then_plain, PLANS["micro_batches_1_and_3"])
        cause = "no_sync() is entered and not left, or its flag is set by hand"
        check_equal(got[1], got[0], "gradient of a plain step on rank 1, as on 0", cause=cause)

    @pytest.mark.survives
    def test_counts_the_ranks_of_the_models_process_group(self, answer, world):
        world.run(answer, ranks.in_groups_of_one, PLANS["micro_batches_1_and_3"])


def _gradient_and_guesses(both: list[list[Batch]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient over both ranks' windows, and those of likely mistakes."""
    model = language_model("cpu")
    counts = [sum(int((y != -100).sum()) for _, y in window) for window in both]
    sums = [
        gradient(model, window_loss(model, window)) * count if count else torch.zeros(1)
        for window, count in zip(both, counts, strict=True)
    ]
    tokens = sum(counts)
    want = (sums[0] + sums[1]) / tokens
    means = sums[0] / max(counts[0], 1) + sums[1] / max(counts[1], 1)
    guesses = {
        "DDP's average over the ranks is not multiplied away": want / 2,
        "each rank divides by its own tokens: a mean of the ranks' means": means / 2,
        "each rank divides by its own tokens: a sum of the ranks' means": means,
        "the sum over the tokens is not divided by their number": want * tokens,
    }
    if all(counts):
        guesses["it is the gradient of rank 0 only: nothing is synchronised"] = 2 * sums[0] / tokens
    return want, guesses
