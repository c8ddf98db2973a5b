"""Sharding block by block: the values of one process, with so many calls and bytes."""

from __future__ import annotations

import pytest
from torch.optim import Optimizer

from kit.laws.bars import bar
from kit.laws.checks import check, check_bar, check_equal
from kit.ranks.shapes import SHAPES, nested, only_blocks
from kit.ranks.shards import shard_bytes, units, whole_bytes
from kit.ranks.simulated import simulated_world
from specs.fsdp_wrap import ranks as programs
from specs.fsdp_wrap.cases import BF16, CHECKPOINT, KEPT, adamw
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.refused import REFUSED, check_refused
from specs.fsdp_wrap.shapes import tall, wide
from specs.fsdp_wrap.simulated import (
    ADAM,
    activations_of_tall,
    books,
    check_buffers,
    check_calls,
    check_forward_alone,
    check_whole,
    left_by_wrap,
)

RANKS = pytest.mark.parametrize(("ranks", "rank"), [(8, 7), (64, 0)])
ROWS = "1 / N of the rows of each parameter, rounded up"
UNSHARDED = "some parameters are not sharded: those of the root, or frozen ones"


class TestPart1Wrap:
    @pytest.mark.works("wrap", "state")
    @pytest.mark.parametrize("ranks", [8, 1])
    def test_every_parameter_becomes_a_shard_and_the_optimizer_holds_it(
        self, answer, device, ranks
    ):
        """In blocks, in the root, trained, tied or frozen, with and without rows here."""
        model, kinds = SHAPES["frozen"]()
        with simulated_world(ranks, device, rank=ranks - 1) as mesh:
            optimizer = answer.wrap(model.to(device), mesh, kinds, adamw)
            check(
                isinstance(optimizer, Optimizer),
                expected="the optimizer that make_optimizer has made",
                got=type(optimizer).__name__,
                cause="the model is sharded in place: what is returned is the optimizer",
            )
            whole = [name for name, p in model.named_parameters() if not hasattr(p, "to_local")]
            cause = "what is in no block, or frozen, is left whole on every rank"
            check_equal(whole, [], "parameters that are no DTensors", cause=cause)
            held = {p for group in optimizer.param_groups for p in group["params"]}
            missing = [n for n, p in model.named_parameters() if p not in held]
            cause = "the optimizer holds the parameters of before, or some of them: not those "
            cause += "without rows on this rank, or not what is frozen now may train later"
            check_equal(missing, [], "parameters that the optimizer lacks", cause=cause)

    @pytest.mark.exact("wrap", "calls")
    @RANKS
    def test_a_step_gathers_each_block_twice_and_reduces_each_unit_once(
        self, answer, device, ranks, rank
    ):
        """n blocks: 2 n + 1 gathers of a rank's part of a unit, n + 1 reductions of whole ones."""
        what = f"a step of 3 blocks on {ranks} ranks"
        check_calls(answer, device, what, script=ADAM, ranks=ranks, rank=rank)

    @pytest.mark.exact("wrap", "units")
    @pytest.mark.parametrize("shape", [nested, only_blocks], ids=["nested", "only_blocks"])
    def test_the_units_of_other_models_are_their_blocks(self, answer, device, shape):
        """A block inside a block is a unit, also one of a subclass. The root may have nothing."""
        check_calls(answer, device, f"a step of {shape.__name__}", shape)

    @pytest.mark.exact("wrap", "kept")
    @pytest.mark.parametrize(
        ("shape", "train"),
        [(tall, True), (nested, True), (wide, False)],
        ids=["six_blocks", "nested", "eval_mode"],
    )
    def test_blocks_that_stay_are_gathered_once(self, answer, device, shape, train):
        """reshard_after_forward=False: n + 1 gathers, n + 1 reductions."""
        what = "a step with reshard_after_forward=False" + " in eval mode" * (not train)
        check_calls(answer, device, what, shape, train=train, **KEPT)

    @pytest.mark.exact("wrap", "values")
    def test_trains_as_one_process_with_the_data_of_all_ranks(self, answer, world):
        """Rows of 13, 40 and 3 on 2 ranks: hardly anything divides."""
        cause = "the optimizer holds the parameters of before, or not those of every unit; or the "
        cause += "mean over ranks is taken otherwise; or a step sees weights of before; or a "
        cause += "parameter is in no unit, so it has this rank's gradient only"
        hold(answer, world, "values", cause=cause)

    @pytest.mark.exact("wrap", 3)
    def test_frozen_parameters_are_sharded_too(self, answer, device):
        """They are gathered as others are; what has no gradient is not reduced."""
        check_calls(answer, device, "a step of a model with frozen parts", SHAPES["frozen"])

    @pytest.mark.saves("wrap", "state")
    @RANKS
    @bar(
        "weights, gradients and Adam's state of a rank",
        f"4 x ({ROWS}) + scalars",
        UNSHARDED,
    )
    def test_a_rank_holds_its_part_of_weights_gradients_and_state(self, device, ranks, rank):
        """4 ceil(rows / N) columns bytes of each parameter for weights, as much for gradients, and
        twice as much for Adam's averages, which has a scalar of each besides; one for a buffer.
        """
        plain = [*wide()[0].parameters()]
        part, whole = (shard_bytes(plain, n) for n in (ranks, 1))
        scalars = 512 * len(plain)
        most = {"shards": part + 512, "gradients": part, "optimizer state": 2 * part + scalars}

        def held(module):
            after = books(module, device, ranks, rank, script=ADAM).memory.after
            for kind, limit in most.items():
                what = f"{kind} on rank {rank} of {ranks} of at most {limit} bytes"
                check(after[kind] <= limit, expected=what, got=after[kind], cause=UNSHARDED)
            return sum(after[kind] for kind in most)

        return held, sum(most.values()), 4 * whole + 512 + scalars

    @pytest.mark.saves("wrap", "state")
    @bar(
        "what is alive after wrap, on rank 0 of 8",
        f"2 x ({ROWS}) + scalars",
        "something still has the parameters of before: a list, a table of names, or an optimizer",
    )
    def test_nothing_holds_the_whole_parameters_any_more(self, device):
        """4 ceil(rows / N) columns bytes of each parameter, as much again and a scalar for Adagrad,
        which makes its state at once; and a buffer.
        """
        plain = [*wide()[0].parameters()]
        parts, whole = (2 * shard_bytes(plain, n) + 512 * (len(plain) + 1) for n in (8, 1))
        return lambda module: left_by_wrap(module, device), parts, whole

    @pytest.mark.saves("wrap", "gathered")
    def test_the_peak_is_the_state_and_a_few_blocks(self, answer, reference, device):
        """State on the rank + what is whole: two blocks and the root's unit, one block's
        gradients, and in buffers one block that is gathered and one that is reduced
        + activations, within 2 %. Row counts are rounded up to a multiple of N.
        """
        plain = list(tall()[0].parameters())
        *blocks, root = (whole_bytes(unit, 64) for unit in units(*tall()))
        yours, theirs = (
            books(module, device, 64, shape=tall, script=ADAM).memory
            for module in (answer, reference)
        )
        check_whole(yours, theirs, tall, 64, "on 64 ranks")
        check_buffers(yours, theirs, "on 64 ranks")
        # Weights, gradients and both averages of Adam; 512 bytes for each count of steps, and for
        # the buffer.
        state = 4 * shard_bytes(plain, 64) + 512 * (len(plain) + 1)
        check_bar(
            "peak of a step on 64 ranks",
            yours.peak,
            1.02 * (state + 5 * max(blocks) + root + activations_of_tall()),
            plain=4 * shard_bytes(plain, 1) + activations_of_tall(),
            reference=theirs.peak,
            formula="state + 5 blocks + the root's unit + activations, + 2 %",
            cause="more than two blocks are whole at a time, or gradients of more than one are",
        )

    @pytest.mark.saves("wrap", 1)
    @pytest.mark.parametrize(
        ("shape", "options"),
        [(tall, {}), (tall, KEPT), (nested, KEPT), (nested, CHECKPOINT), (wide, BF16)],
        ids=["given_back", "kept", "kept-nested", "checkpoint-nested", "bfloat16"],
    )
    def test_a_forward_alone_leaves_nothing_gathered(
        self, answer, reference, device, shape, options
    ):
        """If the root has nothing, FSDP2 gathers a block more in the next step."""
        check_forward_alone(answer, reference, device, shape, **options)

    @pytest.mark.survives("wrap", "Raises")
    @pytest.mark.parametrize("what", REFUSED, ids=lambda w: w.replace(" ", "_"))
    def test_refuses_what_cannot_be_sharded(self, answer, device, what):
        """On a mesh of two dimensions fully_shard would replicate; float16 needs a loss scale."""
        with simulated_world(8, device) as mesh:
            check_refused(answer, mesh, what)

    @pytest.mark.survives("wrap", 2)
    def test_wrapping_changes_no_value_and_no_flag(self, answer, world):
        world.run(answer, programs.keeps_values)

    @pytest.mark.survives("wrap", 4)
    @pytest.mark.parametrize("world", [4], indirect=True, ids=["4_ranks"])
    def test_only_the_ranks_of_the_mesh_share_the_model(self, answer, world):
        """One model on four ranks, where one has no row of the head; then two on two ranks each."""
        cause = "another group than the mesh's takes part: that of all ranks, which is the default"
        hold(answer, world, "meshes", cause=cause)
