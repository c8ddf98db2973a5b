"""Limits that a busy machine does not shorten: they count work or waiting, not the wall clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import psutil

_INTERVAL = 0.5  # processor time is known in steps of 10 ms
_IDLE = 0.1


class Patience:
    """What some processes have used up of a limit in seconds.

    As long as one of them works, its processor time counts, that of the busiest; where none does,
    they wait, and the wall clock counts. So a loop that does not end and a wait that does not end
    both come to the limit, and a process that gets a quarter of a processor has four times as long.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.used = limit, 0.0
        self._last = time.monotonic()
        self._worked: dict[int, float] = {}
        self._idle: dict[int, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether the limit is used up."""
        return self.used >= self.limit

    def shorten(self, seconds: float) -> None:
        """Leave no more than these seconds."""
        self.limit = min(self.limit, self.used + seconds)

    def look(self, pids: Callable[[], Iterable[int]]) -> bool:
        """Note what these processes have done since the last look; False if that is too short."""
        passed = time.monotonic() - self._last
        if passed < _INTERVAL:
            return False
        self._last += passed
        most = 0.0
        for pid in pids():
            before, now = self._worked.get(pid, 0.0), processor_time(pid)
            self._worked[pid] = now
            most = max(most, now - before)
            is_idle = now - before < _IDLE * passed
            self._idle[pid] = self._idle.get(pid, 0.0) + passed if is_idle else 0.0
        self.used += min(most, passed) if most >= _IDLE * passed else passed
        return True

    def idle_seconds(self, pid: int) -> float:
        """For how long this process has not worked, as far as was looked."""
        return self._idle.get(pid, 0.0)


def processor_time(pid: int) -> float:
    """Seconds of work of a process, in all its threads; 0 when it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def family(pid: int | None = None) -> list[int]:
    """A process, this one unless told otherwise, and everything that it has started."""
    pid = pid or os.getpid()
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]
