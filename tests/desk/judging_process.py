"""One judging process as the desk sees it: what it tells, where it is, how it has ended."""

from __future__ import annotations

import contextlib
import os
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
from desk.terminal import Terminal
from desk.verdict import Job
from kit import catalog, forkserver
from kit.patience import Patience, family

# Until the first spec is known: torch may come from a cold disk.
_START_LIMIT = 180.0


class JudgingProcess:
    """A process that judges what no other has claimed, and what it leaves in its folder.

    It collects the specs, and waits until it is told to `go`. `claims` is the folder where all of
    them take specs. The first of them has a `terminal` and the real ranks of the answer; another
    one `helps` it, and is its `helper`.
    """

    helper: JudgingProcess | None = None

    def __init__(
        self,
        job: Job,
        folder: Path,
        claims: Path,
        terminal: Terminal | None = None,
        *,
        helps: bool = False,
    ) -> None:
        self.has_finished = self.is_over = False
        self.trouble = ""  # what went wrong with the judge
        self._job, self._folder, self._terminal, self._helps = job, folder, terminal, helps
        self.running: Spec | None = None
        self.running_since = 0.0
        self._specs: dict[str, Spec] = {}
        self.is_debugging = self._is_bomb = False
        self._pipe, there = forkserver.pipe()
        self._is_open = True
        name = terminal.name if terminal else ""
        arguments = [*_arguments(job, folder, claims), *(["--helps"] if helps else [])]
        self._child = forkserver.fork(
            *(judging.run, arguments, str(folder), there, name),
            log=folder / "log",
            has_forks=True,
        )
        there.close()
        self._patience = Patience(self._limit())

    def go(self, job: Job) -> None:
        """Judge: the same file with the same limit, and what this job asks for."""
        self._job = job
        self._patience = Patience(self._limit())
        with contextlib.suppress(OSError):  # it is gone, which is seen when it is looked at
            self._pipe.send(job.order)

    @property
    def is_alive(self) -> bool:
        """Whether it can still go."""
        return self._child.exitcode is None

    @property
    def ends(self) -> list[Any]:
        """What to wait for: it tells something, or is gone."""
        open_ends: list[Connection] = [self._pipe] if self._is_open else []
        return [*open_ends, self._child.sentinel]

    def look(self) -> list[Event]:
        """What it has told since; `is_over` once that was all, with its `trouble` if any."""
        gone = self._child.exitcode is not None  # before reading, so that nothing is missed
        fresh = self._fresh_events()
        for event in fresh:
            self._note(event)
        if self.has_finished or (gone and not fresh):
            self.is_over = True  # finished, it takes its time to leave, or a thread never ends
            return fresh if self.has_finished else self._died()
        if fresh or self.is_debugging:
            self._patience = Patience(self._limit())
        self._patience.look(self._family)
        if self._patience.is_over:
            self.is_over = True
            return [*fresh, *self._give_up()]
        return fresh

    def last_words(self) -> str:
        """The end of what it has written; it says why nothing ran after it has finished."""
        if self.has_finished:
            self._child.join(self._job.grace)
        return "\n".join(forkserver.read(self._folder / "log").strip().splitlines()[-12:])

    def kill(self) -> None:
        """End the process and everything that it has started."""
        forkserver.end(self._child)
        self._pipe.close()
        if self.is_debugging and self._terminal:
            self._terminal.take_back()

    def _family(self) -> list[int]:
        """It and what it has started; the ranks of the answer are forks of the server too."""
        if self._helps:
            found = family(self._child.pid)
        else:
            found = self._without_helper(family(forkserver.pid()))
        if len(found) > forkserver.MOST_FORKS:
            self._is_bomb = True
            forkserver.ask_stacks(self._child, self._folder / judging.STACKS)
            forkserver.end(self._child)
        return found

    def _without_helper(self, found: list[int]) -> list[int]:
        """Leave out the helper and its own: a bomb there doubles between two looks."""
        if not self.helper:
            return found
        group, others = self.helper._child.pid, {*self.helper._family()}
        return [pid for pid in found if pid not in others and _group(pid) not in (group, None)]

    def _limit(self) -> float:
        return self._job.limit + self._job.grace if self._specs else _START_LIMIT

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
            self.running = self._specs.get(event.id)
            self.running_since = time.monotonic()
        elif isinstance(event, Outcome):
            self.running = None
        elif isinstance(event, Broken | Finished):
            self.running, self.has_finished = None, True
        elif isinstance(event, Debugging) and self._terminal:
            self.is_debugging = event.active
            if event.active:
                self._terminal.hand_over(self._child.pid or 0)
            else:
                self._terminal.take_back()

    def _give_up(self) -> list[Event]:
        """The time is up, and the judging process could not end the spec by itself."""
        if self.running is None:
            self.trouble = f"no sign of life from the judging process\n{self.last_words()}"
            return []
        forkserver.ask_stacks(self._child, self._folder / judging.STACKS)
        limit = self._job.limit
        problem = Problem(
            "time-out",
            f"time-out: still running after {limit:g} s, and it cannot be interrupted",
            f"an answer within {limit:g} s",
            "a loop that does not end, in a try that swallows every exception or in native code",
            **self._place(self.running).fields(),
        )
        return [Outcome(self.running.id, events.FAILED, limit, problem)]

    def _died(self) -> list[Event]:
        how = forkserver.ending(forkserver.end(self._child))
        if self.running is None:
            words = self.last_words()
            self.trouble = f"the judging process ended before its time ({how})\n{words}"
            return []
        cause = "os._exit(), a crash in native code, or the system's answer to memory running out"
        if self._is_bomb or forkserver.stack_of_last_fork(self._folder / "log"):
            how = f"more than {forkserver.MOST_FORKS} processes, which were all ended"
            cause = "os.fork(), multiprocessing or subprocess in a loop that does not end"
        problem = Problem(
            "process ended",
            f"the process ended during this spec ({how})",
            "a call that returns or raises",
            cause,
            **self._place(self.running).fields(),
        )
        return [Outcome(self.running.id, events.FAILED, 0.0, problem)]

    def _place(self, spec: Spec) -> Place:
        """The innermost line of the answer in the last dump of the stacks, or its definition."""
        path = self._job.path
        log = self._folder / "log"
        texts = [forkserver.read(self._folder / judging.STACKS), forkserver.stack_of_last_fork(log)]
        text = "".join([*texts, forkserver.read(log)])
        dump = re.findall(rf'File "{re.escape(str(path))}", line (\d+) in (\S+)', text)
        if not dump:
            return source.find(path, spec.function)
        line, function = dump[0]
        return Place(path, int(line), "" if function == "<module>" else function)


def _group(pid: int) -> int | None:
    """The process group of a process; None if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _arguments(job: Job, folder: Path, claims: Path) -> list[str]:
    return [
        *(*job.arguments, "-p", "pytest_timeout", f"--claims={claims}"),
        *(f"--timeout={job.limit}", "--timeout-method=signal"),
        *("-q", "--tb=short", f"--basetemp={folder / 'tmp'}", f"--rootdir={catalog.ROOT}"),
        *(f"--answers={job.answers}", f"--device={job.device}"),
    ]
