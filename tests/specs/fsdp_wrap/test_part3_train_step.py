"""train_step: values on real ranks against one process, bytes and calls on simulated ranks."""

from __future__ import annotations

import pytest

from kit.laws.bars import bar
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

COUNTS = [[2, 0], [0, 0], [1, 2]]  # of micro-batches of each rank


class TestPart3TrainStep:
    @pytest.mark.works("train_step", "loss")
    def test_a_step_is_on_the_mean_over_the_samples_of_all_ranks(self, answer, world):
        """Samples 3 and 2 on rank 0, 1 and 6 on rank 1: sum of n_b * (mean loss of b) / 12. Then
        four steps with other numbers of samples and micro-batches.
        """
        cause = "a sample does not count once in every step, or step() is called too often"
        hold(answer, world, "steps", cause=cause)

    @pytest.mark.exact("train_step", 3)
    def test_reduces_every_unit_for_each_micro_batch(self, answer, device):
        """On rank 63 of 64, which has no rows. Other calls send a few numbers."""
        check_calls_of_steps(answer, device, 64, narrow, samples=(4, 3, 5), rank=63)

    @pytest.mark.exact("train_step", "grad_norm")
    def test_the_norm_is_over_all_shards_of_all_ranks(self, answer, world):
        """sqrt(sum over ranks of the squares of their shards); tied parameters count once."""
        cause = "it is not over all shards of all ranks, or counts a parameter twice"
        hold(answer, world, "norm", cause=cause)

    @pytest.mark.exact("wrap", "checkpoint")
    def test_checkpointing_leaves_the_gradients_as_they_are(self, answer, world):
        """Every block runs twice, in bfloat16 too; backward draws the same dropout mask."""
        cause = "the recomputation has another dropout mask, or another input"
        hold(answer, world, "checkpoint", cause=cause)

    @pytest.mark.exact("wrap", "checkpoint")
    @pytest.mark.parametrize("options", [{}, KEPT | BF16], ids=["freed", "kept-bfloat16"])
    def test_gathers_and_reductions_stay(self, answer, device, options):
        """The calls are those of a step without checkpoints."""
        check_calls(answer, device, "a step with checkpoint=True", **CHECKPOINT, **options)

    @pytest.mark.exact("train_step", "max_norm")
    def test_clips_to_the_norm_of_the_whole_model(self, answer, world):
        """With a norm above max_norm, and with one below."""
        cause = "gradients are not multiplied by max_norm / the norm of all gradients"
        hold(answer, world, "clip", cause=cause)

    @pytest.mark.exact("train_step", "gradients")
    def test_gradients_are_of_this_step_alone(self, answer, world):
        """There are old gradients; a plain step follows."""
        cause = "old gradients are in it, or the step's are cleared or scaled afterwards"
        hold(answer, world, "gradients", cause=cause)

    @pytest.mark.gpu
    @pytest.mark.exact("wrap", "checkpoint")
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_gpu"])
    def test_a_rank_on_a_gpu_trains_as_one_process(self, answer, world):
        """With NCCL and FSDP2's streams; dropout draws on the GPU."""
        hold(answer, world, "checkpoint", cause="the GPU draws another dropout mask in backward")
        for group in ("checkpointed shapes", "steps", "clip"):
            hold(answer, world, group, cause="only a GPU does this; the specs on the CPU pass")

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
        "blocks keep more than their inputs, or all blocks are recomputed at once",
    )
    def test_a_checkpointed_block_keeps_its_input_only(self, reference, device):
        """3 blocks: the activations of one block without checkpoints + 2 inputs of blocks."""

        def most(module, shape=narrow, checkpoint=True):
            given = {"shape": shape, "script": STEPS, "samples": (200,), "checkpoint": checkpoint}
            return books(module, device, 1, **given).memory.most["activations"]

        limit = most(reference, one_block, False) + 2 * rounded(4 * 200 * NARROW)
        return most, 1.08 * limit, most(reference, checkpoint=False)

    @pytest.mark.survives("train_step", 4)
    @pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: "_".join(map(str, counts)))
    def test_other_numbers_of_micro_batches_are_refused_by_all(self, answer, world, counts):
        """A rank that raises alone leaves the others waiting."""
        world.run(answer, programs.refuses_counts, counts)

    @pytest.mark.survives("train_step", "Raises")
    def test_refuses_another_sync_or_max_norm(self, answer, world):
        world.run(answer, programs.refuses_arguments)

    @pytest.mark.survives("wrap", 3)
    def test_checkpoints_blocks_with_keywords_and_without_gradients(self, answer, world):
        """Also blocks in blocks: the inner one runs again with the outer one only."""
        cause = "reentrant checkpoints take no keywords, and need an input with gradients"
        hold(answer, world, "checkpointed shapes", cause=cause)

    @pytest.mark.survives("train_step", "ranks")
    @pytest.mark.parametrize("world", [4], indirect=True, ids=["4_ranks"])
    def test_counts_the_ranks_that_share_the_model(self, answer, world):
        """Ranks 0 and 1 share one model, 2 and 3 another."""
        cause = "all ranks of the job are counted, not those of the mesh"
        hold(answer, world, "meshes of steps", cause=cause)
