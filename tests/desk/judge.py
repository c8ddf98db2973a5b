"""Judges one answer in a process of its own and follows what happens there.

The desk never imports an answer, so nothing that an answer does can end the desk or pass for a
verdict: a run counts only if the judging process says that it came to its end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from desk import events, source
from desk.events import Broken, Collected, Event, Finished, Outcome, Problem, Spec, Started
from desk.source import Place
from desk.verdict import Job, Verdict
from kit import catalog
from kit.patience import Patience, family

_POLL = 0.02
# Until the first spec is known: torch may come from a cold disk.
_START_LIMIT = 180.0


def judge(
    job: Job,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
) -> Verdict:
    """Judge one answer; `on_event` sees each event as it comes, `stop` ends the run early."""
    verdict, start = Verdict(job), time.perf_counter()

    def tell(event: Event) -> None:
        verdict.take(event)
        on_event(event)

    problem = source.check_file(job.path)
    if problem:
        tell(Broken(problem))
    else:
        with tempfile.TemporaryDirectory(prefix="memory-katas-") as folder:
            run = _Run(job, Path(folder))
            try:
                verdict.trouble = run.follow(tell, stop or threading.Event())
            finally:
                run.kill()
    verdict.seconds = time.perf_counter() - start
    return verdict


class _Run:
    """The judging process, and what it leaves in its folder."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self._events, self._err = folder / "events", folder / "stderr"
        self._events.touch()
        self._read = 0
        self._running: Spec | None = None
        self._specs: dict[str, Spec] = {}
        self._finished = False
        self._judged_something = False
        with self._err.open("wb") as err:
            self._child = subprocess.Popen(
                _command(job, folder),
                cwd=catalog.ROOT,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,  # Ctrl-C comes to the desk, which then ends the whole group
            )

    def follow(self, tell: Callable[[Event], None], stop: threading.Event) -> str:
        """Pass events on until the process is gone; what went wrong with the judge, or nothing."""
        patience = Patience(self._patience())
        while not stop.is_set():
            gone = self._child.poll() is not None  # before reading, so that nothing is missed
            fresh = self._fresh_events()
            for event in fresh:
                self._note(event)
                tell(event)
            if self._finished or (gone and not fresh):
                break  # a finished process takes its time to leave, or a thread of it never ends
            if fresh:
                patience = Patience(self._patience())
                continue
            patience.look(lambda: family(self._child.pid))
            if patience.is_over:
                return self._give_up(tell)
            time.sleep(_POLL)
        if stop.is_set():
            return ""
        if not self._finished:
            return self._died(tell)
        if not self._judged_something:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self.job.grace)  # it says why after it has finished
            return f"no spec could be run\n{self._last_words()}"
        return ""

    def kill(self) -> None:
        """End the process and everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _patience(self) -> float:
        return self.job.limit + self.job.grace if self._specs else _START_LIMIT

    def _fresh_events(self) -> list[Event]:
        with self._events.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [events.decode(line) for line in whole.decode("utf-8").splitlines()]

    def _note(self, event: Event) -> None:
        if isinstance(event, Collected):
            self._specs = {spec.id: spec for spec in event.specs}
        elif isinstance(event, Started):
            self._running = self._specs.get(event.id)
        elif isinstance(event, Outcome):
            self._running = None
        elif isinstance(event, Broken | Finished):
            self._running, self._finished = None, True
        self._judged_something |= isinstance(event, Broken | Outcome)

    def _give_up(self, tell: Callable[[Event], None]) -> str:
        """The time is up, and the judging process could not end the spec by itself."""
        if self._running is None:
            return f"no sign of life from the judging process\n{self._last_words()}"
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
        code = self._child.returncode
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code}, {signal.Signals(-code).name}"
        if self._running is None:
            return f"the judging process ended before its time ({how})\n{self._last_words()}"
        cause = "os._exit(), a crash in native code, or the system's answer to memory running out"
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
        dump = re.findall(
            rf'File "{re.escape(str(path))}", line (\d+) in (\S+)', source.read(self._err)
        )
        if not dump:
            return source.find(path, spec.subject)
        line, function = dump[0]
        return Place(path, int(line), "" if function == "<module>" else function)

    def _last_words(self) -> str:
        return "\n".join(source.read(self._err).strip().splitlines()[-12:])


def _command(job: Job, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", *job.arguments),
        *("-p", "desk.recorder", "-p", "pytest_timeout"),
        *(f"--timeout={job.limit}", "--timeout-method=signal"),
        *("-o", f"faulthandler_timeout={job.limit + job.grace / 2}"),
        *("-q", "--tb=short", f"--basetemp={folder / 'tmp'}", f"--rootdir={catalog.ROOT}"),
        *(f"--answers={job.answers}", f"--device={job.device}"),
        *([] if job.run_all else ["-x"]),
    ]


def _environment(folder: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    paths = [str(catalog.ROOT / "tests"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Only the plugins that judging needs, whatever else is installed beside them.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    env["MEMORY_KATAS_EVENTS"] = str(folder / "events")
    env["TMPDIR"] = str(folder)  # so that a process which is killed leaves nothing behind
    return env
