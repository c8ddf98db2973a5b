"""`timeline`: live bytes through one step of an answer, of the reference and of the plain way."""

from __future__ import annotations

from desk import board, report, schema
from desk.asked import Misuse, locate, named
from desk.one_call import OneCall, carry_out, show_problem
from desk.paper import Paper
from desk.state import State
from kit import catalog
from kit.catalog import ROOT, Kata, shown


def run(name: str | None, answers: str, limit: float, paper: Paper) -> int:
    """Draw one step of the answer; 0 if there is a picture."""
    kata = _kata(name, State(paper.note))
    picture = ROOT / "lab-report" / f"timeline-{kata.name}"
    options = ("-p", "lab.tracer", f"--picture={picture}")
    location = locate(kata, answers)
    job = OneCall(kata, *location, limit=limit, function="timeline", options=options)
    paper.line(f"{kata.title} - one step of {shown(job.path)}", "bold")
    paper.line()
    verdict, outcome = carry_out(paper, job)
    chart = outcome.charts[0] if outcome else None
    place = shown(picture.with_suffix(".png")) if chart else ""
    if chart:
        paper.line(chart.title)
        for label, _, size in chart.rows:
            paper.verbatim(2, f"{label:<10} peak {size}")
        paper.line()
        paper.line(f"Picture: {place} (and .svg)")
    else:
        show_problem(paper, verdict, "picture", "more seconds by --timeout")
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


def _kata(name: str | None, state: State) -> Kata:
    """The one of that name, or the one in hand."""
    if name is None:
        found = board.in_hand(board.all_standings(state))
        kata = found.kata if found else catalog.all_katas()[0]
    else:
        kata = named(name)
    if not kata.has_timeline:
        names = ", ".join(kata.name for kata in catalog.all_katas() if kata.has_timeline)
        raise Misuse(f"{kata.name} has no picture of a step; those that have one: {names}")
    return kata
