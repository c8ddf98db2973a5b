"""What ranks do for the specs of interrupted saves."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kit.laws.checks import check, check_equal
from kit.ranks.disk import Copies, before_each_write, different, no_room
from specs.sharded_checkpoint.models import move, of_all, small, state
from specs.sharded_checkpoint.ranks import HOW_IT_ENDED, check_alike, error_of, loaded

States = dict[int, dict[str, Any]]  # what was saved, by step
Found = tuple[str, Path, States, str]  # when a folder was copied, what may be loaded, the cause

TOO_EARLY = "a checkpoint counts before it is complete, or overwrites the old one"
SPOILED = "an unfinished checkpoint counts, or the one before it is damaged"
IN_THE_WAY = "leftovers of a save are taken for a checkpoint, or get into the next one"


def check_loads(answer: Any, folder: Path, saved: States, when: str, cause: str) -> int:
    """Load: it must be one of these checkpoints. Its step."""
    __tracebackhide__ = True
    model, optimizer = small(seed=9)
    step = loaded(answer, folder, model, optimizer)
    steps = " or ".join(map(str, saved))
    check(step in [*saved], expected=f"step {steps} is loaded, {when}", got=step, cause=cause)
    off = different(state(model, optimizer), saved[step])
    check_equal(off, [], f"what differs from step {step}, {when}", cause=cause)
    return step


def _begun(answer: Any, folder: Path) -> tuple[nn.Module, Optimizer, States]:
    """Step 1 is saved, and training has continued."""
    model, optimizer = small()
    answer.save(folder, model, optimizer, 1)
    saved = {1: state(model, optimizer)}
    move(model, optimizer)
    return model, optimizer, saved


def killed_saves(answer: Any, rank: int, folder: Path) -> None:
    """One rank, step 5: load a copy of the folder from before each file operation.

    If the copy has the old checkpoint, step 5 is saved again.
    """
    copies = Copies(folder / "run-\u00e9")
    (copies.folder / "logs.tmp").mkdir(parents=True)
    model, optimizer, before = _begun(answer, copies.folder)
    with before_each_write(copies.folder, copies.before_a_write):
        answer.save(copies.folder, model, optimizer, 5)
    new = {5: state(model, optimizer)}
    check_equal(bool(copies.made), True, "whether save changes files", cause="save writes nothing")
    cause = "load does not take the newest checkpoint"
    check_loads(answer, copies.folder, new, "not killed", cause)
    for when, path in copies.made:
        step = check_loads(answer, path, before | new, when, TOO_EARLY)
        if step == 1 and "just opened" not in when:
            answer.save(path, model, optimizer, 5)
            check_loads(answer, path, new, f"after a new save, {when}", IN_THE_WAY)
            cause = "other files in the folder are taken for leftovers of a save"
            there = (path / "logs.tmp").exists()
            check_equal(there, True, "whether logs.tmp is there", cause=cause)


def full_disk(answer: Any, rank: int, folder: Path, full_on: int) -> None:
    """One rank cannot write: the checkpoint before is loaded, and the next save works."""
    model, optimizer, saved = _begun(answer, folder)
    with no_room() if rank == full_on else nullcontext():
        raised = of_all(error_of(lambda: answer.save(folder, model, optimizer, 2)))
    check_alike(raised, HOW_IT_ENDED, must=True)
    check_loads(answer, folder, saved, "after the save that failed", SPOILED)
    answer.save(folder, model, optimizer, 2)
    new = {2: state(model, optimizer)}
    check_loads(answer, folder, new, "after the next save", IN_THE_WAY)


def slow_save(answer: Any, rank: int, folder: Path, slow: int) -> list[Found]:
    """A save of step 5 in which one rank waits before each file operation.

    The folder is copied after each wait, and as soon as the call returns on any rank.
    """
    model, optimizer, saved = _begun(answer, folder)
    copies = Copies(folder)

    def wait(_: str) -> None:
        time.sleep(0.05)
        copies.take(f"while rank {slow} is still writing")

    with before_each_write(folder, wait) if rank == slow else nullcontext():
        answer.save(folder, model, optimizer, 5)
    returned = copies.take("returned")
    new = {5: state(model, optimizer)}
    cause = "a rank returns before all others have written"
    return [
        (f"as soon as save has returned on rank {rank}", returned, new, cause),
        *((when, path, saved | new, TOO_EARLY) for when, path in copies.made[:-1]),
    ]


def fails_at_the_end(answer: Any, rank: int, folder: Path) -> tuple[str, list[Found]]:
    """Steps 1 and 2; in a save of step 3 rank 0 fails, or all are killed, at its last operation."""
    model, optimizer, _ = _begun(answer, folder)
    seen: list[str] = []
    with before_each_write(folder, seen.append):
        answer.save(folder, model, optimizer, 2)
    saved, left = {2: state(model, optimizer)}, len(seen)
    move(model, optimizer)
    copies = Copies(folder)

    def fail(_: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            copies.take("killed")
            raise OSError(errno.ENOSPC, "No space left on device")

    with before_each_write(folder, fail) if rank == 0 else nullcontext():
        raised = error_of(lambda: answer.save(folder, model, optimizer, 3))
    new = {3: state(model, optimizer)}
    found = [(when, path, saved | new, SPOILED) for when, path in copies.made]
    return raised, [("after the failure", folder, saved if raised else new, SPOILED), *found]


def loads_each(answer: Any, rank: int, found: Iterable[Found], goes_on: bool = False) -> None:
    """One rank loads each copy; if it `goes_on` it also saves, and loads, the next step."""
    for when, folder, saved, cause in found:
        step = check_loads(answer, folder, saved, when, cause)
        if goes_on:
            model, optimizer = small(seed=5)
            answer.save(folder, model, optimizer, step + 1)
            new = {step + 1: state(model, optimizer)}
            check_loads(answer, folder, new, f"{when}, and the next save", IN_THE_WAY)
