"""Judges one answer in a process of its own and follows what happens there.

The desk never imports an answer, so nothing that an answer does can end the desk or pass for a
verdict: a run counts only if the judging process says that it came to its end.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from desk import events, judging, source
from desk.events import (
    Broken,
    Collected,
    Debugging,
    Event,
    Finished,
    Outcome,
    Problem,
    Spec,
    Started,
)
from desk.source import Place
from desk.terminal import Terminal, own_terminal
from desk.verdict import Job, Verdict
from kit import catalog, forkserver
from kit.patience import Patience, family

_POLL = 0.02
# Until the first spec is known: torch may come from a cold disk.
_START_LIMIT = 180.0


def judge(
    job: Job,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
    terminal: Terminal | None = None,
) -> Verdict:
    """Judge one answer; `on_event` sees each event as it comes, `stop` ends the run early.

    `terminal` is lent to a breakpoint() of the answer; unless given, it is that of this process.
    """
    verdict, start, stop = Verdict(job), time.perf_counter(), stop or threading.Event()

    def tell(event: Event) -> None:
        verdict.take(event)
        on_event(event)

    problem = source.check_file(job.path)
    if problem:
        tell(Broken(problem))
    else:
        verdict.trouble = _run(job, tell, stop, terminal or own_terminal())
    verdict.seconds = time.perf_counter() - start
    return verdict


def _run(
    job: Job, tell: Callable[[Event], None], stop: threading.Event, terminal: Terminal | None
) -> str:
    try:
        if not forkserver.wait_until_warm(stop.is_set):
            return ""
    except RuntimeError as error:
        return str(error)
    with tempfile.TemporaryDirectory(prefix="judge-", dir=forkserver.start()) as folder:
        run = _Run(job, Path(folder), terminal)
        try:
            return run.follow(tell, stop)
        finally:
            run.kill()


class _Run:
    """The judging process, and what it leaves in its folder."""

    def __init__(self, job: Job, folder: Path, terminal: Terminal | None) -> None:
        self.job = job
        self._folder, self._terminal = folder, terminal
        self._running: Spec | None = None
        self._specs: dict[str, Spec] = {}
        self._finished = self._judged_something = self._debugging = self._is_bomb = False
        self._pipe, there = forkserver.pipe()
        self._is_open = True
        name = terminal.name if terminal else ""
        self._child = forkserver.fork(
            *(judging.run, _arguments(job, folder), str(folder), there, name),
            log=folder / "log",
            has_forks=True,
        )
        there.close()

    def follow(self, tell: Callable[[Event], None], stop: threading.Event) -> str:
        """Pass events on until the process is gone; what went wrong with the judge, or nothing."""
        patience = Patience(self._patience())
        while not stop.is_set():
            gone = self._child.exitcode is not None  # before reading, so that nothing is missed
            fresh = self._fresh_events()
            for event in fresh:
                tell(event)
                self._note(event)
            if self._finished or (gone and not fresh):
                break  # a finished process takes its time to leave, or a thread of it never ends
            if fresh or self._debugging:
                patience = Patience(self._patience())
            patience.look(self._family)
            if patience.is_over:
                return self._give_up(tell)
            open_ends = [self._pipe] if self._is_open else []
            connection.wait([*open_ends, self._child.sentinel], _POLL)
        if stop.is_set():
            return ""
        if not self._finished:
            return self._died(tell)
        if not self._judged_something:
            self._child.join(self.job.grace)  # it says why after it has finished
            return f"no spec could be run\n{self._last_words()}"
        return ""

    def kill(self) -> None:
        """End the process and everything that it has started."""
        forkserver.end(self._child)
        self._pipe.close()
        if self._debugging and self._terminal:
            self._terminal.take_back()

    def _family(self) -> list[int]:
        found = family(forkserver.pid())  # the ranks of the answer too
        if len(found) > forkserver.MOST_FORKS:
            self._is_bomb = True
            forkserver.ask_stacks(self._child, self._folder / judging.STACKS)
            forkserver.end(self._child)
        return found

    def _patience(self) -> float:
        return self.job.limit + self.job.grace if self._specs else _START_LIMIT

    def _fresh_events(self) -> list[Event]:
        found: list[Event] = []
        try:
            while self._is_open and self._pipe.poll():
                found.append(events.decode(self._pipe.recv_bytes().decode()))
        except (EOFError, OSError):
            self._is_open = False
        return found

    def _note(self, event: Event) -> None:
        if isinstance(event, Collected):
            self._specs = {spec.id: spec for spec in event.specs}
        elif isinstance(event, Started):
            self._running = self._specs.get(event.id)
        elif isinstance(event, Outcome):
            self._running = None
        elif isinstance(event, Broken | Finished):
            self._running, self._finished = None, True
        elif isinstance(event, Debugging) and self._terminal:
            self._debugging = event.active
            if event.active:
                self._terminal.hand_over(self._child.pid or 0)
            else:
                self._terminal.take_back()
        self._judged_something |= isinstance(event, Broken | Outcome)

    def _give_up(self, tell: Callable[[Event], None]) -> str:
        """The time is up, and the judging process could not end the spec by itself."""
        if self._running is None:
            return f"no sign of life from the judging process\n{self._last_words()}"
        forkserver.ask_stacks(self._child, self._folder / judging.STACKS)
        problem = Problem(
            "time-out",
            f"time-out: still running after {self.job.limit:g} s, and it cannot be interrupted",
            f"an answer within {self.job.limit:g} s",
            "a loop that does not end, in a try that swallows every exception or in native code",
            **self._place(self._running).fields(),
        )
        tell(Outcome(self._running.id, events.FAILED, self.job.limit, problem))
        return ""

    def _died(self, tell: Callable[[Event], None]) -> str:
        how = forkserver.ending(forkserver.end(self._child))
        if self._running is None:
            return f"the judging process ended before its time ({how})\n{self._last_words()}"
        cause = "os._exit(), a crash in native code, or the system's answer to memory running out"
        if self._is_bomb or forkserver.stack_of_last_fork(self._folder / "log"):
            how = f"more than {forkserver.MOST_FORKS} processes, which were all ended"
            cause = "os.fork(), multiprocessing or subprocess in a loop that does not end"
        problem = Problem(
            "process ended",
            f"the process ended during this spec ({how})",
            "a call that returns or raises",
            cause,
            **self._place(self._running).fields(),
        )
        tell(Outcome(self._running.id, events.FAILED, 0.0, problem))
        return ""

    def _place(self, spec: Spec) -> Place:
        """The innermost line of the answer in the last dump of the stacks, or its definition."""
        path = self.job.path
        log = self._folder / "log"
        texts = [forkserver.read(self._folder / judging.STACKS), forkserver.stack_of_last_fork(log)]
        text = "".join([*texts, forkserver.read(log)])
        dump = re.findall(rf'File "{re.escape(str(path))}", line (\d+) in (\S+)', text)
        if not dump:
            return source.find(path, spec.function)
        line, function = dump[0]
        return Place(path, int(line), "" if function == "<module>" else function)

    def _last_words(self) -> str:
        return "\n".join(forkserver.read(self._folder / "log").strip().splitlines()[-12:])


def _arguments(job: Job, folder: Path) -> list[str]:
    return [
        *(*job.arguments, "-p", "pytest_timeout"),
        *(f"--timeout={job.limit}", "--timeout-method=signal"),
        *("-q", "--tb=short", f"--basetemp={folder / 'tmp'}", f"--rootdir={catalog.ROOT}"),
        *(f"--answers={job.answers}", f"--device={job.device}"),
        *([] if job.run_all else ["-x"]),
    ]
