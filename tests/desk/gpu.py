"""`gpu`: the same specs on a CUDA device, with what only a GPU can show."""

from __future__ import annotations

from pathlib import Path

from desk.judge import judge
from desk.kata import locate, named, next_steps, reference_job, why_no_cuda
from desk.screen import Paper, Screen, summary, title
from desk.verdict import Job, Verdict
from kit import catalog
from kit.answers.stubs import is_untouched


def run(name: str | None, answers: str, limit: float) -> int:
    """Judge each kata on CUDA; where nothing is written yet, the reference answer."""
    paper = Paper()
    own = catalog.kata_of(Path(answers))
    katas = [named(name)] if name else [own] if own else catalog.all_katas()
    jobs = [Job(kata, *locate(kata, answers), device="cuda", limit=limit) for kata in katas]
    if reason := why_no_cuda():
        paper.line(reason)
        return 1
    verdicts = [_judge(paper, job) for job in jobs]
    for verdict in verdicts:
        job = verdict.job
        whose = ", the reference" if job.answers == "solutions" else ""
        paper.line(f"{job.kata.name}{whose}: {summary(verdict)}", hang=4)
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _judge(paper: Paper, job: Job) -> Verdict:
    if job.answers == "katas" and is_untouched(job.path):
        paper.line(f"{job.kata.name}: nothing is written yet, so the reference is judged instead")
        job = reference_job(job)
    paper.line(title(job), "bold")
    paper.line()
    screen = Screen(paper, job)
    verdict = judge(job, screen.show)
    screen.close(verdict, () if verdict.passed else next_steps(verdict))
    paper.line()
    return verdict
