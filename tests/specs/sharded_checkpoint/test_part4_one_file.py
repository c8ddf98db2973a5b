"""One file for the whole model, for whoever has no ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.laws.checks import check, check_bar, check_equal
from kit.ranks.disk import load_file
from kit.ranks.shards import shard_bytes, whole_bytes
from kit.ranks.toys import make
from specs.sharded_checkpoint import ranks, ranks_whole
from specs.sharded_checkpoint.models import tied


class TestPart4OneFile:
    @pytest.mark.works("save_whole", "contents")
    def test_one_file_holds_the_model_as_it_is_without_shards(self, answer, world, tmp_path):
        """A file from before is replaced; ordinary tensors, all names, the weights to the bit."""
        path = tmp_path / "whole.pt"
        path.write_bytes(b"from before")
        results = world.run(answer, ranks_whole.save_whole_after, path, True)
        model, saved = tied(), load_file(path)
        cause = "the file is not of the state dict of the model without shards"
        check_equal(sorted(saved), sorted(model.state_dict()), "names in the file", cause=cause)
        for name, want in results[0]["weights"].items():
            cause = "shards are saved, or other values"
            check_equal(saved[name], want, name, cause=cause)
            got = saved[name]
            check(
                type(got) is Tensor and got.device.type == "cpu" and not got.requires_grad,
                expected=f"{name} as an ordinary tensor on the cpu",
                got=f"{type(got).__name__} on {got.device}, requires_grad={got.requires_grad}",
                cause="a DTensor or parameter, or a tensor of the accelerator, is saved",
            )
        check(
            _bytes(saved) == _bytes(model.state_dict()),
            expected=f"{_bytes(model.state_dict())} bytes of tensors in the file, a tied one once",
            got=f"{_bytes(saved)} bytes",
            cause="a tied weight is in it twice, or a view with padding, of which torch.save "
            "writes the whole storage",
        )
        model.load_state_dict(saved)

    @pytest.mark.exact("save_whole", "returns")
    def test_returns_when_the_file_is_there(self, answer, world, tmp_path):
        """Rank 0 is slow to write; whoever returns finds the file."""
        path = tmp_path / "whole.pt"
        want = sorted(tied().state_dict())
        for rank, got in enumerate(world.run(answer, ranks_whole.save_whole_after, path)):
            cause = "this rank returns before rank 0 has written"
            what = f"names in the file when the call returns on rank {rank}"
            check_equal(got["names"], want, what, cause=cause)

    @pytest.mark.exact("load_whole", "in place")
    @pytest.mark.parametrize("world", [3], indirect=True, ids=["3_ranks"])
    def test_a_sharded_model_loads_the_file_of_one_process(self, answer, world, tmp_path):
        """And trains on: two steps as one process makes them.

        The file is of a plain dict, and its tensors of float32 are parts of one flat tensor.
        """
        path = tmp_path / "whole.pt"
        torch.save(_flattened(tied().state_dict()), path)
        world.run(answer, ranks_whole.load_whole_into, path)

    @pytest.mark.saves("save_whole", "memory")
    def test_other_ranks_gather_one_parameter_at_a_time(self, answer, reference, world, tmp_path):
        """Above the baseline <= 3 x the largest parameter: itself, and twice to gather it."""
        parameters = [*make(ranks.WIDE, 2).parameters()]
        yours, theirs = (
            world.run(module, ranks.peak, tmp_path, "save_whole")[1]
            for module in (answer, reference)
        )
        check_bar(
            "save_whole, above the baseline on rank 1 of 2",
            yours,
            3 * max(whole_bytes([p], 2) for p in parameters),
            plain=shard_bytes(parameters, 1),
            reference=theirs,
            formula="3 x the largest parameter; plain is the whole model",
            cause="every rank gathers the whole model for itself",
        )

    @pytest.mark.survives("save_whole", "whole")
    def test_a_full_disk_raises_on_every_rank_and_leaves_no_half_file(
        self, answer, world, tmp_path
    ):
        """Rank 0 has no room: without a file from before, and with one."""
        path = tmp_path / "whole.pt"
        for before in ([], ["weight"]):
            if before:
                torch.save({"weight": torch.arange(200.0)}, path)
            raised = world.run(answer, ranks_whole.save_whole_without_room, path)
            cause = "an error is swallowed, or the ranks do not tell each other"
            check_equal([*map(bool, raised)], [True] * 2, "whether each rank raises", cause=cause)
            cause = "it is written in place: half a file is there under its name"
            names = list(load_file(path)) if path.exists() else []
            check_equal(names, before, "names in the file", cause=cause)

    @pytest.mark.survives("save_whole", "whole")
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_the_file_from_before_stays_until_the_new_one_is_complete(
        self, answer, world, tmp_path
    ):
        """Killed at each file operation of save_whole; the temporary folder is on another disk."""
        world.run(answer, ranks_whole.killed_save_whole, tmp_path)

    @pytest.mark.survives("load_whole", "together")
    @pytest.mark.parametrize(
        ("call", "bad_rank", "bad"),
        [
            *(("load_whole", 0, "not_there"), ("load_whole", 1, "not_there")),
            *(("load_whole", 1, "hook"), ("save_whole", 1, "hook")),
        ],
    )
    def test_every_rank_raises_where_one_fails(self, answer, world, tmp_path, call, bad_rank, bad):
        """The file is missing, as where a disk is not mounted, or a hook of the model raises."""
        ranks.check_alike(world.run(answer, ranks.fails_on_one, call, tmp_path, bad_rank, bad))

    @pytest.mark.survives("load_whole", "Raises")
    def test_refuses_a_file_that_is_not_of_the_model(self, answer, world, tmp_path):
        """A weight or a buffer too few, one too many, another shape, which might be repeated."""
        world.run(answer, ranks_whole.refuses_files, tmp_path)


def _flattened(state: dict[str, Any]) -> dict[str, Any]:
    floats = {name: v for name, v in state.items() if getattr(v, "dtype", 0) is torch.float32}
    flat = torch.cat([v.flatten() for v in floats.values()])
    parts = zip(floats, flat.split([v.numel() for v in floats.values()]), strict=True)
    return {**state, **{name: part.view(floats[name].shape) for name, part in parts}}


def _bytes(state: dict[str, Any]) -> int:
    """Of all storages: what torch.save writes."""
    storages = [v.untyped_storage() for v in state.values() if isinstance(v, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
