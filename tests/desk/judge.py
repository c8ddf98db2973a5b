"""Judges one answer in processes of its own and follows what happens there.

The desk never imports an answer, so nothing that an answer does can end the desk or pass for a
verdict: a run counts only if the judging processes say that they came to their end.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from desk import events, source
from desk.events import Broken, Collected, Debugging, Event, Finished, Outcome, Spec
from desk.judging_process import JudgingProcess
from desk.terminal import Terminal, own_terminal
from desk.verdict import Job, Verdict
from kit import forkserver

_POLL = 0.02


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
    forkserver.preload(source.imports(job.kata.solution))  # once, and not in each fork
    with tempfile.TemporaryDirectory(prefix="judge-", dir=forkserver.start()) as folder:
        run = _Run(job, tell)
        try:
            run.start(Path(folder), terminal)
            return run.follow(stop)
        finally:
            run.kill()


class _Run:
    """The judging processes of one verdict: what they find is told in the order of the specs.

    Each takes the next spec that nobody has claimed, so the first failure is that of one process
    alone, and is told once every spec before it has passed.
    """

    def __init__(self, job: Job, tell: Callable[[Event], None]) -> None:
        self._job, self._tell = job, tell
        self._processes: list[JudgingProcess] = []
        self._specs: list[Spec] = []
        self._ended: dict[str, tuple[Outcome, JudgingProcess]] = {}
        self._told = 0
        self._decided: JudgingProcess | None = None  # nothing after its failure is told

    def start(self, folder: Path, terminal: Terminal | None) -> None:
        """Fork the processes: a second one where it has a core for itself."""
        for name in ("first", "second", "claims"):
            (folder / name).mkdir()
        claims, job = folder / "claims", self._job
        first = JudgingProcess(job, folder / "first", claims, terminal)
        self._processes.append(first)
        if _may_share(job):
            first.helper = JudgingProcess(job, folder / "second", claims, helps=True)
            self._processes.append(first.helper)

    def follow(self, stop: threading.Event) -> str:
        """Pass events on until all is known; what went wrong with the judge, or nothing."""
        at_work = list(self._processes)
        while at_work and not stop.is_set():
            for process in at_work:
                for event in process.look():
                    self._take(event, process)
                if process.trouble and not self._decided:
                    return process.trouble
            at_work = [process for process in at_work if not process.is_over]
            if self._decided and self._decided.is_over:
                break
            connection.wait([end for process in at_work for end in process.ends], _POLL)
        if stop.is_set():
            return ""
        needed = [self._decided] if self._decided else self._processes
        if all(process.has_finished for process in needed):
            self._tell(Finished())
        if not self._decided and not self._told:
            return f"no spec could be run\n{self._processes[0].last_words()}"
        return ""

    def kill(self) -> None:
        """End the processes and everything that they have started."""
        for process in self._processes:
            process.kill()

    def _take(self, event: Event, process: JudgingProcess) -> None:
        if self._decided:
            return
        if isinstance(event, Broken):
            self._decided = process
            self._tell(event)
        elif isinstance(event, Collected) and not self._specs:
            self._specs = event.specs
            self._tell(event)
        elif isinstance(event, Debugging):
            self._tell(event)
        elif isinstance(event, Outcome):
            again = event.id in {spec.id for spec in self._specs[: self._told]}
            self._ended[event.id] = event, process
            if again:  # it has passed, and then something of it could not be cleared away
                self._pass_on(event.id)
            self._pass_on_in_order()

    def _pass_on_in_order(self) -> None:
        while not self._decided and self._told < len(self._specs):
            id = self._specs[self._told].id
            if id not in self._ended:
                return
            self._told += 1
            self._pass_on(id)

    def _pass_on(self, id: str) -> None:
        outcome, process = self._ended[id]
        self._tell(outcome)
        if outcome.result in (events.FAILED, events.TODO) and not self._job.run_all:
            self._decided = process


def _may_share(job: Job) -> bool:
    """Whether a second process helps: not where it would have to import torch for itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return job.may_share and cores > 1 and forkserver.is_warm()
