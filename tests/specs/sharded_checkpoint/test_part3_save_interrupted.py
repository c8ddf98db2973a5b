"""Saves that are killed, fail on one rank, or are slow: what load finds afterwards."""

from __future__ import annotations

import pytest

from specs.sharded_checkpoint import ranks, ranks_interrupted


class TestPart3SaveInterrupted:
    @pytest.mark.survives("save", 1)
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_a_killed_save_leaves_the_checkpoint_before(self, answer, world, tmp_path):
        """Killed at each file operation of a save of step 5, after a checkpoint of step 1."""
        world.run(answer, ranks_interrupted.killed_saves, tmp_path)

    @pytest.mark.survives("save", 2)
    @pytest.mark.parametrize("full_on", [0, 1])
    def test_every_rank_raises_where_one_cannot_write(self, answer, world, tmp_path, full_on):
        """The disk of one of two ranks is full."""
        world.run(answer, ranks_interrupted.full_disk, tmp_path / "run", full_on)

    @pytest.mark.survives("save", "complete")
    @pytest.mark.parametrize("slow", [0, 1])
    def test_a_checkpoint_counts_when_every_rank_has_written(self, answer, worlds, tmp_path, slow):
        """One of two ranks is slow: load always finds a checkpoint, and the new one at the end."""
        for found in worlds(2).run(answer, ranks_interrupted.slow_save, tmp_path / "run", slow):
            worlds(1).run(answer, ranks_interrupted.loads_each, found)

    @pytest.mark.survives("save", 3)
    def test_a_save_that_fails_at_its_end_is_no_checkpoint(self, answer, worlds, tmp_path):
        """Rank 0 fails, or both ranks are killed, at the last file operation; one rank goes on."""
        zero, one = worlds(2).run(answer, ranks_interrupted.fails_at_the_end, tmp_path / "run")
        ranks.check_alike([zero[0], one[0]], ranks.HOW_IT_ENDED)
        worlds(1).run(answer, ranks_interrupted.loads_each, zero[1], True)
