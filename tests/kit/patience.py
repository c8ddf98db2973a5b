"""Limits that a busy machine does not shorten: they count work or waiting, not the wall clock."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_INTERVAL = 0.25  # seconds; processor time is known in steps of 10 ms
_LONGEST = 1.0  # of the time between two looks, for a machine that stood still has told nothing
KNOWS_TURNS = Path("/proc/self/schedstat").is_file()  # how often a thread has run
_IDLE = 0.1  # of the time: who is ready for work more often than this does not wait


class Spent(NamedTuple):
    """Seconds of a process and its threads, at work and ready for work; 0 when it is gone.

    Seconds are counted once they are over: `is_ready` says whether one is at work now, or ready for
    it, or waits for a disk, and `turns` how often its main thread has had a processor: who waits
    again and again, each time a moment, has had many.
    """

    worked: float = 0.0
    queued: float = 0.0
    is_ready: bool = False
    turns: int = 0


def spent(pid: int) -> Spent:
    """What a process has spent in all its threads: its work, and its wait for a processor."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return Spent()
    queued, states, turns = 0, set(), 0
    threads: list[str] = []
    with contextlib.suppress(OSError):  # it may end at any moment, and only Linux knows
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may have ended
            folder = Path(f"/proc/{pid}/task/{thread}")
            states.add((folder / "stat").read_text().rpartition(")")[2].split()[0])
            _, waited, count = map(int, (folder / "schedstat").read_text().split())
            queued += waited  # nanoseconds
            turns += count if thread == str(pid) else 0
    # Who looks is always at work.
    is_ready = pid != os.getpid() and bool(states & {"R", "D"})
    return Spent(times.user + times.system, queued / 1e9, is_ready, turns)


def family(pid: int | None = None) -> list[int]:
    """A process, this one unless told otherwise, and everything that it has started."""
    pid = pid or os.getpid()
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


class Patience:
    """What some processes have used up of a limit in seconds.

    As long as one of them works, its processor time counts, that of the busiest; where none does,
    they wait, and the wall clock counts. So a loop that does not end and a wait that does not end
    both come to the limit, and a process that gets a quarter of a processor has four times as long.
    A process that is ready to work and gets no processor at all does not wait: it is starved, and
    so is one whose processor the host of a virtual machine has taken away.

    Args:
        clock: the wall clock.
        spending: what a process has spent.
    """

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        spending: Callable[[int], Spent] = spent,
    ) -> None:
        self.limit, self.used = limit, 0.0
        self._clock, self._spending = clock, spending
        self._last = clock()
        self._before: dict[int, Spent] = {}
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
        passed = self._clock() - self._last
        if passed < _INTERVAL:
            return False
        self._last += passed
        most, all_wait = 0.0, True
        for pid in pids():
            before, now = self._before.get(pid, Spent()), self._spending(pid)
            self._before[pid] = now
            worked, queued = now.worked - before.worked, now.queued - before.queued
            most = max(most, worked)
            waits = worked + queued < _IDLE * passed and not now.is_ready
            sleeps = waits and now.turns == before.turns
            seen = min(passed, _LONGEST)
            self._idle[pid] = self._idle.get(pid, 0.0) + seen if sleeps else 0.0
            all_wait = all_wait and waits
        self.used += passed if all_wait else min(most, passed)
        return True

    def idle_seconds(self, pid: int) -> float:
        """For how long the main thread of this process has not run once, as far as was looked."""
        return self._idle.get(pid, 0.0)
