"""Trouble with files on a rank: a kill between two operations, and a disk that is full."""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")


# Is called with the path of a file that is about to be opened and empty, else with "".
Before = Callable[[str], object]


class _Watch:
    """Calls `before` at each operation on files under `folder` that changes something."""

    def __init__(self) -> None:
        self.folder = ""
        self.before: Before = lambda opened: None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or not self._writes(event, args):
            return
        folder, self.folder = self.folder, ""  # what `before` does is not looked at
        try:
            self.before(_emptied(args) if event == "open" else "")
        finally:
            self.folder = folder

    def _writes(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode, flags = args
            written = any(c in (mode or "") for c in "wax+") or bool(
                (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
        elif event in _WRITES:
            path, written = args[0], True
        else:
            return False
        if not written or not isinstance(path, (str, bytes, os.PathLike)):
            return False
        return os.fsdecode(path).startswith(self.folder)


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


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may become longer than 200 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
