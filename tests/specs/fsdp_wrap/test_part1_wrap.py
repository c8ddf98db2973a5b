"""Sharding block by block: the values of one process, and calls and bytes by formula."""

from __future__ import annotations

import pytest
from torch.optim import Optimizer

from kit.laws.bars import bar
from kit.laws.checks import check, check_bar, check_equal
from kit.ranks.shapes import frozen, nested, only_blocks
from kit.ranks.shards import shard_bytes, units, whole_bytes
from kit.ranks.simulated import simulated_world
from specs.fsdp_wrap import ranks as programs
from specs.fsdp_wrap.cases import BF16, KEPT, adamw
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

ROWS = "1 / N of the rows of each parameter, rounded up"
UNSHARDED = "some parameters are not sharded: the root's, or frozen ones"


class TestPart1Wrap:
    @pytest.mark.works("wrap", "state")
    def test_every_parameter_becomes_a_shard_and_the_optimizer_holds_it(self, answer, device):
        """In blocks and in the root, trained, tied or frozen, with or without rows here."""
        model, kinds = frozen()
        with simulated_world(8, device, rank=7) as mesh:
            optimizer = answer.wrap(model.to(device), mesh, kinds, adamw)
            check(
                isinstance(optimizer, Optimizer),
                expected="the optimizer that make_optimizer made",
                got=type(optimizer).__name__,
                cause="the model is sharded in place; wrap returns the optimizer",
            )
            whole = [name for name, p in model.named_parameters() if not hasattr(p, "to_local")]
            cause = "parameters outside of blocks, or frozen ones, are whole on every rank"
            check_equal(whole, [], "parameters that are no DTensors", cause=cause)
            held = {p for group in optimizer.param_groups for p in group["params"]}
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            missing = [name for name, p in trained.items() if p not in held]
            cause = "it holds the parameters from before sharding, or only those with rows here"
            check_equal(missing, [], "parameters that the optimizer lacks", cause=cause)

    @pytest.mark.exact("wrap", "calls")
    def test_a_step_gathers_each_block_twice_and_reduces_each_unit_once(self, answer, device):
        """n blocks: 2 n + 1 gathers of a rank's part of a unit, n + 1 reductions of whole ones."""
        check_calls(answer, device, "a step of 3 blocks")

    @pytest.mark.exact("wrap", "units")
    @pytest.mark.parametrize("shape", [nested, only_blocks, frozen], ids=lambda s: s.__name__)
    def test_the_units_of_other_models_are_their_blocks(self, answer, device, shape):
        """Blocks inside blocks, and of a subclass; a root without parameters; frozen parameters,
        which are sharded too.
        """
        check_calls(answer, device, f"a step of {shape.__name__}", shape)

    @pytest.mark.exact("wrap", "kept")
    def test_blocks_that_stay_are_gathered_once(self, answer, device):
        """n + 1 gathers, n + 1 reductions."""
        check_calls(answer, device, "a step with reshard_after_forward=False", **KEPT)

    @pytest.mark.exact("wrap", "values")
    def test_trains_as_one_process_with_the_data_of_all_ranks(self, answer, world):
        """Rows of 13, 40 and 3 on 2 ranks: most do not divide."""
        cause = "the optimizer holds the parameters from before sharding, or not those of every "
        cause += "unit; or gradients are not the mean over ranks; or a step uses old weights; or a "
        cause += "parameter is in no unit, so it has this rank's gradient only"
        hold(answer, world, "values", cause=cause)

    @pytest.mark.saves("wrap", "state")
    @pytest.mark.parametrize(("ranks", "rank"), [(8, 7), (64, 0)])
    @bar(
        "weights, gradients and Adam's state of a rank",
        f"4 x ({ROWS}) + scalars",
        UNSHARDED,
    )
    def test_a_rank_holds_its_part_of_weights_gradients_and_state(self, device, ranks, rank):
        """4 ceil(rows / N) columns bytes for each parameter's weights, as much for its gradients,
        and twice as much for Adam's averages; a scalar for each count of steps and the buffer.
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
        "something still holds the parameters from before sharding, such as a list or an optimizer",
    )
    def test_nothing_holds_the_whole_parameters_any_more(self, device):
        """4 ceil(rows / N) columns bytes for each parameter; as much, and a scalar, for Adagrad,
        which makes its state at once; a scalar for the buffer.
        """
        plain = [*wide()[0].parameters()]
        parts, whole = (2 * shard_bytes(plain, n) + 512 * (len(plain) + 1) for n in (8, 1))
        return lambda module: left_by_wrap(module, device), parts, whole

    @pytest.mark.saves("wrap", "gathered")
    def test_the_peak_is_the_state_and_a_few_blocks(self, answer, reference, device):
        """State + two blocks and the root's unit gathered + one block's gradients + buffers of one
        block that is gathered and one that is reduced + activations, within 2 %. Row counts are
        rounded up to a multiple of N.
        """
        plain = list(tall()[0].parameters())
        *blocks, root = (whole_bytes(unit, 64) for unit in units(*tall()))
        yours, theirs = (
            books(module, device, 64, shape=tall, script=ADAM).memory
            for module in (answer, reference)
        )
        check_whole(yours, theirs, tall, 64, "on 64 ranks")
        check_buffers(yours, theirs, "on 64 ranks")
        # Weights, gradients, Adam's averages; 512 bytes for each count of steps and the buffer.
        state = 4 * shard_bytes(plain, 64) + 512 * (len(plain) + 1)
        check_bar(
            "peak of a step on 64 ranks",
            yours.peak,
            1.02 * (state + 5 * max(blocks) + root + activations_of_tall()),
            plain=4 * shard_bytes(plain, 1) + activations_of_tall(),
            reference=theirs.peak,
            formula="state + 5 blocks + the root's unit + activations, + 2 %",
            cause="more than two blocks, or gradients of more than one block, are whole at a time",
        )

    @pytest.mark.saves("wrap", 1)
    @pytest.mark.parametrize("options", [{}, KEPT, BF16], ids=["freed", "kept", "bfloat16"])
    def test_a_forward_alone_leaves_nothing_gathered(self, answer, device, options):
        """Between a step and the next one."""
        check_forward_alone(answer, device, **options)

    @pytest.mark.survives("wrap", "Raises")
    @pytest.mark.parametrize("what", REFUSED, ids=lambda w: w.replace(" ", "_"))
    def test_refuses_what_cannot_be_sharded(self, answer, device, what):
        """On a mesh of two dimensions fully_shard would replicate; float16 needs a loss scaler."""
        with simulated_world(8, device) as mesh:
            check_refused(answer, mesh, what)

    @pytest.mark.survives("wrap", 2)
    def test_wrapping_changes_no_value_and_no_flag(self, answer, world):
        world.run(answer, programs.keeps_values)

    @pytest.mark.survives("wrap", "ranks")
    @pytest.mark.parametrize("world", [4], indirect=True, ids=["4_ranks"])
    def test_only_the_ranks_of_the_mesh_share_the_model(self, answer, world):
        """Ranks 0 and 1 share one model, 2 and 3 another."""
        cause = "all ranks of the job share the model, not those of the mesh"
        hold(answer, world, "meshes", cause=cause)
