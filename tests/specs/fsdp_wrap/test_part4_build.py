"""build: a model that is never whole on any rank, and has the values of one process."""

from __future__ import annotations

import functools

import pytest
import torch

from kit.simulated import simulated_world
from kit.verdict import check_bar, check_close, check_equal
from specs.fsdp_wrap import ranks_build
from specs.fsdp_wrap.models import Model, check_named, rounded, shard_bytes, units, whole_bytes
from specs.fsdp_wrap.ranks_build import built_alone, train_built_alone, values
from specs.fsdp_wrap.ranks_step import Plan

PLAN: Plan = [[3, 2, 4], [1, 1, 6]]
SIZES = pytest.mark.parametrize(
    "world", [1, 2, 4], indirect=True, ids=["1_rank", "2_ranks", "4_ranks"]
)
KINDS = pytest.mark.parametrize("kind", ranks_build.MODELS)
# Wide enough that rounding to 512 bytes is little of it.
WIDTH, BLOCKS = 48, 6


class TestPart4Build:
    """Part 4: build, save and load - a model that no rank could hold"""

    subject = "build"

    @pytest.mark.works
    @KINDS
    @SIZES
    def test_has_the_values_of_one_process(self, answer, world, kind):
        """To the bit: the numbers that one process draws, module by module."""
        model = built_alone(kind)
        want, every = values(model), list(model.named_parameters(remove_duplicate=False))
        for rank, got in enumerate(world.run(answer, ranks_build.first_values, kind)):
            cause = "to_empty() has not been called, or not on all that is on meta"
            check_equal(got["on meta"], [], f"what is on meta on rank {rank}", cause=cause)
            cause = "parameters are no DTensors: they were replaced after they were sharded"
            check_equal(got["kinds"], {"DTensor"}, "types of the parameters", cause=cause)
            cause = "to_empty(), or a new parameter, has cut the tie"
            ties = [["embed.weight", "again.weight"]] if kind == "tied_and_frozen" else []
            check_equal(got["tied"], ties, "tied parameters", cause=cause)
            trained = [name for name, p in every if p.requires_grad]
            cause = "a new parameter requires a gradient unless it is told not to"
            check_equal(got["trained"], trained, "parameters that train", cause=cause)
            cause = "init runs in another order, on modules that lack something, or on shards"
            check_equal(list(got["values"]), list(want), "names", cause=cause)
            for name, value in want.items():
                check_equal(got["values"][name], value, f"{name} on rank {rank}", cause=cause)

    @pytest.mark.works
    @KINDS
    def test_what_was_built_trains_as_one_process(self, answer, world, kind):
        got, want = world.run(answer, ranks_build.train_built, kind, PLAN), None
        want = train_built_alone(kind, PLAN)
        for result in got:
            cause = "the optimizer was made from parameters that were replaced afterwards"
            check_named(result.weights, want.weights, "weights after 3 steps", cause=cause)
            losses = torch.tensor(result.losses)
            cause = "what was built does not compute what one process does"
            check_close(losses, torch.tensor(want.losses), "losses", cause=cause, rtol=1e-4)

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
            "reshard_after_forward": _seen(gathers=4),
        }
        for name, seen in want.items():
            check_equal(got[name], seen, f"a step with {name}", cause=f"{name} is not passed on")

    @pytest.mark.saves
    @pytest.mark.parametrize("ranks", [8, 64])
    def test_no_rank_ever_holds_the_model(self, answer, reference, device, ranks):
        """Bytes while it is built <= shards + buffers + what two units have, rounding included."""

        def peak(module: object) -> int:
            with simulated_world(ranks, device) as mesh:
                return ranks_build.peak_of_build(module, mesh, WIDTH, BLOCKS, device)

        _check_peak(peak(answer), peak(reference), ranks)

    @pytest.mark.saves
    def test_no_rank_of_two_ever_holds_the_model(self, answer, reference, world):
        """The same on two real ranks, of which neither gets anything from the other."""
        yours, theirs = (
            world.run(module, ranks_build.peak, WIDTH, BLOCKS) for module in (answer, reference)
        )
        for mine, other in zip(yours, theirs, strict=True):
            _check_peak(mine, other, 2)

    @pytest.mark.survives
    def test_refuses_what_wrap_refuses(self, answer, world):
        world.run(answer, ranks_build.refused)


def _seen(
    inside: torch.dtype = torch.float32, runs: int = 1, gathers: int = 7
) -> dict[str, object]:
    """Three blocks are gathered twice and the root once; or each unit once."""
    return {
        "dtype inside a block": str(inside),
        "dtypes of parameters": ["torch.float32"],
        "forwards of a block": runs,
        "gathers": gathers,
    }


@functools.cache
def _model() -> Model:
    return Model(WIDTH, BLOCKS)


def _check_peak(yours: int, theirs: int, ranks: int) -> None:
    __tracebackhide__ = True
    parameters = list(_model().parameters())
    largest = sorted(whole_bytes(unit, ranks) for unit in units(_model()))[-2:]
    buffers = sum(rounded(b.numel() * b.element_size()) for b in _model().buffers())
    check_bar(
        f"build, above the baseline on a rank of {ranks}",
        yours,
        shard_bytes(parameters, ranks) + buffers + sum(largest),
        plain=shard_bytes(parameters, 1) + buffers,
        reference=theirs,
        formula="shards + buffers + two blocks",
        cause="the whole model is there before it is sharded, or all of it is initialised at once",
    )
