"""save_whole and load_whole: one file, for the model as it is without wrap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.verdict import check, check_equal
from specs.fsdp_wrap import ranks_checkpoint
from specs.fsdp_wrap.models import make


class TestPart4Build:
    """Part 4: build, save and load - a model that no rank could hold"""

    subject = "build"

    @pytest.mark.works
    @pytest.mark.parametrize("world", [2, 4], indirect=True, ids=["2_ranks", "4_ranks"])
    def test_one_file_holds_the_model_as_it_is_without_wrap(self, answer, world, tmp_path):
        """A file from before is replaced; ordinary tensors, all names, the weights to the bit."""
        path = tmp_path / "whole.pt"
        path.write_bytes(b"from before")
        results = world.run(answer, ranks_checkpoint.save_whole_after, path)
        model = make(**ranks_checkpoint.MADE)
        cause = "the file is not of the state dict of the model without wrap"
        saved = _load(path)
        check_equal(list(saved), list(model.state_dict()), "names in the file", cause=cause)
        for rank, result in enumerate(results):
            cause = "this rank returns before rank 0 has written"
            what = f"names in the file when the call returns on rank {rank}"
            check_equal(result["names"], list(saved), what, cause=cause)
        for name, want in results[0]["weights"].items():
            cause = "shards are saved, or other values"
            check_equal(saved[name], want, name, cause=cause)
            check(
                type(saved[name]) is Tensor and saved[name].device.type == "cpu",
                expected=f"{name} as an ordinary tensor on the cpu",
                got=f"{type(saved[name]).__name__} on {saved[name].device}",
                cause="a DTensor, or a tensor of the accelerator, is saved",
            )
        model.load_state_dict(saved)

    @pytest.mark.works
    @pytest.mark.parametrize("world", [2, 4], indirect=True, ids=["2_ranks", "4_ranks"])
    def test_a_sharded_model_loads_the_file_of_one_process(self, answer, world, tmp_path):
        path = tmp_path / "whole.pt"
        want = make(**ranks_checkpoint.MADE).state_dict()
        torch.save(want, path)
        for rank, got in enumerate(world.run(answer, ranks_checkpoint.load_whole_into, path)):
            for name, value in want.items():
                cause = "a rank has not got its part of every weight"
                check_equal(got[name], value, f"{name} on rank {rank}", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("world", [1], indirect=True, ids=["1_rank"])
    def test_the_file_is_complete_or_is_not_there(self, answer, world, tmp_path):
        """The disk is full: without a file from before, and with one."""
        path = tmp_path / "whole.pt"
        cause = "an error of writing is swallowed"
        _check_raised(world.run(answer, ranks_checkpoint.save_whole_without_room, path), cause)
        cause = "it is written in place: half a file is there under its name"
        check_equal(path.exists(), False, "whether the file is there", cause=cause)
        want = {"weight": torch.arange(200.0)}
        torch.save(want, path)
        _check_raised(world.run(answer, ranks_checkpoint.save_whole_without_room, path), cause)
        before = _load(path)
        check_equal(list(before), ["weight"], "names in the file from before", cause=cause)

    @pytest.mark.survives
    def test_refuses_a_file_that_is_not_of_the_model(self, answer, world, tmp_path):
        state = make(**ranks_checkpoint.SMALL).state_dict()
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
        world.run(answer, ranks_checkpoint.refuses_files, about)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return dict(torch.load(path))
    except Exception as error:
        return {f"{type(error).__name__}: it cannot be read": torch.zeros(0)}


def _check_raised(raised: list[str], cause: str) -> None:
    __tracebackhide__ = True
    check(all(raised), expected="an error: there is no room", got="no error", cause=cause)
