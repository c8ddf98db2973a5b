"""What must be refused, and what an interruption must not spoil."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.laws.checks import check, check_equal
from specs.fsdp_wrap import ranks_build, ranks_checkpoint, ranks_interrupted, ranks_whole
from specs.fsdp_wrap.files import load_file
from specs.fsdp_wrap.shapes import tiny


class TestPart4Build:
    subject = "build"

    @pytest.mark.survives
    def test_refuses_what_wrap_refuses(self, answer, world):
        world.run(answer, ranks_build.refused)

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_a_killed_save_leaves_the_checkpoint_before(self, answer, world, tmp_path):
        """Killed at each file operation of a save of step 5, after a checkpoint of step 1.

        Whatever is left behind, a later save may have step 3 as well, and then one step 5.
        """
        (found,) = world.run(answer, ranks_interrupted.killed_saves, tmp_path)
        check(
            found[-1][1] == 5 and len(found) > 1,
            expected="step 5 after a save that was not killed",
            got=f"step {found[-1][1]}, and {len(found) - 1} operations on files were seen",
            cause="the newest checkpoint is not the one that is loaded",
        )
        for where, step, different, again in found:
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
        results = world.run(answer, ranks_interrupted.full_disk, folder, full_on)
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
    @pytest.mark.parametrize("slow", [0, 1])
    def test_a_checkpoint_counts_when_every_rank_has_written(self, answer, worlds, tmp_path, slow):
        """One of two ranks is slow. Whatever there is at any time, one rank can load.

        And where save has returned, on any rank, it is the new one.
        """
        found = worlds(2).run(answer, ranks_interrupted.slow_save, tmp_path / "run", slow)
        saved, copies = found[0]["saved"], [copy for got in found for copy in got["copies"]]
        paths = [path for _, path in copies]
        (results,) = worlds(1).run(answer, ranks_interrupted.loads_all, paths)
        for (when, _), (step, values) in zip(copies, results, strict=True):
            steps = (5,) if "returned" in when else (1, 5)
            check(
                step in steps,
                expected=f"step {' or '.join(map(str, steps))}, {when}",
                got=step,
                cause="a rank does not wait until all the others have written",
            )
            cause = "a checkpoint counts before every rank has written"
            off = ranks_checkpoint.different(values, saved[step])
            check_equal(off, [], f"what differs from step {step}, {when}", cause=cause)

    @pytest.mark.survives
    def test_a_save_that_fails_at_its_end_is_no_checkpoint(self, answer, worlds, tmp_path):
        """Both ranks have written, and rank 0 cannot do the last thing; one rank goes on."""
        folder = tmp_path / "run"
        zero, one = worlds(2).run(answer, ranks_interrupted.fails_at_the_end, folder)
        check(
            bool(zero["raised"]) == bool(one["raised"]),
            expected="an error on every rank or on none",
            got=f"{zero['raised'] or 'none'} on rank 0, {one['raised'] or 'none'} on rank 1",
            cause="the ranks do not tell each other how the last operation has ended",
        )
        (results,) = worlds(1).run(answer, ranks_interrupted.one_rank_goes_on, folder)
        (step, values), (again, values_again), (last, state) = results
        cause = "what could not be finished counts, or what was before is spoiled"
        check_equal(step, 2 if zero["raised"] else 3, "step loaded afterwards", cause=cause)
        off = ranks_checkpoint.different(values, zero["saved"][step])
        check_equal(off, [], f"what differs from step {step}", cause=cause)
        cause = "what more ranks have left of a save that failed gets into a later one"
        check_equal(again, last, "step loaded after the next save", cause=cause)
        off = ranks_checkpoint.different(values_again, state)
        check_equal(off, [], f"what differs from step {last}", cause=cause)

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

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_the_file_is_complete_or_is_not_there(self, answer, world, tmp_path):
        """The disk is full: without a file from before, and with one."""
        path = tmp_path / "whole.pt"
        cause = "an error of writing is swallowed"
        _check_raised(world.run(answer, ranks_whole.save_whole_without_room, path), cause)
        cause = "it is written in place: half a file is there under its name"
        check_equal(path.exists(), False, "whether the file is there", cause=cause)
        want = {"weight": torch.arange(200.0)}
        torch.save(want, path)
        _check_raised(world.run(answer, ranks_whole.save_whole_without_room, path), cause)
        before = load_file(path)
        check_equal(list(before), ["weight"], "names in the file from before", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_the_file_from_before_stays_until_the_new_one_is_complete(
        self, answer, world, tmp_path
    ):
        """Killed at each file operation of save_whole."""
        (found,) = world.run(answer, ranks_interrupted.killed_save_whole, tmp_path)
        new = sorted(tiny().state_dict())
        check_equal(found[-1][1], new, "names in the file", cause="it is not the model's")
        for when, names in found:
            check(
                names in (["from before"], new),
                expected=f"names of the file from before, or those of the model, {when}",
                got=names,
                cause="the file is written in place, or taken away before the new one is there",
            )

    @pytest.mark.survives
    def test_refuses_a_file_that_is_not_of_the_model(self, answer, world, tmp_path):
        state = tiny().state_dict()
        name = "blocks.0.up.weight"
        files: dict[str, dict[str, Any]] = {
            "a_name_too_few": {n: value for n, value in state.items() if n != name},
            "a_name_too_many": {**state, name + ".more": torch.ones(3)},
            "another_shape": {**state, name: state[name][:-1].clone()},
            "the_shape_turned": {**state, name: state[name].T.clone()},
        }
        about = []
        for kind, values in files.items():
            torch.save(values, tmp_path / f"{kind}.pt")
            about.append((tmp_path / f"{kind}.pt", name))
        world.run(answer, ranks_whole.refuses_files, about)


def _check_raised(raised: list[str], cause: str) -> None:
    __tracebackhide__ = True
    check(all(raised), expected="an error: there is no room", got="no error", cause=cause)
