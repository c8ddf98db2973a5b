"""Trouble with files on a rank: a kill between two operations, a full disk, a slow one, another."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kit.laws.equal import same

_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")

# Is called with the path of a file that is about to be opened and empty, else with "".
Before = Callable[[str], object]


class _Watch:
    """Calls `before` at each operation on files under `folder` that changes something.

    What is not beside the folder is on another disk, as the system's temporary folder often is:
    from there nothing can be renamed.
    """

    def __init__(self) -> None:
        self.folder = ""
        self.before: Before = lambda opened: None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder and event == "os.rename" and self._comes_from_another_disk(*args[:2]):
            raise OSError(errno.EXDEV, "Invalid cross-device link", args[0])
        if not self.folder or not self._writes(event, args):
            return
        folder, self.folder = self.folder, ""  # what `before` does is not looked at
        try:
            self.before(_emptied(args) if event == "open" else "")
        finally:
            self.folder = folder

    def _writes(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            _, mode, flags = args
            written = any(c in (mode or "") for c in "wax+") or bool(
                (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
        else:
            written = event in _WRITES
        if not written or not isinstance(args[0], (str, bytes, os.PathLike)):
            return False
        return os.fsdecode(args[0]).startswith(self.folder)

    def _comes_from_another_disk(self, source: Any, target: Any) -> bool:
        here = os.fsdecode(target).startswith(self.folder)
        beside = os.path.dirname(self.folder)
        return here and not os.path.abspath(os.fsdecode(source)).startswith(beside)


def _emptied(args: tuple[Any, ...]) -> str:
    path, mode, flags = args
    new = "w" in (mode or "") or (flags or 0) & os.O_TRUNC or not os.path.exists(path)
    return os.fsdecode(path) if new else ""


@functools.cache  # it is for good
def _watch() -> _Watch:
    watch = _Watch()
    sys.addaudithook(watch)
    return watch


@contextmanager
def before_each_write(folder: Path, call: Before) -> Iterator[None]:
    """What torch.save writes is seen where the path is not ASCII: Python opens the file then."""
    watch = _watch()
    watch.folder, watch.before = str(folder), call
    try:
        yield
    finally:
        watch.folder = ""


def slow(folder: Path) -> Any:
    """Every operation takes a twentieth of a second."""
    return before_each_write(folder, lambda _: time.sleep(0.05))


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow: not a byte can be written, so nothing is too small."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
                seen = _times(self.folder)
                shutil.copytree(self.folder, path, symlinks=True)
                if seen == _times(self.folder):
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


def _times(folder: Path) -> dict[Path, Any]:
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}


def load_file(path: Path) -> dict[str, Tensor]:
    """What is in the file; the error by name, if it cannot be read."""
    try:
        return dict(torch.load(path))
    except Exception as error:
        return {f"{type(error).__name__}: it cannot be read": torch.zeros(0)}


def different(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """The names under which there is something else."""
    return [
        name
        for name in {**got, **want}
        if name not in got or name not in want or not same(got[name], want[name])
    ]
