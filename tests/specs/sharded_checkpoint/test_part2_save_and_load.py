"""Training that stops on some ranks and resumes on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.laws.checks import check_bar
from kit.laws.scenarios import once
from kit.ranks.shards import shard_bytes, whole_bytes
from kit.ranks.toys import make
from specs.sharded_checkpoint import ranks
from specs.sharded_checkpoint.models import adamw, momentum


class TestPart2SaveAndLoad:
    @pytest.mark.works("load", "resumes")
    @pytest.mark.parametrize(
        ("saving", "loading", "kind", "has_trained"),
        [(2, 3, adamw, True), (3, 1, momentum, False)],
        ids=["2_ranks_to_3", "3_ranks_to_1_new_SGD"],
    )
    def test_goes_on_as_if_it_had_not_stopped(
        self, answer, worlds, tmp_path, saving, loading, kind, has_trained
    ):
        """Weights, buffers, state and settings to the bit; the next steps within rounding.

        Loaded with other rates, after a step or none. Weights are tied, frozen, or of one row.
        """
        folder = tmp_path / "run[lr=0.1]"
        saved = worlds(saving).run(answer, ranks.save_and_go_on, folder, kind)[0]
        worlds(loading).run(answer, ranks.load_and_go_on, folder, kind, has_trained, saved)

    @pytest.mark.exact("save", "evaluated")
    def test_saves_an_evaluated_model_and_leaves_it_as_it_is(self, answer, world, tmp_path):
        world.run(answer, ranks.comes_back, tmp_path / "run", True)

    @pytest.mark.exact("load", "resumes")
    def test_every_dtype_comes_back(self, answer, world, tmp_path):
        """Weights of 16 and 64 bits; Adam's float32 step is 257, which bfloat16 cannot hold."""
        world.run(answer, ranks.comes_back, tmp_path / "run", False)

    @pytest.mark.exact("save", "Raises")
    def test_steps_only_rise(self, answer, world, tmp_path):
        """Checkpoints 2, 10, 999,999 and 1,000,000, with file times in reverse."""
        world.run(answer, ranks.step_rules, tmp_path / "run")

    @pytest.mark.saves("save", "memory")
    def test_a_rank_saves_its_own_part_only(self, answer, reference, worlds, tmp_path):
        """Above the baseline <= weights and Adam's two moments once more + two whole parameters."""
        _check_peaks("save", answer, reference, worlds, tmp_path)

    @pytest.mark.saves("load", "memory")
    def test_a_rank_loads_its_own_part_only(self, answer, reference, worlds, tmp_path):
        """The same; one rank saved, so its file is more than the part of one of two ranks."""
        _check_peaks("load", answer, reference, worlds, tmp_path)

    @pytest.mark.survives("load", "Raises")
    def test_refuses_no_checkpoint_and_that_of_another_model(self, answer, world, tmp_path):
        """The saved model has more, or less, or another shape. Gradients stay."""
        (tmp_path / "empty").mkdir()
        world.run(answer, ranks.refuses_folders, tmp_path)

    @pytest.mark.survives("load", "together")
    @pytest.mark.parametrize("bad_rank", [0, 1])
    def test_every_rank_raises_where_one_cannot_load(self, answer, world, tmp_path, bad_rank):
        """The folder is missing on one rank, as if its disk was not mounted."""
        fails = ranks.fails_on_one, "load", tmp_path, bad_rank, "not_there"
        ranks.check_alike(world.run(answer, *fails))

    @pytest.mark.survives("save", "together")
    @pytest.mark.parametrize(("bad_rank", "bad"), [(1, "newer"), (0, "file/run")])
    def test_all_ranks_save_or_none_where_one_refuses(self, answer, world, tmp_path, bad_rank, bad):
        """One rank sees a newer step, or cannot make the folder."""
        ranks.check_alike(world.run(answer, ranks.fails_on_one, "save", tmp_path, bad_rank, bad))


def _check_peaks(call: str, answer: Any, reference: Any, worlds: Any, folder: Path) -> None:
    __tracebackhide__ = True
    parameters = [*make(ranks.LARGE, 3).parameters()]
    limit = 3 * shard_bytes(parameters, 2) + 2 * max(whole_bytes([p], 2) for p in parameters)

    def peaks(module: Any, name: str) -> Any:
        if call == "load":
            worlds(1).run(module, ranks.peak, folder / name, "save")
        return worlds(2).run(module, ranks.peak, folder / name, call)

    known = once(call, lambda: peaks(reference, "theirs"))
    kinds = [
        ("above the baseline", 0, "its weights and moments + two whole parameters"),
        ("growth of the whole process", 4 * 2**20, "the same + 4 MiB; not only tensors count"),
    ]
    for rank, both in enumerate(zip(peaks(answer, "yours"), known, strict=True)):
        for (kind, more, formula), yours, theirs in zip(kinds, *both, strict=True):
            if yours is None:
                continue  # it cannot be counted here
            check_bar(
                f"{call}, {kind} on rank {rank} of 2",
                yours,
                limit + more,
                plain=3 * shard_bytes(parameters, 1),
                reference=theirs,
                formula=f"{formula}; plain is the whole model",
                cause="a rank gathers, or reads, parts of other ranks; or it has two copies of its "
                "part, such as a list and the joined bytes; or it keeps what it reads",
            )
