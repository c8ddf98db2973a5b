"""train_step on real ranks against one process; its bytes and calls on simulated ones."""

from __future__ import annotations

from types import ModuleType

import pytest

from kit.laws.checks import check_bar, check_equal
from kit.ranks.shards import rounded
from specs.fsdp_wrap import ranks as programs
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.steps import (
    BLOCKS,
    check_activations,
    check_held,
    check_reductions,
    second_step,
)

# How many micro-batches each rank has.
COUNTS = [[2, 0], [0, 0], [1, 2], [2, 1, 3, 2]]

_SHAPES = (
    "a reentrant checkpoint, one for a block of one input, or that takes keywords of the block for "
    "its own"
)


class TestPart3TrainStep:
    @pytest.mark.works("train_step", "loss")
    def test_a_step_is_on_the_mean_over_the_samples_of_all_ranks(self, answer, world):
        """Samples 3 and 2 on rank 0, 1 and 6 on rank 1: sum of n_b * (mean loss of b) / 12."""
        hold(answer, world, "one step", cause="samples do not count the same")

    @pytest.mark.exact("train_step", 6)
    @pytest.mark.parametrize(
        ("ranks", "options"),
        [
            (64, {}),
            (8, {"wrapped": "checkpoint"}),
            (8, {"samples": (1,) * 16, "blocks": 1, "wrapped": "kept"}),
        ],
        ids=["64", "checkpoint-8", "many-kept-8"],
    )
    def test_reduces_every_unit_for_each_micro_batch(self, answer, device, ranks, options):
        """What else is sent does not grow with the number of micro-batches."""
        calls = second_step(answer, device, ranks, sync="each", max_norm=1.0, **options)[1]
        count = len(options.get("samples", "abc"))
        blocks, wrapped = options.get("blocks", BLOCKS), options.get("wrapped", "")
        check_reductions(calls, ranks, count, count, blocks, wrapped)

    @pytest.mark.exact("train_step", "grad_norm")
    def test_the_norm_is_over_all_shards_of_all_ranks(self, answer, worlds):
        """sqrt(sum over ranks of the squares of their shards); tied once, frozen not at all; what
        was frozen is trained later; a rank has no rows. There may be one rank only.
        """
        cause = "it is not over all shards of all ranks, or counts a parameter twice"
        for size in (2, 1):
            hold(answer, worlds(size), "norm", cause=cause)

    @pytest.mark.exact("train_step", "max_norm")
    def test_clips_to_the_norm_of_the_whole_model(self, answer, world):
        """Where it binds and where it does not, with every option of wrap; without one, also where
        a gradient is infinite: inf / inf, the factor of a clipping to it, is nan.
        """
        cause = (
            "clipping is not by max_norm / norm of all gradients; or max_norm=None clips, to an "
        )
        cause += "infinite norm perhaps"
        hold(answer, world, "clip", cause=cause)

    @pytest.mark.exact("train_step", "gradients")
    def test_gradients_are_of_this_step_alone(self, answer, world):
        """Old gradients are there, or an evaluation comes before; the head is frozen later; a part
        has no gradient; loss_fn asks the model; there are groups of parameters, one empty, and a
        plain step comes.
        """
        cause = "gradients from before the step are in it, or those of the step are cleared or "
        cause += "scaled afterwards"
        hold(answer, world, "gradients", cause=cause)

    @pytest.mark.exact("train_step", "loss")
    def test_trains_as_one_process_over_four_steps(self, answer, world):
        """With other numbers of samples in each step, and of micro-batches; a rank's own number
        comes again where that of the other is new.
        """
        cause = "a sample does not count once in every step, or a step is taken too often"
        hold(answer, world, "steps", cause=cause)

    @pytest.mark.exact("wrap", "checkpoint")
    def test_checkpointing_leaves_the_gradients_as_they_are(self, answer, world):
        """In float32 and given back, in bfloat16 and kept, in eval mode, where the model fills
        buffers of blocks; every block runs twice, no more, a frozen one too.
        """
        cause = "the recomputation has another dropout mask, or another input"
        hold(answer, world, "checkpoint and dropout", cause=cause)
        hold(answer, world, "checkpoint", cause=cause)

    @pytest.mark.gpu
    @pytest.mark.exact("wrap", "checkpoint")
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_gpu"])
    def test_a_rank_on_a_gpu_trains_as_one_process(self, answer, world):
        """With NCCL, and with the streams of FSDP2; the GPU draws for dropout, and others in 16
        bits than in 32.
        """
        masks = "the GPU draws another dropout mask again"
        hold(answer, world, "checkpoint and dropout", cause=masks)
        hold(answer, world, "checkpointed shapes", cause=f"{_SHAPES}; or {masks}")
        for group in ("steps", "clip"):
            hold(answer, world, group, cause="only a GPU does this, where the CPU's specs pass")

    @pytest.mark.saves("train_step", "memory")
    def test_holds_shards_of_gradients(self, answer, reference, device):
        """Gradients: shards + the whole ones of two blocks. Parameters: two blocks and the root's
        unit, also from one micro-batch to the next, which would save a gather of every block.
        """
        check_held(answer, reference, device, "each")

    @pytest.mark.saves("train_step", "memory")
    def test_activations_are_those_of_one_micro_batch(self, answer, reference, device):
        check_activations(answer, reference, device, "each")

    @pytest.mark.saves("wrap", "checkpoint")
    def test_a_checkpointed_block_keeps_its_input_only(self, answer, reference, device):
        """With B blocks: the activations of one block without checkpoints + B - 1 inputs of blocks.
        One rank, which has all rows, recomputes as others do.

        A block keeps, plain, some 9 times its input: x, norm(x), and 3 times as wide tanh(up).
        """
        samples, blocks = 200, 3

        def most(module: ModuleType, blocks: int, checkpoint: bool) -> int:
            wrapped = "checkpoint" if checkpoint else ""
            options = {"blocks": blocks, "wrapped": wrapped, "width": 32}
            return second_step(module, device, 1, (samples,), **options)[0].most["activations"]

        limit = most(reference, 1, False) + (blocks - 1) * rounded(4 * samples * 32)
        check_bar(
            f"activations at their most, {blocks} blocks, checkpoint=True",
            most(answer, blocks, True),
            1.08 * limit,
            plain=most(reference, blocks, False),
            reference=most(reference, blocks, True),
            formula="1.08 x (one plain block + 2 inputs of blocks)",
            cause="what is inside the blocks is kept, or all blocks are recomputed at once",
        )

    @pytest.mark.survives("train_step", 7)
    @pytest.mark.parametrize(
        ("world", "counts"),
        [(len(counts), counts) for counts in COUNTS],
        indirect=["world"],
        ids=["_".join(map(str, counts)) for counts in COUNTS],
    )
    def test_other_numbers_of_micro_batches_are_refused_by_all(self, answer, world, counts):
        """Who raises alone leaves the others waiting for ever. Of four ranks the first and the last
        may agree, and the sum be right.
        """
        world.run(answer, programs.refuses_counts, counts)

    @pytest.mark.survives("train_step", "Raises")
    def test_refuses_options_that_are_none(self, answer, world):
        world.run(answer, programs.refuses_arguments)

    @pytest.mark.survives("wrap", 6)
    def test_checkpoints_whatever_a_block_takes_and_returns(self, answer, world):
        """Keywords, dicts and tuples; blocks in blocks; inputs that require no gradient."""
        hold(answer, world, "checkpointed shapes", cause=_SHAPES)

    @pytest.mark.survives("wrap", 5)
    def test_inputs_in_float64_stay_so_in_float32(self, answer, world):
        cause = "a float64 input or result is cast by a policy, or a namedtuple becomes a tuple"
        hold(answer, world, "float64 inputs", cause=cause)

    @pytest.mark.survives("wrap", 1)
    def test_evaluation_goes_with_the_other_options(self, answer, world):
        cause = "a forward pass that no backward follows has dropout on, or another dtype"
        hold(answer, world, "evaluation with options", cause=cause)

    @pytest.mark.survives("train_step", 2)
    def test_a_sample_counts_once_however_large_it_is(self, answer, world):
        """Tokens: the lengths differ, 2 and 7 on rank 0, 5 and 1 on rank 1."""
        hold(answer, world, "tokens", cause="tokens are counted, and not samples")

    @pytest.mark.survives("train_step", 3)
    def test_an_error_in_the_loss_leaves_nothing_behind(self, answer, world):
        """In any micro-batch, in backward, with all gathered too; then other steps."""
        cause = "something of the step in which loss_fn has raised is left: synchronisation that "
        cause += "is off, gradients, or gathered parameters; or the error is kept"
        hold(answer, world, "errors", cause=cause)

    @pytest.mark.survives("train_step", 3)
    def test_an_error_leaves_no_buffer_behind(self, answer, device):
        """A pass by hand after it ends as any other: nothing is gathered, or in a buffer."""
        after = second_step(answer, device, 8, fails=True)[0].after
        want = {"unsharded": 0, "communication": 0}
        cause = "FSDP2 has been told that more passes follow, and waits for them with a buffer; or "
        cause += "your code still has a tensor that it has sent"
        check_equal({k: after[k] for k in want}, want, "bytes that are left", cause=cause)

    @pytest.mark.survives("train_step", 8)
    def test_makes_the_step_whatever_the_norm(self, answer, world):
        """Its gradients may be zeros or NaN then, as torch makes them of an infinite norm; with a
        norm of 0 the weights decay.
        """
        cause = "an infinite norm is not returned, or there is no step"
        hold(answer, world, "any norm", cause=cause)

    @pytest.mark.survives("train_step", 5)
    @pytest.mark.parametrize("world", [4], indirect=True, ids=["4_ranks"])
    def test_counts_the_ranks_that_share_the_model(self, answer, world):
        """Four ranks have one model; then 0 and 1 have one, 2 and 3 another, and all a third; the
        same with max_norm.
        """
        cause = "all ranks of the job are counted, not those of the model's mesh"
        hold(answer, world, "meshes of steps", cause=cause)
