"""Sharding block by block: the values of one process, with so many calls and bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim import Optimizer

from kit.laws.checks import check, check_bar, check_close, check_equal
from kit.ranks.simulated import simulated_world
from specs.fsdp_wrap import ranks_wrap
from specs.fsdp_wrap.models import (
    FEATURES,
    Trained,
    adamw,
    check_named,
    shard_bytes,
    units,
    weights,
    whole_bytes,
)
from specs.fsdp_wrap.shapes import SHAPES, nested
from specs.fsdp_wrap.simulated import (
    WIDE_BLOCKS,
    activations_of_tall,
    books,
    check_calls,
    gathered_at_runs,
    planned,
    state_bytes,
    tall,
    wide,
)

with_adam = functools.partial(books, adam=True)
# The bars show the reference on 8 ranks only: each further world takes a third of a second.
RANK_OF = {8: 7, 64: 0, 1024: 0}
MANY = pytest.mark.parametrize("ranks", [8, 64, 1024])
OTHER_SHAPES = [name for name in SHAPES if name != "odd_sizes"]
PLANNED = ["frozen", "nested", "only_blocks"]


class TestPart1Wrap:
    subject = "wrap"

    @pytest.mark.works
    def test_every_parameter_becomes_a_shard_and_the_optimizer_holds_it(self, answer, device):
        """On 8 ranks, in blocks, in the root, trained or not; and a step can be made."""
        model, kinds = SHAPES["frozen"]()
        names = list(model.state_dict())
        with simulated_world(8, device) as mesh:
            optimizer = answer.wrap(model.to(device), mesh, kinds, adamw)
            check(
                isinstance(optimizer, Optimizer),
                expected="the optimizer that make_optimizer has made",
                got=type(optimizer).__name__,
                cause="the model is sharded in place and needs not be returned",
            )
            whole = [name for name, p in model.named_parameters() if not hasattr(p, "to_local")]
            check(
                not whole,
                expected="a DTensor for every parameter",
                got=f"a plain tensor for {', '.join(whole)}",
                cause="what is in no block, or frozen, is left whole on every rank",
            )
            held = {p for group in optimizer.param_groups for p in group["params"]}
            missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in held]
            check(
                not missing,
                expected="every trained parameter in the optimizer",
                got=f"{', '.join(missing)} is not there",
                cause="the optimizer holds the parameters of before, or some of them",
            )
            cause = "a wrapper stands between a module and its parameters"
            check_equal(list(model.state_dict()), names, "names in the state dict", cause=cause)
            model(torch.ones(2, FEATURES, device=device)).sum().backward()
            optimizer.step()

    @pytest.mark.exact
    @MANY
    def test_a_step_gathers_each_block_twice_and_reduces_each_unit_once(
        self, answer, device, ranks
    ):
        """n blocks: 2 n + 1 gathers of a rank's part of a unit, n + 1 reductions of whole ones."""
        check_calls(
            with_adam(answer, device, ranks, RANK_OF[ranks]).calls,
            planned(wide, ranks),
            what=f"a step of {WIDE_BLOCKS} blocks and the root on {ranks} ranks",
        )

    @pytest.mark.exact
    @pytest.mark.parametrize("shape", PLANNED)
    def test_the_units_of_other_models_are_their_blocks(self, answer, device, shape):
        """A block inside a block is a unit of its own; what has no gradient is not reduced."""
        check_calls(
            books(answer, device, 8, shape=SHAPES[shape]).calls,
            planned(SHAPES[shape], 8),
            what=f"a step of the model {shape.replace('_', ' ')}",
        )

    @pytest.mark.exact
    @pytest.mark.parametrize("shape", [tall, nested], ids=["six_blocks", "nested"])
    def test_blocks_that_stay_are_gathered_once(self, answer, device, shape):
        """reshard_after_forward=False: n + 1 gathers, n + 1 reductions."""
        check_calls(
            books(answer, device, 8, shape=shape, reshard_after_forward=False).calls,
            planned(shape, 8, gathers=1),
            what="a step with reshard_after_forward=False",
        )

    @pytest.mark.exact
    def test_no_more_than_one_block_is_gathered_ahead(self, answer, device):
        """At the k-th run of a block, forward or backward, k have been gathered, or k + 1."""
        seen = gathered_at_runs(answer, device)
        cause = "blocks run once more in backward, which nobody has asked for here"
        check_equal(len(seen), 2 * WIDE_BLOCKS, "runs, forward and backward", cause=cause)
        ahead = [count - run for run, count in enumerate(seen, 1)]
        check(
            max(ahead) <= 1,
            expected="0 or 1 other block gathered, and not given back, whenever a block runs",
            got=f"at the runs of a step {ahead}",
            cause="more than the next block is on its way: three are held at a time",
        )

    @pytest.mark.exact
    @pytest.mark.parametrize("world", [1, 2, 4], indirect=True, ids="{}_ranks".format)
    def test_trains_as_one_process_with_the_data_of_all_ranks(self, answer, world):
        """Rows of 13, 40 and 3 on 2 and 4 ranks: nothing divides, and one rank has no row."""
        check_trained(world.run(answer, ranks_wrap.train, "odd_sizes"), "odd_sizes")

    @pytest.mark.exact
    @pytest.mark.parametrize("shape", OTHER_SHAPES)
    def test_every_gradient_of_other_models_is_that_of_one_process(self, answer, world, shape):
        check_trained(world.run(answer, ranks_wrap.train, shape), shape)

    @pytest.mark.saves
    @pytest.mark.parametrize(("ranks", "rank"), RANK_OF.items())
    def test_a_rank_holds_its_part_of_weights_gradients_and_state(
        self, answer, reference, device, ranks, rank
    ):
        """The sum over parameters of 4 ceil(rows / N) columns bytes for weights, as much for
        gradients, and twice as much for Adam's averages, which has a scalar of each besides.
        """
        plain = list(wide()[0].parameters())
        yours = with_adam(answer, device, ranks, rank).memory.after
        theirs = with_adam(reference, device, 8, 7).memory.after if ranks == 8 else None
        rows = "1 / N of the rows of each parameter, rounded up"
        cause = "some parameters are not sharded: those of the root, or frozen ones"
        kinds = {
            "shards": (1, 1, f"{rows} + a buffer"),
            "gradients": (1, 0, rows),
            "optimizer state": (2, len(plain), f"2 x ({rows}) + scalars"),
        }
        for kind, (times, scalars, formula) in kinds.items():
            limit = times * shard_bytes(plain, ranks) + 512 * scalars
            check(
                yours[kind] <= limit,
                expected=f"{kind} on rank {rank} of {ranks} of at most {limit} bytes ({formula})",
                got=yours[kind],
                cause=cause,
            )
        scalars = 512 * (len(plain) + 1)
        check_bar(
            f"weights, gradients and Adam's state on rank {rank} of {ranks}",
            sum(yours[kind] for kind in kinds),
            4 * shard_bytes(plain, ranks) + scalars,
            plain=4 * shard_bytes(plain, 1) + scalars,
            reference=sum(theirs[kind] for kind in kinds) if theirs else None,
            formula=f"4 x ({rows}) + scalars",
            cause=cause,
        )

    @pytest.mark.saves
    def test_frozen_parameters_are_sharded_too(self, answer, reference, device):
        """4 ceil(rows / N) columns bytes of each parameter, trained or not, and buffers."""
        shape = SHAPES["frozen"]
        plain = list(shape()[0].parameters())
        yours, theirs = (
            books(module, device, 8, shape=shape).memory for module in (answer, reference)
        )
        check_bar(
            "weights on rank 0 of 8, many of them frozen",
            yours.after["shards"],
            shard_bytes(plain, 8) + 512,
            plain=shard_bytes(plain, 1),
            reference=theirs.after["shards"],
            formula="1 / N of the rows of each parameter, rounded up, + a buffer",
            cause="a parameter without a gradient stays whole on every rank",
        )

    @pytest.mark.saves
    @MANY
    def test_no_more_than_two_blocks_and_the_root_are_whole(self, answer, reference, device, ranks):
        """The two largest blocks + the root's unit, each row count rounded up to a multiple of N.

        The root does not come and go with the blocks; one block more may be on its way.
        """
        *blocks, root = (whole_bytes(unit, ranks) for unit in units(*tall()))
        yours = with_adam(answer, device, ranks, shape=tall).memory
        theirs = with_adam(reference, device, 8, shape=tall).memory if ranks == 8 else None
        check_bar(
            f"gathered parameters on {ranks} ranks",
            yours.most["unsharded"],
            sum(sorted(blocks)[-2:]) + root,
            plain=sum(blocks) + root,
            reference=theirs.most["unsharded"] if theirs else None,
            formula="two blocks + the root's unit; plain is the whole model",
            cause="blocks are not given back after forward, or a unit is more than one block",
        )

    @pytest.mark.saves
    @MANY
    def test_the_peak_is_the_state_and_a_few_blocks(self, answer, reference, device, ranks):
        """State on the rank + what is whole: two blocks and the root's unit, one block's
        gradients, and in buffers one block that is gathered and one that is reduced
        + activations, within 2 %.
        """
        plain = list(tall()[0].parameters())
        *blocks, root = (whole_bytes(unit, ranks) for unit in units(*tall()))
        yours = with_adam(answer, device, ranks, shape=tall).memory
        theirs = with_adam(reference, device, 8, shape=tall).memory if ranks == 8 else None
        limit = state_bytes(plain, ranks) + 5 * max(blocks) + root + activations_of_tall()
        check_bar(
            f"peak of a step on {ranks} ranks",
            yours.peak,
            1.02 * limit,
            plain=4 * shard_bytes(plain, 1) + activations_of_tall(),
            reference=theirs.peak if theirs else None,
            formula="state + 5 blocks + the root's unit + activations, + 2 %",
            cause="more than two blocks are whole at a time, or gradients of more than one are",
        )

    @pytest.mark.saves
    def test_blocks_that_stay_are_not_free(self, answer, reference, device):
        """reshard_after_forward=False trades the whole model's bytes for n gathers."""
        whole = sum(whole_bytes(unit, 8) for unit in units(*tall()))
        yours, theirs = (
            books(module, device, 8, shape=tall, reshard_after_forward=False).memory
            for module in (answer, reference)
        )
        check_bar(
            "gathered parameters with reshard_after_forward=False",
            yours.most["unsharded"],
            whole,
            reference=theirs.most["unsharded"],
            formula="the whole model",
            cause="parameters are held more than once",
        )
        check(
            yours.most["unsharded"] >= 0.9 * whole,
            expected=f"{whole} bytes of gathered parameters: all of the model",
            got=yours.most["unsharded"],
            cause="blocks are given back in spite of reshard_after_forward=False",
        )


def check_trained(got: list[Trained], shape: str) -> None:
    """Fail unless every rank has come to what one process comes to with the data of all."""
    __tracebackhide__ = True
    start, want = weights(SHAPES[shape]()[0]), ranks_wrap.alone(shape, len(got))
    for rank, result in enumerate(got):
        check(
            any(not result.weights[name].equal(value) for name, value in start.items()),
            expected="weights that two steps have moved",
            got="none did",
            cause="the optimizer holds the parameters of before, which are not those that train",
        )
        check_named(
            result.gradients,
            want.gradients,
            f"gradient on rank {rank}",
            cause="a parameter is in no unit, so it has this rank's gradient only; or the mean "
            "over ranks is taken otherwise; or it does not require a gradient as before",
        )
        check_named(
            result.weights,
            want.weights,
            f"weights on rank {rank} after {ranks_wrap.STEPS} steps",
            cause="the optimizer does not hold the shards of every parameter, or the second step "
            "has seen weights of before the first",
        )
    losses = [sum(step) / len(got) for step in zip(*(r.losses for r in got), strict=True)]
    for number, (loss, true) in enumerate(zip(losses, want.losses, strict=True), 1):
        what = f"mean over the ranks of the loss of step {number}"
        check_close(loss, true, what, cause="forward computes with other weights")
