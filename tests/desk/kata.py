"""`kata`: judge one answer and show why it is right or wrong."""

from __future__ import annotations

import dataclasses
import difflib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from desk import events
from desk.events import Event
from desk.judge import judge
from desk.screen import Paper, Screen, title
from desk.verdict import Job, Verdict
from kit import catalog
from kit.answers.stubs import is_untouched
from kit.catalog import Kata, kata_of, shown

NO_CUDA = "There is no CUDA GPU that torch can use here, so nothing was judged"


class Misuse(ValueError):
    """What was typed cannot be done; the message says what can."""


def run(name: str | None, answers: str, device: str, run_all: bool, limit: float) -> int:
    """Judge the named kata, or the next unsolved one; 0 only if all that could run has passed."""
    paper = Paper()
    jobs = [
        Job(kata, *locate(kata, answers), device, run_all, limit) for kata in _katas(name, answers)
    ]
    for job in jobs:
        paper.line(title(job), "bold")
        if device == "cuda" and (reason := why_no_cuda()):
            paper.line(reason)
            return 1
        if name is None and not is_untouched(job.path):
            passed = judge_folded(paper, job)
        else:
            paper.line()
            passed = judge_open(paper, job)
        if not passed or name is not None:
            return 0 if passed else 1
        paper.line()
    paper.line("Every kata is solved.", "bold green")
    return 0


def judge_open(paper: Paper, job: Job) -> bool:
    """Judge and show each spec as it ends."""
    screen = Screen(paper, job)
    verdict = judge(job, screen.show)
    screen.close(verdict, next_steps(verdict))
    return verdict.passed


def judge_folded(paper: Paper, job: Job) -> bool:
    """Judge, and show the specs only if something is wrong."""
    seen: list[Event] = []
    verdict = judge(job, seen.append)
    if verdict.passed:
        Screen(paper, job).close(verdict)
        return True
    screen = Screen(paper, job)
    paper.line()
    for event in seen:
        screen.show(event)
    screen.close(verdict, next_steps(verdict))
    return False


def next_steps(verdict: Verdict) -> list[tuple[str, str]]:
    """What to do now, with the commands."""
    job = verdict.job
    whose = job.answers if job.answers in _PATHS else shown(job.path)
    again = f"nox -s kata -- {job.kata.name}"
    again += "" if whose == "katas" else f" --answers {whose}"
    again += "" if job.device == "cpu" else f" --device {job.device}"
    if verdict.passed:
        return [("Next", "nox -s kata   (the next unsolved kata)")] if whose == "katas" else []
    if verdict.broken:
        return [("Next", f"mend {verdict.broken.problem.at}"), ("then", again)]
    if verdict.trouble or verdict.first_bad is None:
        return [("Next", again)]
    spec, outcome = verdict.first_bad
    at = outcome.problem.at if outcome.problem else shown(job.path)
    todo = (
        f"write {spec.subject or 'it'} in {at}" if outcome.result == events.TODO else f"mend {at}"
    )
    hint = f"nox -s hint -- {job.kata.name} {spec.part}"
    return [("Next", todo), ("then", again), ("a hint", hint)]


def why_no_cuda() -> str:
    """One sentence if torch sees no CUDA device, else nothing; asked in a process of its own."""
    program = "import torch; print(torch.version.cuda or ''); exit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    if done.stderr.strip():
        return f"{NO_CUDA}: {done.stderr.strip().splitlines()[-1]}"
    if not done.stdout.strip():
        return (
            f"{NO_CUDA}: the torch of {sys.executable} is built for the CPU "
            "(`nox --no-venv` runs on the interpreter of nox itself)."
        )
    return f"{NO_CUDA}."


def named(name: str) -> Kata:
    """The kata of that name, or Misuse with the nearest one."""
    try:
        return catalog.find_kata(name)
    except ValueError as error:
        raise Misuse(str(error)) from None


def _katas(name: str | None, answers: str) -> list[Kata]:
    if name is not None:
        return [named(name)]
    katas = catalog.all_katas()
    if answers in _PATHS:
        return katas
    # A file says by its name which kata it answers.
    mine = [kata for kata in katas if kata.name == Path(answers).stem]
    if not mine:
        raise Misuse(f"say which kata {answers} answers: nox -s kata -- NAME --answers {answers}")
    return mine


_PATHS: dict[str, Callable[[Kata], Path]] = {
    "katas": lambda kata: kata.stub,
    "solutions": lambda kata: kata.solution,
}


def locate(kata: Kata, answers: str) -> tuple[Path, str]:
    """The file to judge and how the judging process is told of it."""
    if answers in _PATHS:
        return _PATHS[answers](kata), answers
    path = Path(answers).resolve()
    if path.is_file() and "," not in str(path):
        if (other := kata_of(path) or kata) != kata:
            raise Misuse(f"{answers} is an answer to {other.name}, not to {kata.name}")
        return path, str(path)
    raise Misuse(f"no answers {answers!r} ({_why_not(path)}): give katas, solutions or a file")


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    if path.is_file():
        return "its path has a comma in it"
    beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*_PATHS, *beside], n=1)
    return f"did you mean {near[0]}?" if near else "there is no such file"


def reference_job(job: Job) -> Job:
    """The same with the reference answer."""
    return dataclasses.replace(job, path=job.kata.solution, answers="solutions")
