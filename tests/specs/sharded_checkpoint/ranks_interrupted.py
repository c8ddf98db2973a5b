"""What runs on every rank: programs for the specs of interrupted saves."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kit.ranks.disk import Copies, before_each_write, different, no_room
from specs.sharded_checkpoint.models import move, small, state
from specs.sharded_checkpoint.ranks import error_of, of_all, ordinary


def loaded(answer: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The step and what `load` gives; in place of the step an error, where there is one."""
    model, optimizer = small(seed=9)
    try:
        return ordinary(lambda: answer.load(folder, model, optimizer)), state(model, optimizer)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}", {}


def killed_saves(answer: Any, rank: int, folder: Path) -> list[tuple[str, Any, list[str], Any]]:
    """One rank: what a kill would leave, at each operation on a file in a save of step 5.

    From each copy what `load` gives; and what it gives after step 5 is saved again.
    """
    model, optimizer = small()
    copies = Copies(folder / "run-\u00e9")
    answer.save(copies.folder, model, optimizer, 1)
    saved = {1: state(model, optimizer)}
    move(model, optimizer)
    with before_each_write(copies.folder, copies.before_a_write):
        answer.save(copies.folder, model, optimizer, 5)
    copies.take("not killed")
    saved[5] = state(model, optimizer)
    found = []
    for when, path in copies.made:
        step, values = loaded(answer, path)
        again = None
        if step == 1 and "just opened" not in when:
            answer.save(path, model, optimizer, 5)
            step_again, values_again = loaded(answer, path)
            again = step_again, different(values_again, saved[5])
        found.append((when, step, different(values, saved.get(step, {})), again))
    return found


def full_disk(answer: Any, rank: int, folder: Path, full_on: int) -> dict[str, Any]:
    """A save while one rank cannot write; then what `load` gives, before and after another save."""
    model, optimizer = small()
    answer.save(folder, model, optimizer, 1)
    saved = state(model, optimizer)
    move(model, optimizer)
    with no_room() if rank == full_on else nullcontext():
        raised = error_of(lambda: answer.save(folder, model, optimizer, 2))
    found: dict[str, Any] = {"raised": raised}
    if not all(of_all(bool(raised))):
        return found
    step, values = loaded(answer, folder)
    found["before"] = step, different(values, saved)
    answer.save(folder, model, optimizer, 2)
    step, values = loaded(answer, folder)
    found["after"] = step, different(values, state(model, optimizer))
    return found


def fails_at_the_end(answer: Any, rank: int, folder: Path) -> dict[str, Any]:
    """Saves of steps 1 and 2; and one of step 3, where rank 0 fails at its last file operation.

    And a copy of what both ranks leave if they are killed there.
    """
    model, optimizer = small()
    answer.save(folder, model, optimizer, 1)
    seen: list[str] = []
    with before_each_write(folder, seen.append):
        answer.save(folder, model, optimizer, 2)
    saved, left = state(model, optimizer), len(seen)
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
    states = {2: saved, 3: state(model, optimizer)}
    return {"raised": raised, "saved": states, "copies": [path for _, path in copies.made]}


def one_rank_goes_on(
    answer: Any, rank: int, folders: Sequence[Path]
) -> list[list[tuple[Any, dict[str, Any]]]]:
    """For each, what `load` gives, what it gives after the next save, and the state of this."""
    return [_goes_on(answer, folder) for folder in folders]


def _goes_on(answer: Any, folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    before = loaded(answer, folder)
    model, optimizer = small(seed=9)
    step = answer.load(folder, model, optimizer)
    for _ in range(2):  # else it might be what the failed save has left
        move(model, optimizer)
    answer.save(folder, model, optimizer, step + 1)
    return [before, loaded(answer, folder), (step + 1, state(model, optimizer))]


def slow_save(answer: Any, rank: int, folder: Path, slow: int) -> dict[str, Any]:
    """A save of step 5 in which one rank waits before each operation on a file.

    Copies of the folder: when it has waited, and as soon as the call returns on any rank.
    """
    model, optimizer = small()
    answer.save(folder, model, optimizer, 1)
    saved = {1: state(model, optimizer)}
    move(model, optimizer)
    copies = Copies(folder)

    def wait(_: str) -> None:
        time.sleep(0.05)
        copies.take(f"while rank {slow} has not written all")

    with before_each_write(folder, wait) if rank == slow else nullcontext():
        answer.save(folder, model, optimizer, 5)
    copies.take(f"as soon as save has returned on rank {rank}")
    saved[5] = state(model, optimizer)
    return {"saved": saved, "copies": copies.made}


def loads_all(answer: Any, rank: int, folders: Sequence[Path]) -> list[tuple[Any, dict[str, Any]]]:
    """Of folders with the same in them only the first is loaded."""
    results: dict[Any, Any] = {}
    contents = [_contents(folder) for folder in folders]
    for folder, content in zip(folders, contents, strict=True):
        if content not in results:
            results[content] = loaded(answer, folder)
    return [results[content] for content in contents]


def _contents(folder: Path) -> frozenset[tuple[str, str | bytes | None]]:
    return frozenset((str(path.relative_to(folder)), _content(path)) for path in folder.rglob("*"))


def _content(path: Path) -> str | bytes | None:
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else None
