"""`timeline`: live bytes through one step of an answer, of the reference and of the plain way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from desk import report, schema
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
    bad = verdict.broken or (verdict.first_bad and verdict.first_bad[1])
    problem = bad.problem if bad else None
    charts = [chart for outcome in verdict.outcomes.values() for chart in outcome.charts]
    drawn = verdict.passed and bool(charts)
    screen = Screen(paper, job)
    if drawn:
        paper.line(charts[0].title)
        for label, _, size in charts[0].rows:
            paper.verbatim(2, f"{label:<10} peak {size}")
        paper.line()
        paper.line(f"Picture: {shown(picture.with_suffix('.png'))} (and .svg)")
    elif bad and problem:
        paper.line(f"There is no picture: {problem.kind}", "bold red")
        paper.line()
        screen.problem(problem, bad.prints)
        paper.line()
        paper.steps([("Next", f"nox -s kata -- {kata.name}")])
    else:
        screen.trouble(verdict)
    paper.report(_report(verdict, picture if drawn else None))
    return 0 if drawn else 1


def _report(verdict: Verdict, picture: Path | None) -> schema.Timeline:
    bad = verdict.broken or (verdict.first_bad and verdict.first_bad[1])
    charts = [chart for outcome in verdict.outcomes.values() for chart in outcome.charts]
    return schema.Timeline(
        command="timeline",
        ok=picture is not None,
        kata=report.kata_name(verdict.job.kata),
        answer=shown(verdict.job.path),
        picture=shown(picture.with_suffix(".png")) if picture else "",
        peaks={label: size for label, size, _ in charts[0].rows} if picture else {},
        problem=report.problem(bad.problem) if bad and bad.problem else None,
        trouble=verdict.trouble,
    )


def _kata(name: str | None) -> Kata:
    names = ", ".join(kata.name for kata in catalog.all_katas() if kata.has_timeline)
    if name is None:
        raise Misuse(f"say which kata: nox -s timeline -- NAME; there are {names}")
    kata = named(name)
    if not kata.has_timeline:
        raise Misuse(f"{kata.name} has no picture of a step; those that have one: {names}")
    return kata
