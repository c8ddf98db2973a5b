"""The kernel's count of this process's memory: what no ruler of tensors sees, such as `bytes`."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_PROCESS = Path("/proc/self")
_M_MMAP_THRESHOLD = -3  # of malloc.h


class Resident:
    """`growth`: bytes by which the process has grown at its most; None where Linux is not there."""

    growth: int | None = None


@contextlib.contextmanager
def resident() -> Iterator[Resident]:
    """Count from here to the end of the block; pages of a file that is mapped count too."""
    found, before = Resident(), _begin()
    yield found
    if before is not None:
        found.growth = 1024 * (_kib("VmHWM") - before)


def _begin() -> int | None:
    """KiB at the start, from which the peak is counted anew; None where nobody counts them."""
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)  # what is free already goes back, and is not filled unseen
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)  # what is large grows in place, and is not copied
        (_PROCESS / "clear_refs").write_text("5")
        return _kib("VmRSS")
    except (OSError, AttributeError, StopIteration):
        return None


def _kib(name: str) -> int:
    status = (_PROCESS / "status").read_text(encoding="ascii")
    return next(int(number) for number in re.findall(rf"^{name}:\s+(\d+) kB", status, re.M))
