"""Training that stops on some ranks and goes on on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.laws.checks import check_bar
from kit.laws.scenarios import once
from kit.ranks.shards import shard_bytes, whole_bytes
from kit.ranks.toys import make
from specs.sharded_checkpoint import ranks, ranks_folder
from specs.sharded_checkpoint.models import adamw, nadam


class TestPart2SaveAndLoad:
    @pytest.mark.works("load", "goes on")
    @pytest.mark.parametrize(
        ("saving", "loading", "kind", "into"),
        [(2, 3, adamw, ranks.TRAINED), (3, 1, nadam, ranks.NEW)],
        ids=["2_ranks_to_3", "3_ranks_to_1_NAdam_new"],
    )
    def test_goes_on_as_if_it_had_not_stopped(
        self, answer, worlds, tmp_path, saving, loading, kind, into
    ):
        """Weights, buffers, state and settings to the bit; the next steps within rounding.

        It is loaded into what has trained with other rates; or into what is new, and has been
        evaluated. Some weights are tied, some frozen; one has a single row; a buffer has -inf. One
        rate is a tensor, and one group has amsgrad.
        """
        folder = tmp_path / "run[lr=0.1]"
        saved = worlds(saving).run(answer, ranks.save_and_go_on, folder, kind, into)[0]
        worlds(loading).run(answer, ranks.load_and_go_on, folder, kind, into, saved)

    @pytest.mark.exact("load", "goes on")
    def test_every_dtype_comes_back(self, answer, world, tmp_path):
        """Weights of 16 and of 64 bits; Adam counts its steps in float32, beyond 256."""
        world.run(answer, ranks.keeps_dtypes, tmp_path / "run")

    @pytest.mark.exact("load", "drops")
    def test_gradients_of_before_are_dropped(self, answer, world, tmp_path):
        """Of parameters too that the optimizer does not have."""
        world.run(answer, ranks.drops_gradients, tmp_path / "run")

    @pytest.mark.exact("save", "older")
    def test_an_older_checkpoint_stays(self, answer, world, tmp_path):
        """Six checkpoints take six times the bytes of one."""
        world.run(answer, ranks_folder.save_often, tmp_path / "run")

    @pytest.mark.exact("save", "untouched")
    def test_training_goes_on_with_what_is_there(self, answer, world, tmp_path):
        world.run(answer, ranks_folder.leaves_alone, tmp_path / "run")

    @pytest.mark.exact("save", "Raises")
    def test_steps_only_rise(self, answer, world, tmp_path):
        """Checkpoints 2, 10, 999,999 and 1,000,000; a copy set aside; files of somebody else.

        The folder itself has the name of a checkpoint.
        """
        folder = tmp_path / "step-3" / "checkpoint-3[a]"
        folder.parent.mkdir()
        world.run(answer, ranks_folder.step_rules, folder)

    @pytest.mark.saves("save", "memory")
    def test_a_rank_saves_its_own_part_only(self, answer, reference, worlds, tmp_path):
        """Above the baseline <= weights and Adam's two moments once more + two whole parameters."""
        _check_peaks("save", answer, reference, worlds, tmp_path)

    @pytest.mark.saves("load", "memory")
    def test_a_rank_loads_its_own_part_only(self, answer, reference, worlds, tmp_path):
        """The same, of what one rank has saved: its file is more than the part of one of two."""
        _check_peaks("load", answer, reference, worlds, tmp_path)

    @pytest.mark.survives("load", "goes on")
    def test_goes_on_whatever_was_there_before(self, answer, worlds, tmp_path):
        """Other settings and their state; others frozen; gradients; another extra state. What was
        frozen when it was saved has trained before, or has no state."""
        folder, into = tmp_path / "run", ranks.OTHER
        saved = worlds(2).run(answer, ranks.save_and_go_on, folder, adamw, into)[0]
        worlds(3).run(answer, ranks.load_and_go_on, folder, adamw, into, saved)

    @pytest.mark.survives("load", "goes on")
    def test_weights_of_any_name_come_back(self, answer, world, tmp_path):
        world.run(answer, ranks.keeps_names, tmp_path / "run")

    @pytest.mark.survives("load", "Raises")
    def test_refuses_no_checkpoint_and_that_of_another_model(self, answer, world, tmp_path):
        """Of one that has more as well: its names would all be found. Gradients stay, too."""
        (tmp_path / "empty").mkdir()
        world.run(answer, ranks.refuses_folders, tmp_path)

    @pytest.mark.survives("load", "together")
    @pytest.mark.parametrize(
        ("bad_rank", "bad"),
        [(0, "not_there"), (1, "not_there"), (1, "set"), (1, "get"), (1, "unpickle")],
    )
    def test_every_rank_raises_where_one_cannot_load(self, answer, world, tmp_path, bad_rank, bad):
        """The folder is missing, as where a disk is not mounted, or extra state raises.

        Where it is set, or asked for; or unpickled, as where a rank lacks its class.
        """
        ranks.check_alike(world.run(answer, ranks.fails_on_one, "load", tmp_path, bad_rank, bad))

    @pytest.mark.survives("save", "together")
    @pytest.mark.parametrize(
        ("bad_rank", "bad"), [(1, "newer"), (0, "file/run"), (1, "get"), (1, "pickle")]
    )
    def test_all_ranks_save_or_none_where_one_refuses(self, answer, world, tmp_path, bad_rank, bad):
        """One rank sees a step 9, has no place for the folder, or extra state that raises.

        Where it is asked for, or pickled.
        """
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
    both = zip(peaks(answer, "yours"), known, strict=True)
    for rank, (yours, theirs) in enumerate(both):
        formula = "its weights and moments + two whole parameters; plain is the whole model"
        check_bar(
            f"{call}, above the baseline on rank {rank} of 2",
            yours[0],
            limit,
            plain=3 * shard_bytes(parameters, 1),
            reference=theirs[0],
            formula=formula,
            cause="a rank gathers, or reads, what belongs to other ranks; or keeps what it reads",
        )
        if yours[1] is None:
            continue  # nobody counts them here
        check_bar(
            f"{call}, growth of the whole process of rank {rank} of 2",
            yours[1],
            limit + 8 * 2**20,
            plain=3 * shard_bytes(parameters, 1),
            reference=theirs[1],
            formula="the same + 8 MiB; what is no tensor counts too, such as bytes",
            cause="its part is there twice, as in a list and joined; or a whole file is read",
        )
