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

from desk import events, source, state
from desk.events import Broken, Collected, Debugging, Event, Finished, Outcome, Spec, Started
from desk.judging_process import JudgingProcess
from desk.terminal import Terminal, own_terminal
from desk.verdict import Job, Verdict
from kit import forkserver

_POLL = 0.02
_SLOW = 2.0  # seconds after which it is said what runs


def judge(
    job: Job,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
    terminal: Terminal | None = None,
    bench: Bench | None = None,
) -> Verdict:
    """Judge one answer; `on_event` sees each event as it comes, `stop` ends the run early.

    `terminal` is lent to a breakpoint() of the answer; unless given, it is that of this process.
    The processes of a `bench` judge if they fit, and it is cleared in any case.
    """
    verdict, start, stop = Verdict(job), time.perf_counter(), stop or threading.Event()

    def tell(event: Event) -> None:
        verdict.take(event)
        on_event(event)

    problem = source.check_file(job.path)
    try:
        if problem:
            tell(Broken(problem))
        else:
            verdict.trouble = _run(job, tell, stop, terminal or own_terminal(), bench)
    finally:
        if bench:
            bench.clear()
    verdict.seconds = time.perf_counter() - start
    return verdict


def _run(
    job: Job,
    tell: Callable[[Event], None],
    stop: threading.Event,
    terminal: Terminal | None,
    bench: Bench | None,
) -> str:
    try:
        if not forkserver.wait_until_warm(stop.is_set):
            return ""
    except RuntimeError as error:
        return str(error)
    forkserver.preload(source.imports(job.kata.solution))  # once, and not in each fork
    if bench and not bench.fits(job):
        bench.clear()
        bench = None
    bench = bench or Bench(job, terminal)
    try:
        return _Run(job, tell, bench.processes).follow(stop)
    finally:
        bench.clear()


class Bench:
    """The judging processes of one verdict, which collect the specs before the answer is there.

    They may sit here while somebody writes: a verdict comes a third of a second sooner.
    """

    def __init__(self, job: Job, terminal: Terminal | None) -> None:
        """Fork the processes: a second one where it has a core for itself."""
        self._about = _about(job)
        # Ranks end a moment after the process that asked for them, and may still write; what is
        # left then goes with the folder of the warm process.
        self._folder = tempfile.TemporaryDirectory(
            prefix="judge-", dir=forkserver.start(), ignore_cleanup_errors=True
        )
        folder = Path(self._folder.name)
        for name in ("first", "second", "claims"):
            (folder / name).mkdir()
        claims = folder / "claims"
        self.processes: list[JudgingProcess] = []
        try:
            first = JudgingProcess(job, folder / "first", claims, terminal)
            self.processes.append(first)
            if _may_share(job):
                first.helper = JudgingProcess(job, folder / "second", claims, helps=True)
                self.processes.append(first.helper)
        except BaseException:
            self.clear()
            raise

    def fits(self, job: Job) -> bool:
        """Whether they have collected what this job is about, as it is now."""
        return _about(job) == self._about and all(process.is_alive for process in self.processes)

    def clear(self) -> None:
        """End the processes and everything that they have started, if it is not done yet."""
        while self.processes:
            self.processes.pop().kill()
        self._folder.cleanup()


def _about(job: Job) -> tuple[object, ...]:
    """What a process must know to collect; somebody may change a spec meanwhile."""
    specs = state.digest_of_specs(job.kata)
    return (job.arguments, job.answers, job.device, job.limit, job.may_share, specs)


class _Run:
    """The judging processes of one verdict: what they find is told in the order of the specs.

    Each takes the next spec that nobody has claimed, so the first failure is that of one process
    alone, and is told once every spec before it has passed.
    """

    def __init__(
        self, job: Job, tell: Callable[[Event], None], processes: list[JudgingProcess]
    ) -> None:
        self._job, self._tell, self._processes = job, tell, processes
        self._specs: list[Spec] = []
        self._ended: dict[str, tuple[Outcome, JudgingProcess]] = {}
        self._told = 0
        self._slow: set[str] = set()
        self._decided: JudgingProcess | None = None  # nothing after its failure is told

    def follow(self, stop: threading.Event) -> str:
        """Have them go, and pass events on; what went wrong with the judge, or nothing."""
        for process in self._processes:
            process.go(self._job)
        at_work = list(self._processes)
        while at_work and not stop.is_set():
            for process in at_work:
                for event in process.look():
                    self._take(event, process)
                self._tell_if_slow(process)
            at_work = [process for process in at_work if not process.is_over]
            if self._decided and self._decided.is_over:
                break
            connection.wait([end for process in at_work for end in process.ends], _POLL)
        if stop.is_set():
            return ""
        needed = [self._decided] if self._decided else self._processes
        if all(process.has_finished for process in needed):
            self._tell(Finished())
        trouble = [process.trouble for process in self._processes if process.trouble]
        if trouble and not self._decided:  # by what the other one has found meanwhile
            return trouble[0]
        if not self._decided and not self._told:
            return f"no spec could be run\n{self._processes[0].last_words()}"
        return ""

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

    def _tell_if_slow(self, process: JudgingProcess) -> None:
        spec, seconds = process.running, time.monotonic() - process.running_since
        if self._decided or process.is_debugging or not spec or spec.id in self._slow:
            return
        if seconds > _SLOW:
            self._slow.add(spec.id)
            self._tell(Started(spec.id))

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
