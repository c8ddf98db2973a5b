"""What runs on every rank: programs for the specs of interrupted saves."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from specs.fsdp_wrap.ranks_checkpoint import different, loaded, small, state, steps
from specs.fsdp_wrap.trouble import before_each_write, no_room


def killed_saves(answer: Any, rank: int, folder: Path) -> list[tuple[int, list[str], Any]]:
    """One rank: what a kill would leave, before each operation on a file in a save of step 5.

    The folder is copied at each of these moments; then, from each copy, what `load` gives, and what
    it gives after a save of step 3 and another one of step 5.
    """
    model, optimizer = small(answer)
    steps(answer, model, optimizer, 0)
    answer.save(folder / "run", model, optimizer, 1)
    saved = {1: state(model, optimizer)}
    steps(answer, model, optimizer, 1)
    copies: list[Path] = []

    def copy() -> None:
        copies.append(folder / f"copy{len(copies)}")
        shutil.copytree(folder / "run", copies[-1], symlinks=True)

    with before_each_write(folder / "run", copy):
        answer.save(folder / "run", model, optimizer, 5)
    copy()  # after the last
    saved[5] = state(model, optimizer)
    found = []
    for path in copies:
        step, values = loaded(answer, path)
        again = None
        if step == 1:
            answer.save(path, model, optimizer, 3)
            answer.save(path, model, optimizer, 5)
            step_again, values_again = loaded(answer, path)
            again = step_again, different(values_again, saved[5])
        found.append((step, different(values, saved.get(step, {})), again))
    return found


def full_disk(answer: Any, rank: int, folder: Path, full_on: int) -> dict[str, Any]:
    """A save while one rank cannot write; then what `load` gives, before and after another save."""
    model, optimizer = small(answer)
    steps(answer, model, optimizer, 0)
    answer.save(folder, model, optimizer, 1)
    saved = state(model, optimizer)
    steps(answer, model, optimizer, 1)
    raised = ""
    with no_room() if rank == full_on else nullcontext():
        try:
            answer.save(folder, model, optimizer, 2)
        except (NotImplementedError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # CheckpointException of torch is no Exception
            raised = type(error).__name__
    found: dict[str, Any] = {"raised": raised}
    if not all(_of_all(bool(raised))):
        return found
    step, values = loaded(answer, folder)
    found["before"] = step, different(values, saved)
    answer.save(folder, model, optimizer, 2)
    step, values = loaded(answer, folder)
    found["after"] = step, different(values, state(model, optimizer))
    return found


def _of_all(flag: bool) -> list[bool]:
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return flags
