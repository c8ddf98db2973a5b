"""`gpu`: the same specs on a CUDA device, with what only a GPU can show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from desk import report
from desk.asked import locate, named, reference_job
from desk.judge import judge
from desk.paper import Paper
from desk.screen import Screen
from desk.steps import next_steps
from desk.verdict import Job, Verdict
from desk.words import summary, title
from kit import catalog
from kit.answers.stubs import is_untouched

NO_CUDA = "There is no CUDA GPU that torch can use here, so nothing was judged"


def run(name: str | None, answers: str, limit: float, paper: Paper) -> int:
    """Judge each kata on CUDA; where nothing is written yet, the reference answer."""
    own = catalog.kata_of(Path(answers))
    katas = [named(name)] if name else [own] if own else catalog.all_katas()
    jobs = [Job(kata, *locate(kata, answers), device="cuda", limit=limit) for kata in katas]
    if reason := why_no_cuda():
        paper.note(reason)
        paper.report(report.judged("gpu", [], ok=False))
        return 1
    verdicts = [_judge(paper, job) for job in jobs]
    for verdict in verdicts:
        job = verdict.job
        whose = ", the reference" if job.answers == "solutions" else ""
        paper.line(f"{job.kata.name}{whose}: {summary(verdict)}", hang=4)
    ok = all(verdict.passed for verdict in verdicts)
    reports = [report.verdict(verdict, _steps(verdict)) for verdict in verdicts]
    paper.report(report.judged("gpu", reports, ok))
    return 0 if ok else 1


def _judge(paper: Paper, job: Job) -> Verdict:
    if job.answers == "katas" and is_untouched(job.path):
        paper.note(f"{job.kata.name}: nothing is written yet, so the reference is judged instead")
        job = reference_job(job)
    paper.line(title(job), "bold")
    paper.line()
    screen = Screen(paper, job)
    verdict = judge(job, screen.show)
    screen.close(verdict)
    paper.steps(_steps(verdict))
    paper.line()
    return verdict


def _steps(verdict: Verdict) -> list[tuple[str, str]]:
    return [] if verdict.passed else next_steps(verdict)


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
