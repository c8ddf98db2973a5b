"""train_step by value: several ranks against one process. The ranks run on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest
import torch
from torch import Tensor

from kit.laws.checks import check, check_close, check_equal, fail
from specs.fsdp_wrap import ranks_inputs, ranks_step
from specs.fsdp_wrap.models import (
    Trained,
    check_named,
    gradients,
    in_groups,
    make,
    mse,
    train_alone,
)
from specs.fsdp_wrap.ranks_step import Plan, batches, of_all

# Unequal samples over ranks, and over the micro-batches of a rank.
PLANS: dict[int, Plan] = {
    1: [[3, 2, 4]],
    2: [[3, 2], [1, 6]],
    4: [[3], [1], [2], [5]],  # one each: the first is the last
}
PLAN = PLANS[2]
ONE: Plan = [[3], [1]]  # where it is not about several micro-batches
SIZES_AND_SYNCS = pytest.mark.parametrize(
    ("world", "sync"),
    [(1, "each"), (2, "each"), (2, "last"), (4, "last")],
    indirect=["world"],
    ids=["1_rank-each", "2_ranks-each", "2_ranks-last", "4_ranks-last"],
)


class TestPart3TrainStep:
    subject = "train_step"

    @pytest.mark.works
    def test_a_step_is_on_the_mean_over_the_samples_of_all_ranks(self, answer, world):
        """For the micro-batches b of all ranks: sum of n_b * (mean loss of b) / sum of n_b."""
        got = world.run(answer, ranks_step.train, PLAN)[0]
        loss, guesses = _of_batches(_losses(PLAN))
        _check_guess(torch.tensor(got.losses[0]), loss, "loss", guesses)
        gradient, guesses = _of_batches(_gradients(PLAN))
        _check_guess(_joined(got.gradients), gradient, "gradients of the step", guesses)

    @pytest.mark.works
    @SIZES_AND_SYNCS
    def test_trains_as_one_process_over_three_steps(self, answer, world, sync):
        plan = PLANS[world.size]
        got = world.run(answer, ranks_step.train, plan, 3, None, None, {"sync": sync})
        want = train_alone(make(), [of_all(plan, step) for step in range(3)])
        for rank, result in enumerate(got):
            _check_trained(result, want, rank)

    @pytest.mark.works
    def test_a_sample_counts_once_however_large_it_is(self, answer, world):
        """Tokens: the lengths differ, 2 and 7 on rank 0, 5 and 1 on rank 1."""
        model, every = ranks_inputs.reader(), [b for r in (0, 1) for b in ranks_inputs.texts(r)]
        shares = [len(inputs) * mse(model(inputs), targets) for inputs, targets in every]
        loss = torch.stack(shares).sum() / sum(len(inputs) for inputs, _ in every)
        loss.backward()
        for rank, got in enumerate(world.run(answer, ranks_inputs.reads)):
            cause = "tokens are counted, and not samples"
            check_close(got.losses[0], loss, f"loss on rank {rank}", cause=cause, rtol=1e-4)
            check_named(got.gradients, gradients(model), "gradient of the step", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_returns_plain_float32_scalars_the_same_on_every_rank(self, answer, world, dtype):
        one, other = world.run(answer, ranks_step.result_of_a_step, ONE, dtype)
        for name in ("loss", "grad_norm"):
            check_equal(
                one[name],
                "Tensor torch.float32 () graph=False",
                name,
                cause="a DTensor, a number of Python, or a tensor that keeps its graph is returned",
            )
        cause = "what is returned is of this rank's data, or of its shards, only"
        check_equal(
            other["numbers"], one["numbers"], "loss and norm on rank 1, as on 0", cause=cause
        )

    @pytest.mark.exact
    @pytest.mark.parametrize("limit", ["binds", "does_not_bind", "is_infinite"])
    def test_clips_to_the_norm_of_the_whole_model(self, answer, world, limit):
        """The norm of all gradients is sqrt(sum over ranks of the squares of their shards)."""
        steps = [of_all(ONE, 0)]
        norm = train_alone(make(), steps).norms[0]
        max_norm = {"binds": norm / 3, "does_not_bind": 3 * norm, "is_infinite": inf}[limit]
        want = train_alone(make(), steps, max_norm=max_norm)
        for rank, got in enumerate(
            world.run(answer, ranks_step.train, ONE, 1, None, None, {"max_norm": max_norm})
        ):
            _check_norm(got.norms[0], norm, max_norm, rank)
            cause = "clipping is not by max_norm / norm, where the norm is above max_norm"
            check_named(got.gradients, want.gradients, "gradient after clipping", cause=cause)
            cause = "the optimizer has stepped before the gradients were clipped"
            check_named(got.weights, want.weights, "weights", cause=cause)

    @pytest.mark.exact
    def test_counts_tied_parameters_once_and_frozen_ones_not_at_all(self, answer, world):
        made = {"blocks": 2, "tied": True, "frozen": ["blocks.0", "head.bias"]}
        got = world.run(answer, ranks_step.train, PLAN, 2, made, None, {"sync": "last"})
        want = train_alone(make(**made), [of_all(PLAN, step) for step in range(2)])
        for rank, result in enumerate(got):
            _check_trained(result, want, rank)

    @pytest.mark.exact
    def test_both_syncs_accumulate_in_float32_with_bfloat16_parameters(self, answer, world):
        """Both are sums of float32 numbers, and equal but for their order.

        In bfloat16 the sum over micro-batches has an error of 2^-9; the gradients themselves differ
        from those in float32 by a few percent.
        """
        plan = [[1] * 4, [2] * 4]
        each, last = (
            world.run(answer, ranks_step.train, plan, 1, None, _BFLOAT16, {"sync": sync})[0]
            for sync in ("each", "last")
        )
        cause = "gradients are added up, or reduced, in bfloat16"
        check_named(last.gradients, each.gradients, "gradient with sync='last'", cause=cause)
        want = train_alone(make(), [of_all(plan, 0)])
        got, true = _joined(each.gradients), _joined(want.gradients)
        off = ((got - true).norm() / true.norm()).item()
        check(
            off < 0.03,
            expected="gradients within 3 % of those of one process in float32",
            got=f"{100 * off:.3g} %",
            cause="with dtype=torch.bfloat16 train_step does something else",
        )

    @pytest.mark.exact
    def test_checkpointing_leaves_the_gradients_as_they_are(self, answer, world):
        """To the bit, dropout included; and every block runs its forward twice, no more."""
        plain = world.run(answer, ranks_step.checkpointed, PLAN, False)
        got = world.run(answer, ranks_step.checkpointed, PLAN, True)
        for rank, (mine, want) in enumerate(zip(got, plain, strict=True)):
            cause = "checkpoint=True gives modules other names in the state dict"
            check_equal(mine["names"], want["names"], "names", cause=cause)
            check_equal(
                mine["runs"],
                [2 * len(PLAN[rank])] * 2,
                f"forwards of each block on rank {rank}",
                cause="a block is not recomputed once in backward: not at all, or twice where"
                " checkpoints are in each other",
            )
            for name, gradient in want["gradients"].items():
                cause = "the recomputation has another dropout mask, or another input"
                what = f"gradient of {name} on rank {rank}"
                check_equal(mine["gradients"][name], gradient, what, cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("shape", ["keywords_and_tuples", "frozen_beginning"])
    def test_checkpoints_whatever_a_block_takes_and_returns(self, answer, world, shape):
        """Keywords, dicts and tuples; inputs that require no gradient. To the bit."""
        for rank, (want, got) in enumerate(world.run(answer, ranks_inputs.recomputed, ONE, shape)):
            for name, gradient in want.items():
                cause = "a reentrant checkpoint, or one for a block of one input"
                what = f"gradient of {name} on rank {rank}"
                check_equal(got[name], gradient, what, cause=cause)

    @pytest.mark.exact
    def test_all_options_at_once_train_as_one_process(self, answer, world):
        """Checkpointing, kept parameters, accumulation, clipping, two groups of parameters."""
        made = {"blocks": 2}
        steps = [of_all(PLAN, step) for step in range(2)]
        max_norm = 0.5 * min(train_alone(make(**made), steps, in_groups).norms)
        wrap = {"checkpoint": True, "reshard_after_forward": False, "make_optimizer": in_groups}
        got = world.run(answer, ranks_step.train, PLAN, 2, made, wrap, {"max_norm": max_norm})
        want = train_alone(make(**made), steps, in_groups, max_norm)
        cause = (
            "options exclude each other, or it is for one group of the optimizer's parameters only"
        )
        for rank, result in enumerate(got):
            _check_trained(result, want, rank, cause)


_BFLOAT16 = {"dtype": torch.bfloat16}


def _check_trained(got: Trained, want: Trained, rank: int, likely: str = "") -> None:
    __tracebackhide__ = True
    _joined(
        {name: got.gradients.get(name) for name, true in want.gradients.items() if true is not None}
    )
    cause = "a sample does not count once in every step, or what is returned is of this rank only"
    cause = likely or cause
    for name, mine, true in (
        ("losses", got.losses, want.losses),
        ("norms", got.norms, want.norms),
    ):
        what = f"{name} of the steps on rank {rank}"
        check_close(torch.tensor(mine), torch.tensor(true), what, cause=cause, rtol=1e-4)
    cause = "the last step's gradients are not those of the mean over all samples, or are cleared"
    check_named(got.gradients, want.gradients, "gradient", cause=cause)
    cause = "a step is with other gradients than those that are left, or it is not made"
    check_named(got.weights, want.weights, "weights", cause=cause)


def _check_norm(got: float, norm: float, max_norm: float, rank: int) -> None:
    __tracebackhide__ = True
    cause = "it is not over all shards of all ranks"
    if abs(got - max_norm) < 1e-3 * norm:
        cause = "it is the norm after clipping"
    check_close(got, norm, f"grad_norm on rank {rank}", cause=cause, rtol=1e-4)


def _losses(plan: Plan) -> list[list[Tensor]]:
    """By rank and micro-batch, before the first step."""
    model = make()
    return [
        [mse(model(inputs), targets).detach() for inputs, targets in batches(plan, 0, rank)]
        for rank in range(len(plan))
    ]


def _gradients(plan: Plan) -> list[list[Tensor]]:
    model, found = make(), []
    for rank in range(len(plan)):
        found.append([])
        for inputs, targets in batches(plan, 0, rank):
            model.zero_grad()
            mse(model(inputs), targets).backward()
            found[-1].append(_joined(gradients(model)))
    return found


def _joined(values: Mapping[str, Tensor | None]) -> Tensor:
    missing = [name for name, value in values.items() if value is None]
    if missing:
        cause = "gradients are cleared after the step, or are never reduced"
        fail(expected="a gradient for every parameter", got=f"none for {missing[0]}", cause=cause)
    return torch.cat([value.flatten() for value in values.values() if value is not None])


def _of_batches(each: list[list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over samples, and what likely mistakes make of it."""
    sums = [
        [count * value for count, value in zip(counts, values, strict=True)]
        for counts, values in zip(PLAN, each, strict=True)
    ]
    total, ranks = sum(map(sum, PLAN)), len(PLAN)
    of_rank = [torch.stack(values).sum(0) for values in sums]
    want = torch.stack(of_rank).sum(0) / total
    rank_means = [value / sum(counts) for value, counts in zip(of_rank, PLAN, strict=True)]
    flat = [value for values in each for value in values]
    last = torch.stack([values[-1] for values in sums]).sum(0) / total
    guesses = {
        "the reduction divides by the ranks, and that is not multiplied away": want / ranks,
        "it is multiplied by the number of ranks once too often": want * ranks,
        "every rank counts the same, whatever its samples": torch.stack(rank_means).mean(0),
        "every micro-batch counts the same, whatever its samples": torch.stack(flat).mean(0),
        "the micro-batches' means are added up": torch.stack(flat).sum(0) / ranks,
        "it is of this rank's micro-batches only": rank_means[0],
        "it is this rank's share only": of_rank[0] / total,
        "it is of the last micro-batches only": last,
        "it is of all but the last micro-batches": want - last,
    }
    return want, guesses


def _check_guess(got: Tensor, want: Tensor, what: str, guesses: dict[str, Tensor]) -> None:
    __tracebackhide__ = True
    likely = [cause for cause, value in guesses.items() if torch.allclose(got, value, rtol=1e-3)]
    cause = likely[0] if likely else "samples do not count the same"
    check_close(got, want, what, cause=cause, rtol=1e-4, atol=1e-6)
