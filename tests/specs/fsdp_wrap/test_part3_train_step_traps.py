"""train_step where something is in the way: old gradients, bad input on one rank, errors."""

from __future__ import annotations

import pytest

from kit.laws.checks import check, check_close
from specs.fsdp_wrap import ranks_inputs, ranks_step
from specs.fsdp_wrap.models import Batch, check_named, gradients, joined, make, mse, train_alone
from specs.fsdp_wrap.ranks_step import AFTER, GOOD, Plan, batches, of_all

PLAN: Plan = [[3, 2], [1, 6]]
ONE: Plan = [[3], [1]]  # where it is not about several micro-batches
PLAN_OF_4: Plan = [*PLAN, [2, 5], [5, 1]]

# What becomes of the micro-batches of one rank.
BAD = {
    "no_micro_batch": lambda window: [],
    "one_too_few": lambda window: window[:-1],
    "more_inputs_than_targets": lambda window: [*window[:-1], (window[-1][0], window[-1][1][1:])],
    "more_targets_than_inputs": lambda window: [(window[0][0][1:], window[0][1]), *window[1:]],
    "an_empty_one": lambda window: [*window[:-1], (window[-1][0][:0], window[-1][1][:0])],
}


class TestPart3TrainStep:
    subject = "train_step"

    @pytest.mark.survives
    def test_a_step_starts_without_gradients(self, answer, world):
        want = train_alone(make(), [of_all(PLAN, 0)])
        for got in world.run(answer, ranks_step.starts_clean, PLAN):
            cause = "gradients from before the step are in it"
            check_named(got.gradients, want.gradients, "gradient of the step", cause=cause)

    @pytest.mark.survives
    def test_leaves_gradients_alone_without_max_norm(self, answer, world):
        """Also where one is infinite: inf / inf, the factor of a clipping to it, is nan."""
        want = train_alone(make(), [of_all(ONE, 0)]).gradients
        for rank, got in enumerate(world.run(answer, ranks_step.infinite, ONE)):
            check(
                got.norms[0] == float("inf"),
                expected="grad_norm = inf: the head's bias has an infinite gradient",
                got=got.norms[0],
                cause="the norm is not over every gradient",
            )
            finite = {n: g for n, g in got.gradients.items() if n != "head.bias"}
            cause = "max_norm=None clips, to an infinite norm perhaps"
            true = {name: want[name] for name in finite}
            check_named(finite, true, f"gradient on rank {rank}", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("sync", ["each", "last"])
    def test_the_next_plain_backward_synchronises(self, answer, world, sync):
        """set_requires_gradient_sync(False) holds until somebody takes it back."""
        got = world.run(answer, ranks_step.then_plain, PLAN, sync)
        _check_plain(got, "synchronisation is off, or gradients are scaled, after train_step")

    @pytest.mark.survives
    def test_a_plain_backward_synchronises_after_an_error(self, answer, world):
        got = world.run(answer, ranks_step.plain_after_an_error, PLAN)
        _check_plain(got, "synchronisation stays off where loss_fn raises")

    @pytest.mark.survives
    def test_a_step_is_right_after_an_error_with_all_gathered(self, answer, world):
        """reshard_after_forward=False, and no backward has given the model back."""
        want = train_alone(make(), [of_all(ONE, 0)])
        for got in world.run(answer, ranks_inputs.step_after_an_error, ONE):
            cause = "something of the step in which loss_fn has raised is left"
            check_close(got.norms[0], want.norms[0], "norm", cause=cause, rtol=1e-4)
            check_named(got.gradients, want.gradients, "gradient of the step", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [4], indirect=True, ids=["4_ranks"])
    def test_counts_the_ranks_that_share_the_model(self, answer, world):
        """Of four ranks 0 and 1 have one model, 2 and 3 have another: meshes of two."""
        got = world.run(answer, ranks_step.in_pairs, PLAN_OF_4)
        for rank, result in enumerate(got):
            pair = (0, 1) if rank < 2 else (2, 3)
            want = train_alone(make(), [[b for r in pair for b in batches(PLAN_OF_4, 0, r)]])
            cause = "all ranks of the job are counted, not those of the model's mesh"
            check_close(result.losses[0], want.losses[0], f"loss on rank {rank}", cause=cause)
            check_close(result.norms[0], want.norms[0], f"norm on rank {rank}", cause=cause)
            what = f"gradient on rank {rank}"
            check_named(result.gradients, want.gradients, what, cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("bad_rank", [0, 1])
    @pytest.mark.parametrize("kind", BAD)
    def test_a_bad_step_on_one_rank_is_refused_by_all(self, answer, world, kind, bad_rank):
        """Who raises alone leaves the others waiting for ever."""
        windows = _windows(kind, bad_rank)
        mentions = [[str(len(window))] for window in windows]
        when = f"on every rank, where rank {bad_rank} has {kind.replace('_', ' ')}"
        world.run(answer, ranks_step.refused, windows, mentions, when)

    @pytest.mark.survives
    def test_a_step_without_any_micro_batch_is_refused(self, answer, world):
        """Every rank has as many as the others: none."""
        world.run(answer, ranks_step.refused, [[], []], [["0"], ["0"]], "where no rank has any")

    @pytest.mark.survives
    def test_trains_on_after_a_refused_step(self, answer, world):
        when = "on every rank, where rank 1 has no micro-batch"
        windows = _windows("no_micro_batch", 1)
        want = train_alone(make(), [of_all(GOOD, step) for step in range(2)])
        for got in world.run(answer, ranks_step.refused_then_good, windows, when):
            cause = "something of the refused step is left"
            check_named(got.weights, want.weights, "weights after the next step", cause=cause)

    @pytest.mark.survives
    def test_refuses_options_that_are_none(self, answer, world):
        world.run(answer, ranks_step.refuses_arguments)


def _windows(kind: str, bad_rank: int) -> list[list[Batch]]:
    windows = [batches(PLAN, 5, rank) for rank in range(2)]
    windows[bad_rank] = BAD[kind](windows[bad_rank])
    return windows


def _check_plain(got: list[ranks_step.Trained], cause: str) -> None:
    """The gradients of a mean over the same number of samples on every rank."""
    __tracebackhide__ = True
    model = make()
    inputs, targets = joined(batches([[4], [4]], AFTER, rank)[0] for rank in range(2))
    mse(model(inputs), targets).backward()
    for rank, result in enumerate(got):
        what = f"gradient of a plain backward on rank {rank}"
        check_named(result.gradients, gradients(model), what, cause=cause)
