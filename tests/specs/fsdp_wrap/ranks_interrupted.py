"""What runs on every rank: programs for the specs of interrupted saves."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specs.fsdp_wrap.files import load_file
from specs.fsdp_wrap.ranks_checkpoint import different, loaded, small, state
from specs.fsdp_wrap.ranks_step import move
from specs.fsdp_wrap.trouble import before_each_write, no_room


class Copies:
    """What a kill at some moment would leave of a folder, each with when that is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[tuple[str, Path]] = []

    def take(self, when: str) -> Path:
        path = self.folder.with_name(f"{self.folder.name}-{len(self.made)}-{dist.get_rank()}")
        self.made.append((when, path))
        for _ in range(100):  # until nobody has written while it was copied
            with suppress(OSError):
                shutil.rmtree(path, ignore_errors=True)
                seen = _files(self.folder)
                shutil.copytree(self.folder, path, symlinks=True)
                if seen == _files(self.folder):
                    break
            time.sleep(0.01)
        return path

    def before_a_write(self, opened: str) -> None:
        """As it is, and with the file opened: it is there, and empty."""
        number = sum("before" in when for when, _ in self.made) + 1
        self.take(f"killed before file operation {number}")
        if opened:
            file = os.path.relpath(opened, self.folder)
            (self.take(f"killed when {Path(file).name} was just opened") / file).write_bytes(b"")


def _files(folder: Path) -> dict[Path, Any]:
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob("*")
    }


def killed_saves(answer: Any, rank: int, folder: Path) -> list[tuple[str, Any, list[str], Any]]:
    """One rank: what a kill would leave, at each operation on a file in a save of step 5.

    From each copy what `load` gives; and what it gives after a save of step 3 and one of step 5.
    """
    model, optimizer = small(answer)
    move(model, optimizer)
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
            answer.save(path, model, optimizer, 3)
            answer.save(path, model, optimizer, 5)
            step_again, values_again = loaded(answer, path)
            again = step_again, different(values_again, saved[5])
        found.append((when, step, different(values, saved.get(step, {})), again))
    return found


def full_disk(answer: Any, rank: int, folder: Path, full_on: int) -> dict[str, Any]:
    """A save while one rank cannot write; then what `load` gives, before and after another save."""
    model, optimizer = small(answer)
    move(model, optimizer)
    answer.save(folder, model, optimizer, 1)
    saved = state(model, optimizer)
    move(model, optimizer)
    with no_room() if rank == full_on else nullcontext():
        raised = _error_of(lambda: answer.save(folder, model, optimizer, 2))
    found: dict[str, Any] = {"raised": raised}
    if not all(_of_all(bool(raised))):
        return found
    step, values = loaded(answer, folder)
    found["before"] = step, different(values, saved)
    answer.save(folder, model, optimizer, 2)
    step, values = loaded(answer, folder)
    found["after"] = step, different(values, state(model, optimizer))
    return found


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (NotImplementedError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # CheckpointException of torch is no Exception
        return type(error).__name__
    return ""


def _of_all(flag: bool) -> list[bool]:
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return flags


def fails_at_the_end(answer: Any, rank: int, folder: Path) -> dict[str, Any]:
    """Saves of steps 1 and 2; and one of step 3, where rank 0 cannot do the last thing of all."""
    model, optimizer = small(answer)
    move(model, optimizer)
    answer.save(folder, model, optimizer, 1)
    seen: list[str] = []
    with before_each_write(folder, seen.append):
        answer.save(folder, model, optimizer, 2)
    saved, left = state(model, optimizer), len(seen)
    move(model, optimizer)

    def fail(_: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, "no space left on device")

    with before_each_write(folder, fail) if rank == 0 else nullcontext():
        raised = _error_of(lambda: answer.save(folder, model, optimizer, 3))
    return {"raised": raised, "saved": {2: saved, 3: state(model, optimizer)}}


def one_rank_goes_on(answer: Any, rank: int, folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    """What `load` gives, and what it gives after the next save, whose state is the third."""
    before = loaded(answer, folder)
    model, optimizer = small(answer, seed=9)
    step = answer.load(folder, model, optimizer)
    move(model, optimizer)
    answer.save(folder, model, optimizer, step + 1)
    return [before, loaded(answer, folder), (step + 1, state(model, optimizer))]


def slow_save(answer: Any, rank: int, folder: Path, slow: int) -> dict[str, Any]:
    """A save of step 5 in which one rank waits before each operation on a file.

    Copies of the folder: when it has waited, and as soon as the call returns on any rank.
    """
    model, optimizer = small(answer)
    move(model, optimizer)
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


def _contents(folder: Path) -> frozenset[tuple[str, bytes | None]]:
    return frozenset(
        (str(path.relative_to(folder)), path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    )


def killed_save_whole(answer: Any, rank: int, folder: Path) -> list[tuple[str, list[str]]]:
    """One rank: the names in the file if save_whole were killed at an operation on a file."""
    model, _ = small(answer)
    copies = Copies(folder / "run-\u00e9")
    copies.folder.mkdir()
    path = copies.folder / "whole.pt"
    torch.save({"from before": torch.ones(3)}, path)
    with before_each_write(copies.folder, copies.before_a_write):
        answer.save_whole(path, model)
    copies.take("not killed")
    return [(when, sorted(load_file(copy / path.name))) for when, copy in copies.made]
