"""train_step on real ranks against one process; its bytes and calls on simulated ones."""

from __future__ import annotations

import pytest

from kit.laws.bars import bar
from kit.ranks.shapes import nested, only_blocks
from kit.ranks.shards import rounded
from specs.fsdp_wrap import ranks as programs
from specs.fsdp_wrap.cases import BF16, CHECKPOINT, KEPT
from specs.fsdp_wrap.law import hold
from specs.fsdp_wrap.shapes import NARROW, narrow, one_block
from specs.fsdp_wrap.simulated import (
    STEPS,
    books,
    check_calls,
    check_calls_of_steps,
    check_held,
)

# How many micro-batches each rank has.
COUNTS = [[2, 0], [0, 0], [2, 1, 3, 2]]

_SHAPES = (
    "a reentrant checkpoint, one for a block of one input, or that takes keywords of the block for "
    "its own"
)


class TestPart3TrainStep:
    @pytest.mark.works("train_step", "loss")
    def test_a_step_is_on_the_mean_over_the_samples_of_all_ranks(self, answer, world):
        """Samples 3 and 2 on rank 0, 1 and 6 on rank 1: sum of n_b * (mean loss of b) / 12. Then
        four steps with other numbers of samples and of micro-batches.
        """
        cause = "a sample does not count once in every step, or a step is taken too often"
        hold(answer, world, "steps", cause=cause)

    @pytest.mark.exact("train_step", 5)
    @pytest.mark.parametrize(
        ("ranks", "shape", "samples", "options"),
        [
            (64, narrow, (4, 3, 5), {"rank": 63}),
            (8, narrow, (4, 3, 5), CHECKPOINT),
            (8, one_block, (1,) * 16, KEPT),
        ],
        ids=["64", "checkpoint-8", "many-kept-8"],
    )
    def test_reduces_every_unit_for_each_micro_batch(
        self, answer, device, ranks, shape, samples, options
    ):
        """What else is sent does not grow with the number of micro-batches. Rank 63 has no rows."""
        check_calls_of_steps(answer, device, ranks, shape, samples=samples, **options)

    @pytest.mark.exact("train_step", "grad_norm")
    def test_the_norm_is_over_all_shards_of_all_ranks(self, answer, world):
        """sqrt(sum over ranks of the squares of their shards); tied once, frozen not at all."""
        cause = "it is not over all shards of all ranks, or counts a parameter twice"
        hold(answer, world, "norm", cause=cause)

    @pytest.mark.exact("wrap", "checkpoint")
    def test_checkpointing_leaves_the_gradients_as_they_are(self, answer, world):
        """With each option of wrap, and in eval mode, every block runs twice, a frozen one too."""
        cause = "the recomputation has another dropout mask, or another input"
        hold(answer, world, "checkpoint and dropout", cause=cause)
        hold(answer, world, "checkpoint", cause=cause)

    @pytest.mark.exact("wrap", "checkpoint")
    @pytest.mark.parametrize(
        ("shape", "options"),
        [(nested, BF16), (only_blocks, {}), (nested, KEPT | BF16)],
        ids=["nested", "only_blocks", "kept-nested"],
    )
    def test_gathers_and_reductions_stay(self, answer, device, shape, options):
        """The calls are those of a step without checkpoints, with each option of wrap."""
        check_calls(answer, device, "a step with checkpoint=True", shape, **CHECKPOINT, **options)

    @pytest.mark.exact("train_step", "max_norm")
    def test_clips_to_the_norm_of_the_whole_model(self, answer, world):
        """Where it binds and where it does not, with every option of wrap."""
        hold(answer, world, "clip", cause="clipping is not by max_norm / norm of all gradients")

    @pytest.mark.exact("train_step", "gradients")
    def test_gradients_are_of_this_step_alone(self, answer, world):
        """Old gradients are there, or a part has no gradient, or a plain step follows."""
        cause = "gradients from before the step are in it, or those of the step are cleared or "
        cause += "scaled afterwards"
        hold(answer, world, "gradients", cause=cause)

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
    def test_holds_shards_of_gradients_and_one_micro_batch(self, answer, reference, device):
        """Gradients: shards + the whole ones of two blocks. Parameters: two blocks and the root's
        unit. Activations: those of one micro-batch.
        """
        check_held(answer, reference, device, "each")

    @pytest.mark.saves("wrap", "checkpoint")
    @bar(
        "activations at their most, 3 blocks, checkpoint=True",
        "1.08 x (one plain block + 2 inputs of blocks)",
        "what is inside the blocks is kept, or all blocks are recomputed at once",
    )
    def test_a_checkpointed_block_keeps_its_input_only(self, reference, device):
        """With B blocks: the activations of one block without checkpoints + B - 1 inputs of blocks,
        of which a plain block keeps some 9: x, norm(x), and 3 times as wide tanh(up).
        """

        def most(module, shape=narrow, checkpoint=True):
            given = {"shape": shape, "script": STEPS, "samples": (200,), "checkpoint": checkpoint}
            return books(module, device, 1, **given).memory.most["activations"]

        limit = most(reference, one_block, False) + 2 * rounded(4 * 200 * NARROW)
        return most, 1.08 * limit, most(reference, checkpoint=False)

    @pytest.mark.survives("train_step", 6)
    @pytest.mark.parametrize(
        ("world", "counts"),
        [(len(counts), counts) for counts in COUNTS],
        indirect=["world"],
        ids=["_".join(map(str, counts)) for counts in COUNTS],
    )
    def test_other_numbers_of_micro_batches_are_refused_by_all(self, answer, world, counts):
        """Who raises alone leaves others waiting. Of four ranks the first and the last agree."""
        world.run(answer, programs.refuses_counts, counts)

    @pytest.mark.survives("train_step", "Raises")
    def test_refuses_options_that_are_none(self, answer, world):
        world.run(answer, programs.refuses_arguments)

    @pytest.mark.survives("wrap", 6)
    def test_checkpoints_whatever_a_block_takes_and_returns(self, answer, world):
        """Keywords, dicts and tuples; blocks in blocks; inputs that require no gradient."""
        hold(answer, world, "checkpointed shapes", cause=_SHAPES)

    @pytest.mark.survives("train_step", 2)
    def test_a_sample_counts_once_however_large_it_is(self, answer, world):
        """Tokens: the lengths differ, 2 and 7 on rank 0, 5 and 1 on rank 1."""
        hold(answer, world, "tokens", cause="tokens are counted, and not samples")

    @pytest.mark.survives("train_step", 4)
    @pytest.mark.parametrize("world", [4], indirect=True, ids=["4_ranks"])
    def test_counts_the_ranks_that_share_the_model(self, answer, world):
        """Four ranks have one model; then 0 and 1 have one, 2 and 3 another."""
        cause = "all ranks of the job are counted, not those of the model's mesh"
        hold(answer, world, "meshes of steps", cause=cause)
