"""Saves that are killed, fail on one rank, or take their time: what a load finds afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from kit.laws.checks import check, check_equal
from kit.ranks.disk import different
from specs.sharded_checkpoint import ranks_interrupted


class TestPart3SaveInterrupted:
    @pytest.mark.survives("save", 1)
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_a_killed_save_leaves_the_checkpoint_before(self, answer, world, tmp_path):
        """Killed at each file operation of a save of step 5, after a checkpoint of step 1.

        Whatever is left behind, step 5 can be saved again.
        """
        (found,) = world.run(answer, ranks_interrupted.killed_saves, tmp_path)
        check(
            found[-1][1] == 5 and len(found) > 1,
            expected="step 5 after a save that was not killed",
            got=f"step {found[-1][1]}, and {len(found) - 1} operations on files were seen",
            cause="the newest checkpoint is not the one that is loaded",
        )
        for where, step, off, again in found:
            cause = "a checkpoint counts before it is complete, or it is written over the old one"
            check(step in (1, 5), expected=f"step 1 or step 5, {where}", got=step, cause=cause)
            check_equal(off, [], f"what differs from step {step}, {where}", cause=cause)
            cause = "what a killed save has left is taken for a checkpoint, or is in the way"
            if again:
                check_equal(again, (5, []), f"step loaded after a new save, {where}", cause=cause)

    @pytest.mark.survives("save", 2)
    @pytest.mark.parametrize("full_on", [0, 1])
    def test_every_rank_raises_where_one_cannot_write(self, answer, world, tmp_path, full_on):
        """The disk is full for one of two ranks: no file of it may grow by a byte."""
        results = world.run(answer, ranks_interrupted.full_disk, tmp_path / "run", full_on)
        causes = {
            full_on: "an error in writing is swallowed, or this rank writes no part of its own",
            1 - full_on: "the ranks do not tell each other how writing has ended",
        }
        for rank, cause in causes.items():
            check(
                results[rank]["raised"] != "",
                expected=f"an error on rank {rank}: rank {full_on} could not write its part",
                got="no error",
                cause=cause,
            )
        for got in results:
            cause = "a save that failed has spoiled the checkpoint before"
            check_equal(got["before"], (1, []), "step loaded, and what differs", cause=cause)
            cause = "what is left of a save that failed is in the way of the next one"
            check_equal(got["after"], (2, []), "step loaded, and what differs", cause=cause)

    @pytest.mark.survives("save", "complete")
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
            _check_same(values, saved[step], f"step {step}, {when}", cause)

    @pytest.mark.survives("save", 3)
    def test_a_save_that_fails_at_its_end_is_no_checkpoint(self, answer, worlds, tmp_path):
        """Both ranks have written, and rank 0 fails in the last operation of all.

        Or both are killed there. Then one rank goes on.
        """
        folder = tmp_path / "run"
        zero, one = worlds(2).run(answer, ranks_interrupted.fails_at_the_end, folder)
        check(
            bool(zero["raised"]) == bool(one["raised"]),
            expected="an error on every rank or on none",
            got=f"{zero['raised'] or 'none'} on rank 0, {one['raised'] or 'none'} on rank 1",
            cause="the ranks do not tell each other how the last operation has ended",
        )
        folders = [folder, *zero["copies"]]
        (found,) = worlds(1).run(answer, ranks_interrupted.one_rank_goes_on, folders)
        cause = "what could not be finished counts, or what was before is spoiled"
        want = 2 if zero["raised"] else 3
        check_equal(found[0][0][0], want, "step loaded after the failure", cause=cause)
        for (step, values), (again, values_again), (last, state) in found:
            cause = "what could not be finished counts, or what was before is spoiled"
            check(step in (2, 3), expected="step 2 or 3 is loaded", got=step, cause=cause)
            _check_same(values, zero["saved"][step], f"step {step}", cause)
            cause = "what more ranks have left of a save that failed gets into a later one"
            check_equal(again, last, "step loaded after the next save", cause=cause)
            _check_same(values_again, state, f"step {last}", cause)


def _check_same(got: dict[str, Any], want: dict[str, Any], what: str, cause: str) -> None:
    __tracebackhide__ = True
    check_equal(different(got, want), [], f"what differs from {what}", cause=cause)
