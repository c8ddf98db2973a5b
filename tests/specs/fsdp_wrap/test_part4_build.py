"""build, save and load by value; save_whole and load_whole. The ranks run on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.laws.checks import check, check_close, check_equal
from specs.fsdp_wrap import ranks_build, ranks_checkpoint, ranks_whole
from specs.fsdp_wrap.files import load_file
from specs.fsdp_wrap.models import (
    check_named,
    make,
    train_alone,
)
from specs.fsdp_wrap.ranks_checkpoint import MADE
from specs.fsdp_wrap.ranks_step import Plan

PLAN: Plan = [[3], [1]]
KINDS_AND_SIZES = pytest.mark.parametrize(
    ("world", "kind"),
    [
        pytest.param(size, kind, id=f"{size}_{'ranks' if size > 1 else 'rank'}-{kind}")
        for size in (1, 2, 4)
        for kind in ranks_build.MODELS
        if kind != "plain" or size == 2
    ],
    indirect=["world"],
)

# By answer and ranks: a folder with a checkpoint, and how those that saved it went on.
_saved: dict[tuple[ModuleType, int], tuple[Path, dict[str, Any]]] = {}


class TestPart4Build:
    subject = "build"

    @pytest.mark.works
    @KINDS_AND_SIZES
    def test_has_the_values_of_one_process(self, answer, world, kind):
        """To the bit: the numbers that one process draws, module by module."""
        for rank, (got, true) in enumerate(world.run(answer, ranks_build.first_values, kind)):
            want = true["values"]
            cause = "to_empty() has not been called, or not on all that is on meta"
            check_equal(got["on meta"], [], f"what is on meta on rank {rank}", cause=cause)
            cause = "parameters are no DTensors: they were replaced after they were sharded"
            check_equal(got["kinds"], {"DTensor"}, "types of the parameters", cause=cause)
            cause = "to_empty(), or a new parameter, has cut the tie"
            check_equal(got["tied"], true["tied"], "tied parameters", cause=cause)
            check_equal(got["mode"], {True}, "train mode", cause="build has called eval()")
            cause = "a new parameter requires a gradient unless it is told not to"
            check_equal(got["trained"], true["trained"], "parameters that train", cause=cause)
            cause = "init runs in another order, on modules that lack something, or on shards"
            check_equal(list(got["values"]), list(want), "names", cause=cause)
            for name, value in want.items():
                check_equal(got["values"][name], value, f"{name} on rank {rank}", cause=cause)

    @pytest.mark.works
    @pytest.mark.parametrize("kind", ["tied_and_frozen", "blocks_in_blocks"])
    def test_what_was_built_trains_as_one_process(self, answer, world, kind):
        for result, want in world.run(answer, ranks_build.train_built, kind, PLAN):
            cause = "the optimizer was made from parameters that were replaced afterwards"
            check_named(result.weights, want.weights, "weights after 2 steps", cause=cause)
            losses = torch.tensor(result.losses)
            cause = "what was built does not compute what one process does"
            check_close(losses, torch.tensor(want.losses), "losses", cause=cause, rtol=1e-4)

    @pytest.mark.works
    @pytest.mark.parametrize(
        ("saving", "loading", "how"),
        [(2, 1, "built"), (2, 4, "trained")],
        ids=["2_ranks_to_1_built", "2_ranks_to_4"],
    )
    def test_goes_on_as_if_it_had_not_been_interrupted(
        self, answer, worlds, tmp_path_factory, saving, loading, how
    ):
        """Weights, optimizer state and learning rate to the bit; the next steps within rounding.

        The model that it is loaded into has trained otherwise, with another learning rate, and has
        gradients; or was just built.
        """
        if (answer, saving) not in _saved:
            folder = tmp_path_factory.mktemp("saved") / "run"
            ranks = worlds(saving).run(answer, ranks_checkpoint.save_and_go_on, folder)
            _saved[answer, saving] = folder, ranks[0]
        folder, saved = _saved[answer, saving]
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
            losses, want = (torch.tensor(run["after"]) for run in (got, saved))
            check_close(losses, want, "losses of the next steps", cause=cause, rtol=1e-4)

    @pytest.mark.works
    def test_one_file_holds_the_model_as_it_is_without_wrap(self, answer, world, tmp_path):
        """A file from before is replaced; ordinary tensors, all names, the weights to the bit."""
        path = tmp_path / "whole.pt"
        path.write_bytes(b"from before")
        results = world.run(answer, ranks_whole.save_whole_after, path)
        model = make(**MADE)
        cause = "the file is not of the state dict of the model without wrap"
        saved = load_file(path)
        check_equal(sorted(saved), sorted(model.state_dict()), "names in the file", cause=cause)
        for rank, result in enumerate(results):
            cause = "this rank returns before rank 0 has written"
            what = f"names in the file when the call returns on rank {rank}"
            check_equal(sorted(result["names"]), sorted(saved), what, cause=cause)
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
        """And trains on: a step moves it as it does one process."""
        path, model = tmp_path / "whole.pt", make(**MADE)
        torch.save(model.state_dict(), path)
        results = world.run(answer, ranks_whole.load_whole_into, path)
        for rank, (got, _) in enumerate(results):
            for name, value in model.state_dict().items():
                cause = "a rank has not got its part of every weight"
                check_equal(got[name], value, f"{name} on rank {rank}", cause=cause)
        want = train_alone(model, [ranks_checkpoint.of_all(0)]).weights
        for _, got in results:
            cause = "the parameters were replaced: those that the optimizer has are others"
            check_named(got, want, "weights after a step", cause=cause)

    @pytest.mark.exact
    def test_makes_the_model_once_under_meta(self, answer, world):
        """Then an ordinary tensor is made once more, after `build`."""
        for got in world.run(answer, ranks_build.makes):
            cause = "make_model is called with memory, or twice, or meta is not left again"
            check_equal(got, ["meta", "cpu"], "devices of new tensors", cause=cause)

    @pytest.mark.exact
    def test_takes_the_options_of_wrap(self, answer, world):
        got = world.run(answer, ranks_build.options, [[4], [4]])[0]
        want = {
            "dtype": _seen(inside=torch.bfloat16),
            "checkpoint": _seen(runs=2),
            "reshard_after_forward": _seen(gathers=3),
        }
        for name, seen in want.items():
            check_equal(got[name], seen, f"a step with {name}", cause=f"{name} is not passed on")

    @pytest.mark.exact
    def test_an_older_checkpoint_stays(self, answer, world, tmp_path):
        """Three checkpoints take three times the bytes of one."""
        one, _, three = world.run(answer, ranks_checkpoint.save_often, tmp_path / "run")[0]
        check(
            one > 0 and three > 2.7 * one,
            expected=f"some {3 * one} bytes in the folder after the third save",
            got=three,
            cause="a checkpoint is written over one from before, or takes it away",
        )


def _seen(
    inside: torch.dtype = torch.float32, runs: int = 1, gathers: int = 5
) -> dict[str, object]:
    """Two blocks are gathered twice and the root once; or each unit once."""
    return {
        "other values": [],
        "dtype inside a block": str(inside),
        "dtypes of parameters": ["torch.float32"],
        "forwards of a block": runs,
        "gathers": gathers,
    }
