"""What ranks do for the specs of a folder: which checkpoint is the newest, what is left alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.ranks.shards import check_untouched, local_state
from specs.sharded_checkpoint.models import evaluate, small
from specs.sharded_checkpoint.ranks import loaded, on_rank_0

ASIDE = "5000000"  # a step above all others


def leaves_alone(answer: Any, rank: int, folder: Path) -> None:
    """Weights, gradients and optimizer state, where the model has been evaluated."""
    model, optimizer = small()
    before = local_state(model, optimizer)
    evaluate(model)
    answer.save(folder, model, optimizer, 1)
    cause = "whoever saves a checkpoint goes on training with what is there"
    check_untouched(before, model, optimizer, call="save", cause=cause)


def step_rules(answer: Any, rank: int, folder: Path) -> None:
    """Steps that are refused, before and after checkpoints; then the newest is loaded.

    After step 10 somebody has set a copy aside, under another name.
    """
    model, optimizer = small()

    def refuse(number: int, newest: int) -> None:
        before = _files(folder)
        dist.barrier()  # nobody looks while another one saves
        save = lambda: answer.save(folder, model, optimizer, number)  # noqa: E731
        cause = f"step {number} is not compared with {newest + 1} as a number, or not at all"
        check_raises(save, ValueError, mentions=[number], when=f"for step {number}", cause=cause)
        cause = "the folder is written to before the step is checked"
        check_equal(_files(folder), before, "files in the folder", cause=cause, clause=ERRORS)
        dist.barrier()

    refuse(0, 0)
    refuse(-1, 0)
    for number in (2, 10, 999_999, 1_000_000):
        answer.save(folder, model, optimizer, number)
        on_rank_0(lambda: _turn_times(folder))
        if number == 10:
            on_rank_0(lambda: _set_aside(folder))
        if number in (10, 1_000_000):
            cause = "as texts 2 comes after 10, a million has 7 digits; or times are compared, and "
            cause += "a copy has others"
            got, clause = loaded(answer, folder, model, optimizer), ""
            if ASIDE in str(got):
                clause = "folder"
                cause = "a name counts that only looks like a checkpoint's"
            check_equal(got, number, "step of the newest checkpoint", cause=cause, clause=clause)
            dist.barrier()
        for old in dict.fromkeys((number, number - 1, 2)):  # saved or not
            refuse(old, number)


def _set_aside(folder: Path) -> None:
    """Copies of what has 10 in its name, under a name that looks like a later checkpoint's."""
    for path in [*folder.glob("*10*")]:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name.replace("10", f"{ASIDE}-mine"))


def _turn_times(folder: Path) -> None:
    """As a copy may have it: what was written first has the latest time."""
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    last = max(times.values())
    for path, time in times.items():
        os.utime(path, ns=(last, 2 * last - time - last // 1000))


def _files(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else "a folder"
        for path in folder.parent.rglob("*")
    }


def save_often(answer: Any, rank: int, folder: Path) -> None:
    """Checkpoints 1 to 6, with an optimizer that has no state; the bytes after each."""
    model, found = small()[0], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(1, 7):
        answer.save(str(folder / "made"), model, optimizer, number)
        dist.barrier()
        found.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        dist.barrier()
    cause = "a checkpoint is written over one from before, or takes it away"
    kept = found[0] > 0 and found[-1] > 5.4 * found[0]
    check_equal(kept, True, "whether six checkpoints take six times the bytes", cause=cause)
