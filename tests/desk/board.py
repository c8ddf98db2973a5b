"""`board`: where every kata stands, and what to do next."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from rich.table import Table
from rich.text import Text

from desk.judge import judge
from desk.kata import next_steps
from desk.screen import Paper, state
from desk.verdict import Job, Verdict
from kit import catalog
from kit.answers.stubs import is_untouched
from kit.catalog import Kata, shown

_AT_A_TIME = 2


def run(limit: float) -> int:
    """Judge every file that somebody has written in, and draw the board."""
    katas = catalog.all_katas()
    verdicts = _judge_all([Job(kata, kata.stub, limit=limit) for kata in katas if _begun(kata)])
    paper = Paper()
    _draw(paper, katas, verdicts)
    paper.line()
    paper.steps(_next(katas, verdicts))
    return 0


def _begun(kata: Kata) -> bool:
    return kata.stub.exists() and not is_untouched(kata.stub)


def _judge_all(jobs: list[Job]) -> dict[str, Verdict]:
    if not jobs:
        return {}
    stop = threading.Event()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        try:
            found = list(pool.map(lambda job: judge(job, stop=stop), jobs))
        except BaseException:
            stop.set()  # Ctrl-C: each run ends its own process
            raise
    return {verdict.job.kata.name: verdict for verdict in found}


def _draw(paper: Paper, katas: list[Kata], verdicts: dict[str, Verdict]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for heading in ("#", "Kata", "State", "Time box", "File"):
        table.add_column(heading, overflow="fold")
    for number, kata in enumerate(katas, 1):
        words, style = _state(kata, verdicts)
        minutes = f"{kata.minutes} min"
        table.add_row(str(number), kata.title, Text(words, style), minutes, shown(kata.stub))
    paper.table(table)


def _state(kata: Kata, verdicts: dict[str, Verdict]) -> tuple[str, str]:
    if not kata.stub.exists():
        return "the file is missing", "red"
    verdict = verdicts.get(kata.name)
    if verdict is None:
        return "not started", ""
    if not verdict.passed:
        return state(verdict), "yellow"
    unchecked = len(verdict.unchecked)
    return "passed" + (f" ({unchecked} not checked)" if unchecked else ""), "green"


def _next(katas: list[Kata], verdicts: dict[str, Verdict]) -> list[tuple[str, str]]:
    """The first kata that is not solved, and its command."""
    for kata in katas:
        verdict = verdicts.get(kata.name)
        if not kata.stub.exists():
            return [("Next", f"nox -s reset -- {kata.name}   (writes a fresh {shown(kata.stub)})")]
        if verdict is None:
            todo = f"open {shown(kata.stub)} and write part 1"
            return [("Next", todo), ("then", f"nox -s kata -- {kata.name}")]
        if not verdict.passed:
            return next_steps(verdict)
    return [("Next", "every kata is solved; to start one afresh: nox -s reset -- NAME --force")]
