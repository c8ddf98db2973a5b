"""`timeline`: live bytes through one step of an answer, of the reference and of the plain way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from desk import events, report, schema
from desk.asked import Misuse, locate, named
from desk.judge import judge
from desk.paper import Paper
from desk.screen import Screen
from desk.verdict import Job, Verdict
from kit import catalog
from kit.catalog import ROOT, Kata, shown


@dataclass(frozen=True)
class TimelineJob(Job):
    """What to draw, and where to."""

    picture: Path = Path()

    @property
    def arguments(self) -> list[str]:
        """What pytest is told to run."""
        what = [f"{self.kata.specs / 'timeline.py'}::timeline", "-o", "python_functions=timeline"]
        return [*what, "-p", "lab.tracer", f"--picture={self.picture}"]

    @property
    def may_share(self) -> bool:
        """There is one thing to run."""
        return False


def run(name: str | None, answers: str, limit: float, paper: Paper) -> int:
    """Draw one step of the answer; 0 if there is a picture."""
    kata = _kata(name)
    picture = ROOT / "lab-report" / f"timeline-{kata.name}"
    job = TimelineJob(kata, *locate(kata, answers), limit=limit, picture=picture)
    paper.line(f"{kata.title} ({kata.name}) - one step of {shown(job.path)}", "bold")
    paper.line()
    verdict = judge(job)
    outcome = next(iter(verdict.outcomes.values()), None)
    if outcome and outcome.result == events.SKIPPED:
        raise Misuse(outcome.reason.removeprefix("Skipped: "))
    chart = outcome.charts[0] if verdict.passed and outcome else None
    place = shown(picture.with_suffix(".png")) if chart else ""
    if chart:
        paper.line(chart.title)
        for label, _, size in chart.rows:
            paper.verbatim(2, f"{label:<10} peak {size}")
        paper.line()
        paper.line(f"Picture: {place} (and .svg)")
    else:
        _show_problem(paper, verdict)
    problem = verdict.bad.problem if verdict.bad else None
    document = schema.Timeline(
        command="timeline",
        ok=chart is not None,
        kata=report.kata_name(kata),
        answer=shown(job.path),
        picture=place,
        peaks={label: size for label, size, _ in chart.rows} if chart else {},
        problem=report.problem(problem) if problem else None,
        trouble=verdict.trouble,
    )
    paper.report(document)
    return 0 if chart else 1


def _show_problem(paper: Paper, verdict: Verdict) -> None:
    screen, bad = Screen(paper, verdict.job), verdict.bad
    if bad and bad.problem:
        paper.line(f"There is no picture: {bad.problem.kind}", "bold red")
        paper.line()
        screen.problem(bad.problem, bad.prints)
        paper.line()
        paper.steps([("Next", f"nox -s kata -- {verdict.job.kata.name}")])
    else:
        screen.trouble(verdict)


def _kata(name: str | None) -> Kata:
    names = ", ".join(kata.name for kata in catalog.all_katas() if kata.has_timeline)
    if name is None:
        raise Misuse(f"say which kata: nox -s timeline -- NAME; there are {names}")
    kata = named(name)
    if not kata.has_timeline:
        raise Misuse(f"{kata.name} has no picture of a step; those that have one: {names}")
    return kata
