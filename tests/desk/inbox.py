"""What a watch hears of, in the order in which it comes: saves, keys, and what a run sees."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from desk.events import Event
from desk.judge import Bench, judge
from desk.terminal import Keys, Terminal
from desk.verdict import Job, Verdict
from kit import forkserver


@dataclass(frozen=True)
class Saved:
    """Something has happened to the file of that name."""

    name: str


@dataclass(frozen=True)
class Key:
    """Somebody has pressed it."""

    letter: str


class Run:
    """One verdict in the making: a thread follows it and puts what it sees into the queue.

    It ends the run `before`, if that is still under way, and else goes on with the processes that
    the other has got ready for it.
    """

    is_shown = False  # whether somebody has read the verdict

    def __init__(
        self, job: Job, inbox: Inbox, terminal: Terminal | None, before: Run | None = None
    ) -> None:
        self.job, self._inbox, self._terminal, self._before = job, inbox, terminal, before
        self._bench: Bench | None = None
        self.started = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._judge, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop it, and wait until nothing of it is left."""
        if bench := self._hand_over():
            bench.clear()

    def _hand_over(self) -> Bench | None:
        self._stop.set()
        self._thread.join()
        return self._bench

    def _judge(self) -> None:
        bench = self._before._hand_over() if self._before else None
        self._before = None
        try:
            seen = judge(self.job, self._put, self._stop, self._terminal, bench)
        except Exception as error:
            seen = Verdict(self.job, trouble=f"{type(error).__name__}: {error}")
        self._put(seen)
        if not self._stop.is_set() and forkserver.is_warm():
            again = dataclasses.replace(self.job, sections=tuple(self.job.asked))
            with contextlib.suppress(OSError, RuntimeError):  # the next verdict says so
                forkserver.preload(self.job.kata.imports)  # somebody reads now
                self._bench = Bench(again, self._terminal)

    def _put(self, what: Event | Verdict) -> None:
        self._inbox.put((self, what))


Message = Saved | Key | tuple[Run, Event | Verdict]
Inbox = queue.SimpleQueue[Message]


def take(inbox: Inbox) -> Message:
    """What has come first; waits for it, and for Ctrl-C.

    A wait does not hear of a Ctrl-C that comes a moment before it, or to another thread. So it ends
    now and then: only a thread that is awake can be interrupted.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=0.5)


@contextlib.contextmanager
def keys(inbox: Inbox) -> Iterator[Keys | None]:
    """Put every key into the inbox, where there is a keyboard."""
    if not (os.isatty(0) and os.isatty(1)):
        yield None
        return
    with Keys(lambda letter: inbox.put(Key(letter))) as keys:
        yield keys


@contextlib.contextmanager
def files(folder: Path, inbox: Inbox) -> Iterator[None]:
    """Tell of every save in the folder: of the folder, since editors put new files in place."""
    import watchfiles  # here, for what is needed by this command alone

    stop = threading.Event()

    def follow() -> None:
        quickly: dict[str, Any] = {"step": 20, "debounce": 200, "rust_timeout": 1000}
        for changes in watchfiles.watch(
            folder, stop_event=stop, recursive=False, raise_interrupt=False, **quickly
        ):
            for name in {Path(path).name for _, path in changes}:
                inbox.put(Saved(name))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2.0)
