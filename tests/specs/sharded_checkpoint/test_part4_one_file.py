"""One file for the whole model, to use without ranks."""

from __future__ import annotations

import pytest
import torch

from kit.laws.checks import check_bar, check_equal
from kit.laws.scenarios import once
from kit.ranks.disk import load_file
from kit.ranks.shards import shard_bytes, whole_bytes
from kit.ranks.toys import make
from specs.sharded_checkpoint import ranks, ranks_whole
from specs.sharded_checkpoint.models import tied


class TestPart4OneFile:
    @pytest.mark.works("save_whole", "contents")
    def test_one_file_holds_the_model_as_it_is_without_shards(self, answer, world, tmp_path):
        """All names, ordinary tensors, the weights to the bit; an older file is replaced."""
        path = tmp_path / "whole.pt"
        path.write_bytes(b"from before")
        want = world.run(answer, ranks_whole.save_whole_after, path)[0]
        model, saved = tied(), load_file(path)
        cause = "shards, or other values, are saved"
        check_equal({name: saved[name] for name in want}, want, "weights", cause=cause)
        kinds = {
            name: f"{type(value).__name__} on {value.device}, requires_grad={value.requires_grad}"
            for name, value in saved.items()
        }
        ordinary = dict.fromkeys(kinds, "Tensor on cpu, requires_grad=False")
        cause = "a DTensor, a parameter, or a tensor with a graph or on the accelerator is saved"
        check_equal(kinds, ordinary, "tensors in the file", cause=cause)
        model.load_state_dict(saved)

    @pytest.mark.exact("save_whole", "returns")
    def test_returns_when_the_file_is_there(self, answer, world, tmp_path):
        """File operations on rank 0 are slow."""
        world.run(answer, ranks_whole.save_whole_after, tmp_path / "whole.pt")

    @pytest.mark.exact("load_whole", "in place")
    @pytest.mark.parametrize("world", [3], indirect=True, ids=["3_ranks"])
    def test_a_sharded_model_loads_the_file_of_one_process(self, answer, world, tmp_path):
        path = tmp_path / "whole.pt"
        torch.save(tied().state_dict(), path)
        world.run(answer, ranks_whole.load_whole_into, path)

    @pytest.mark.saves("save_whole", "memory")
    def test_other_ranks_gather_one_parameter_at_a_time(self, answer, reference, world, tmp_path):
        """Above the baseline <= 3 x the largest parameter: itself, and twice to gather it."""
        parameters = [*make(ranks.WIDE, ranks.MANY).parameters()]
        peak_of = lambda module: world.run(module, ranks.peak, tmp_path, "save_whole")[1][0]  # noqa: E731
        peak = peak_of(answer)
        cause = "a rank gathers a unit at once, or copies or sends its whole part at once, instead "
        cause += "of one parameter after another"
        if peak >= shard_bytes(parameters, 1):
            cause = "every rank gathers the whole model for itself"
        check_bar(
            "save_whole, above the baseline on rank 1 of 2",
            peak,
            3 * max(whole_bytes([p], 2) for p in parameters),
            plain=shard_bytes(parameters, 1),
            reference=once("reference", lambda: peak_of(reference)),
            formula="3 x the largest parameter; plain is the whole model",
            cause=cause,
        )

    @pytest.mark.survives("save_whole", "whole")
    def test_what_fails_on_one_rank_raises_on_every_rank_and_leaves_no_half_file(
        self, answer, world, tmp_path
    ):
        """The disk of rank 0 is full, and there is no older file."""
        raised = world.run(answer, ranks.fails_on_one, "save_whole", tmp_path, 0, "no_room")
        ranks.check_alike(raised, ranks.HOW_IT_ENDED, must=True)
        cause = "it is written in place: half a file is left under its name"
        check_equal((tmp_path / "good").exists(), False, "whether the file exists", cause=cause)

    @pytest.mark.survives("save_whole", "whole")
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_the_file_from_before_stays_until_the_new_one_is_complete(
        self, answer, world, tmp_path
    ):
        """Killed at each file operation of save_whole; the temporary folder is on another disk."""
        world.run(answer, ranks_whole.killed_save_whole, tmp_path)

    @pytest.mark.survives("load_whole", "together")
    @pytest.mark.parametrize("bad_rank", [0, 1])
    def test_every_rank_raises_where_one_fails(self, answer, world, tmp_path, bad_rank):
        """The file is missing on one rank, as if its disk was not mounted."""
        fails = ranks.fails_on_one, "load_whole", tmp_path, bad_rank, "not_there"
        ranks.check_alike(world.run(answer, *fails))

    @pytest.mark.survives("load_whole", "Raises")
    def test_refuses_a_file_that_is_not_of_the_model(self, answer, world, tmp_path):
        """A weight or a buffer too few, a weight too many, or a transposed one."""
        world.run(answer, ranks_whole.refuses_files, tmp_path)
