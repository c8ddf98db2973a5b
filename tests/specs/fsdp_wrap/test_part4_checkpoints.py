"""save and load: sharded checkpoints, on any number of ranks, that no interruption can spoil."""

from __future__ import annotations

import pytest
import torch

from kit.verdict import check, check_bar, check_close, check_equal
from specs.fsdp_wrap import ranks_checkpoint
from specs.fsdp_wrap.models import check_named, make, shard_bytes, whole_bytes

WIDTH, BLOCKS = 48, 3


class TestPart4Build:
    """Part 4: build, save and load - a model that no rank could hold"""

    subject = "build"

    @pytest.mark.works
    @pytest.mark.parametrize(
        ("saving", "loading", "how"),
        [(2, 2, "built"), (2, 4, "trained"), (4, 1, "trained")],
        ids=["2_ranks_to_2_built", "2_ranks_to_4", "4_ranks_to_1"],
    )
    def test_goes_on_as_if_it_had_not_been_interrupted(
        self, answer, worlds, tmp_path, saving, loading, how
    ):
        """Weights, optimizer state and learning rate to the bit; the next steps within rounding.

        The model that it is loaded into has trained otherwise, with another learning rate, and has
        gradients; or was just built.
        """
        folder = tmp_path / "run"
        saved = worlds(saving).run(answer, ranks_checkpoint.save_and_go_on, folder)[0]
        results = worlds(loading).run(answer, ranks_checkpoint.load_and_go_on, folder, how)
        for rank, got in enumerate(results):
            cause = "load does not return the step that was given to save"
            check_equal(got["step"], 2, f"step on rank {rank}", cause=cause)
            cause = "not everything is saved, or not everything that is saved is loaded"
            check_equal(sorted(got["loaded"]), sorted(saved["saved"]), "what is there", cause=cause)
            for name, want in saved["saved"].items():
                check_equal(got["loaded"][name], want, f"{name} on rank {rank}", cause=cause)
            cause = "gradients of before are still there"
            check_equal(got["gradients"], [], "parameters with gradients", cause=cause)
            cause = "what trains afterwards is not what was loaded"
            losses, want = (torch.tensor(run["after"].losses) for run in (got, saved))
            check_close(losses, want, "losses of the next steps", cause=cause, rtol=1e-4)
            weights = saved["after"].weights
            check_named(got["after"].weights, weights, "weights after them", cause=cause)

    @pytest.mark.exact
    def test_an_older_checkpoint_stays(self, answer, world, tmp_path):
        """Two checkpoints take twice the bytes of one."""
        one, two = world.run(answer, ranks_checkpoint.save_twice, tmp_path / "run")[0]
        check(
            one > 0 and two > 1.8 * one,
            expected=f"some {2 * one} bytes in the folder after the second save",
            got=two,
            cause="the second checkpoint is written over the first: while it is, there is none",
        )

    @pytest.mark.saves
    def test_a_rank_has_to_do_with_its_own_part_only(self, answer, reference, world, tmp_path):
        """Bytes above the baseline, on a rank of 2:

        save, load  <= its weights and Adam's two moments once more + two whole parameters
        save_whole  <= 3 x the largest parameter on rank 1: itself, and twice to gather it
        """
        parameters = list(make(WIDTH, BLOCKS).parameters())
        largest = max(whole_bytes([p], 2) for p in parameters)
        yours, theirs = (
            world.run(module, ranks_checkpoint.peaks, tmp_path / name, WIDTH, BLOCKS)[1]
            for name, module in (("yours", answer), ("theirs", reference))
        )
        for call in ("save", "load"):
            check_bar(
                f"{call}, above the baseline on rank 1 of 2",
                yours[call],
                3 * shard_bytes(parameters, 2) + 2 * largest,
                plain=3 * shard_bytes(parameters, 1),
                reference=theirs[call],
                formula="its weights and moments + two whole parameters; plain is the whole model",
                cause="a rank gathers, or reads, what belongs to other ranks",
            )
        check_bar(
            "save_whole, above the baseline on rank 1 of 2",
            yours["save_whole"],
            3 * largest,
            plain=shard_bytes(parameters, 1),
            reference=theirs["save_whole"],
            formula="3 x the largest parameter; plain is the whole model",
            cause="every rank gathers the whole model for itself",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_a_killed_save_leaves_the_checkpoint_before(self, answer, world, tmp_path):
        """Killed before each file operation of a save of step 5, after a checkpoint of step 1.

        Whatever is left behind, a later save may have step 3 as well, and then one step 5.
        """
        (found,) = world.run(answer, ranks_checkpoint.killed_saves, tmp_path)
        check(
            found[-1][0] == 5 and len(found) > 1,
            expected="step 5 after a save that was not killed",
            got=f"step {found[-1][0]}, and {len(found) - 1} operations on files were seen",
            cause="the newest checkpoint is not the one that is loaded",
        )
        for number, (step, different, again) in enumerate(found):
            where = f"killed at file operation {number + 1} of {len(found) - 1}"
            cause = "a checkpoint counts before it is complete, or it is written over the old one"
            check(step in (1, 5), expected=f"step 1 or step 5, {where}", got=step, cause=cause)
            check_equal(different, [], f"what differs from step {step}, {where}", cause=cause)
            cause = "what a killed save has left is taken for a checkpoint, or is in the way"
            if again:
                check_equal(again, (5, []), f"step loaded after more saves, {where}", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("full_on", [0, 1])
    def test_every_rank_raises_where_one_cannot_write(self, answer, world, tmp_path, full_on):
        """The disk is full for one of two ranks: no file of it may grow beyond 200 bytes."""
        folder = tmp_path / "run"
        results = world.run(answer, ranks_checkpoint.full_disk, folder, full_on)
        for rank, got in enumerate(results):
            check(
                got["raised"] != "",
                expected=f"an error on rank {rank}: rank {full_on} could not write its part",
                got="no error",
                cause="the ranks do not tell each other how writing has ended",
            )
            cause = "a save that failed has spoiled the checkpoint before"
            check_equal(got["before"], (1, []), "step loaded, and what differs", cause=cause)
            cause = "what is left of a save that failed is in the way of the next one"
            check_equal(got["after"], (2, []), "step loaded, and what differs", cause=cause)

    @pytest.mark.survives
    def test_refuses_a_step_that_is_not_above_the_newest(self, answer, world, tmp_path):
        for step in world.run(answer, ranks_checkpoint.step_rules, tmp_path / "run"):
            cause = "the newest of the steps 2 and 10 is taken to be 2: as texts they are"
            check_equal(step, 10, "step of the newest checkpoint", cause=cause)

    @pytest.mark.survives
    def test_refuses_a_folder_without_a_checkpoint(self, answer, world, tmp_path):
        (tmp_path / "empty").mkdir()
        folders = [tmp_path / "empty", tmp_path / "not_there"]
        world.run(answer, ranks_checkpoint.nothing_there, folders)

    @pytest.mark.survives
    def test_refuses_the_checkpoint_of_another_model(self, answer, world, tmp_path):
        """Of one that has more as well: its names would all be found."""
        world.run(answer, ranks_checkpoint.another_model, tmp_path / "run")
