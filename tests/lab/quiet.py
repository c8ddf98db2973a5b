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

# Several processes are in the room together, or one alone; who waits to be alone comes next.
_door: BinaryIO | None = None
_room: BinaryIO | None = None
_waited = 0.0


def _enter(*, alone: bool) -> None:
    """Wait for the room; whoever is in it already lets others pass before."""
    global _waited
    if _door and _room:
        kind, start = fcntl.LOCK_EX if alone else fcntl.LOCK_SH, time.perf_counter()
        fcntl.flock(_room, fcntl.LOCK_UN)
        fcntl.flock(_door, kind)
        fcntl.flock(_room, kind)
        fcntl.flock(_door, fcntl.LOCK_UN)
        _waited += time.perf_counter() - start


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def side_by_side(folder: Path) -> Iterator[None]:
    """Share the processor with others that have named the same folder, until the block ends."""
    global _door, _room
    with (folder / "door").open("wb") as _door, (folder / "room").open("wb") as _room:
        _enter(alone=False)
        try:
            yield
        finally:
            _door = _room = None


def make_way() -> None:
    """Let those pass who wait to be alone."""
    _enter(alone=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have the processor alone for what the block times."""
    _enter(alone=True)
    try:
        yield
    finally:
        _enter(alone=False)


def waited() -> float:
    """The seconds that others have made this process wait."""
    return _waited
