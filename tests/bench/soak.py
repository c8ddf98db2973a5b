"""Run the proof again and again: other seeds, other orders, other processors.

    python -m bench.soak [--jobs N] [--only WORD] [--also FILE ...]

The whole proof once for each instruction set that oneDNN and torch can be held to, each second one
with CI set, as where a server runs it: pytest prints more then. Then seeds 1 to 20, each in an
order of its own, on these instruction sets in turn: the references and other right answers under
all of them, mistakes under the first five. What has passed with this very code is kept in
.katas/soak and is not run again, so an interrupted soak goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from kit.catalog import ROOT

STATE = ROOT / ".katas" / "soak"
SEEDS, SEEDS_OF_MISTAKES = 20, 5
# What a processor has less of; on another make than x86 these change nothing.
PROCESSORS = {
    "as it is": {},
    "oneDNN SSE41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
}


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    name: str
    arguments: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return STATE / f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}.log"


@dataclass(frozen=True)
class Result:
    """How a run ended: what pytest counted, and the tests that failed."""

    name: str
    code: str
    passed: bool
    seconds: float
    summary: str
    failed: list[str]


def runs(also: list[str]) -> list[Run]:
    """Everything there is to run; `also` are files of further answers that must pass."""
    right = ",".join(["solutions", "right", *also])
    found = []
    for order, (processor, variables) in enumerate(PROCESSORS.items(), 101):
        proof = ["tests/specs", "tests/selftest", f"--answers={right},stubs,mistakes"]
        more = {"CI": "true"} if order % 2 else {}  # pytest prints more where CI is set
        orders = [*proof, f"--randomly-seed={order}"]
        found.append(Run(f"proof, {processor}", orders, variables | more))
    for seed in range(1, SEEDS + 1):
        processor = list(PROCESSORS)[seed % len(PROCESSORS)]
        mistakes, words = (",mistakes", ", mistakes too") if seed <= SEEDS_OF_MISTAKES else ("", "")
        options = [f"--answers={right}{mistakes}", f"--seed-shift={seed}"]
        found.append(
            Run(
                f"seed {seed}, {processor}{words}",
                ["tests/specs", *options, f"--randomly-seed={seed}"],
                PROCESSORS[processor],
            )
        )
    return found


def fingerprint(also: list[str]) -> str:
    """Of everything that a result depends on: what is in the repository, `also`, and torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("tests", "solutions"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".toml"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    for path in (ROOT / "pyproject.toml", *map(Path, also)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Soak:
    """Runs on several cores, and what is known of them."""

    def __init__(self, todo: list[Run], code: str) -> None:
        self.todo, self.code = todo, code
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def go(self, run: Run) -> Result:
        """Run pytest, its output in the run's log."""
        start = time.monotonic()
        with run.log.open("wb") as log, self._lock:
            child = subprocess.Popen(
                _command(run.arguments),
                cwd=ROOT,
                env={**os.environ, **run.variables, "PYTHONPATH": str(ROOT / "tests")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C comes to us, who then end the whole group
            )
            self._running.add(child)
        code = child.wait()
        with self._lock:
            self._running.discard(child)
        text = run.log.read_text(encoding="utf-8", errors="replace")
        counts = [
            line for line in text.splitlines() if re.search(r"\d (passed|failed).* in ", line)
        ]
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
        seconds = round(time.monotonic() - start, 1)
        return Result(
            run.name, self.code, code == 0, seconds, (counts or ["no result"])[-1], failed
        )

    def stop(self) -> None:
        """End whatever runs."""
        with self._lock:
            for child in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "--device=cpu", "-q", *arguments]


def known(code: str) -> dict[str, Result]:
    """What has passed with this code; a line that was cut off says nothing."""
    results = {}
    path = STATE / "results.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):
            result = Result(**json.loads(line))
            if result.code == code and result.passed:
                results[result.name] = result
    return results


def report(result: Result, log: Path, console: Console) -> None:
    """Keep a result, and say it in a line; of a run that failed, also which tests."""
    with (STATE / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(vars(result)) + "\n")
    word = "passed" if result.passed else "FAILED"
    console.print(f"{word}         {result.name}: {result.summary}")
    for test in result.failed[:10]:
        console.print(f"               {test}")
    if not result.passed:
        console.print(f"               all of it: {log.relative_to(ROOT)}")


def main(arguments: list[str]) -> int:
    """Run what has not passed yet, a line for each; 1 if something fails."""
    parser = argparse.ArgumentParser(prog="nox -s soak --", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--only", default="", help="runs whose name holds this word")
    parser.add_argument("--also", nargs="*", default=[], help="files of further right answers")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    if missing := [name for name in options.also if not Path(name).is_file()]:
        parser.error(f"--also: there is no file {missing[0]}")
    every = [run for run in runs(options.also) if options.only in run.name]
    if not every:
        parser.error(f"--only: no run has {options.only!r} in its name")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    STATE.mkdir(parents=True, exist_ok=True)
    code = fingerprint(options.also)
    done = known(code)
    for result in (done[run.name] for run in every if run.name in done):
        console.print(f"passed before  {result.name}: {result.summary}")
    soak = Soak([run for run in every if run.name not in done], code)
    red, start = 0, time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(soak.go, run): run for run in soak.todo}
        try:
            for future in as_completed(waiting):
                report(future.result(), waiting[future].log, console)
                red += not future.result().passed
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            soak.stop()
            console.print("interrupted; `nox -s soak` goes on with what has not passed yet")
            return 130
    console.print(
        f"{len(soak.todo) - red} of {len(soak.todo)} runs passed in "
        f"{(time.monotonic() - start) / 60:.0f} minutes, {len(every) - len(soak.todo)} before"
    )
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
