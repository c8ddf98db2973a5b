"""Experiments side by side share the processor; whoever times something has it alone.

Bytes and losses come out the same beside other work, seconds do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class _Room:
    """Several processes are in it together, or one alone; who waits to be alone comes next."""

    def __init__(self, door: BinaryIO, room: BinaryIO) -> None:
        self._door, self._room = door, room
        self.waited = 0.0

    def enter(self, *, alone: bool) -> None:
        """Wait for it; whoever is in it already lets others pass before."""
        kind, start = fcntl.LOCK_EX if alone else fcntl.LOCK_SH, time.perf_counter()
        fcntl.flock(self._room, fcntl.LOCK_UN)
        fcntl.flock(self._door, kind)
        fcntl.flock(self._room, kind)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        self.waited += time.perf_counter() - start


_room: _Room | None = None


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def side_by_side(folder: Path) -> Iterator[None]:
    """Share the processor with others that have named the same folder, until the block ends."""
    global _room
    with (folder / "door").open("wb") as door, (folder / "room").open("wb") as room:
        _room = _Room(door, room)
        _room.enter(alone=False)
        try:
            yield
        finally:
            _room = None


def make_way() -> None:
    """Let those pass who wait to be alone."""
    if _room:
        _room.enter(alone=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have the processor alone for what the block times."""
    if not _room:
        yield
        return
    _room.enter(alone=True)
    try:
        yield
    finally:
        _room.enter(alone=False)


def waited() -> float:
    """The seconds that others have made this process wait."""
    return _room.waited if _room else 0.0
