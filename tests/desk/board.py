"""`board`: where every kata stands, and what to do next; from what is known, nothing is judged."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from desk import report, schema
from desk.paper import Paper
from desk.state import State
from desk.steps import ALL_SOLVED
from kit import catalog
from kit.answers.stubs import is_untouched
from kit.catalog import Kata, shown

Steps = list[tuple[str, str]]


@dataclass(frozen=True)
class Standing:
    """Where one kata stands; `part` is the one to work at, `steps` are empty once it is solved.

    `spec` is the name of the one that failed last.
    """

    kata: Kata
    code: schema.State
    words: str
    style: str = ""
    part: int = 1
    spec: str = ""
    core_passed: bool = False
    steps: Steps | tuple[()] = ()


def run(paper: Paper) -> int:
    """Draw the board."""
    notes: list[str] = []
    standings = all_standings(State(notes.append))
    todo = in_hand(standings)
    _draw(paper, standings, todo)
    paper.line()
    for note in notes:
        paper.note(note)
    if todo is None:
        paper.line("Every kata is solved.", "bold green")
    steps = todo.steps if todo else [("Next", ALL_SOLVED)]
    paper.steps(steps)
    rows = [_row(found) for found in standings]
    paper.report(schema.Board(command="board", ok=True, katas=rows, next=report.steps(steps)))
    return 0


def all_standings(state: State) -> list[Standing]:
    """Of every kata, in teaching order."""
    return [standing(kata, state) for kata in catalog.all_katas()]


def in_hand(standings: list[Standing]) -> Standing | None:
    """The kata to work at: of those begun and not solved the one saved last, else the first."""
    unsolved = [found for found in standings if found.steps]
    begun = [found for found in unsolved if found.code not in ("missing", "not_started")]
    latest = max(begun, key=lambda found: found.kata.stub.stat().st_mtime_ns, default=None)
    return latest or next(iter(unsolved), None)


def standing(kata: Kata, state: State) -> Standing:
    """Where the candidate's file stands, by the newest verdict and by what has changed since."""
    judge = f"nox -s kata -- {kata.name}"
    if not kata.stub.exists():
        step = f"nox -s reset -- {kata.name}   (writes a fresh {shown(kata.stub)})"
        return Standing(kata, "missing", "the file is missing", "red", steps=[("Next", step)])
    if is_untouched(kata.stub):
        steps = [("Next", f"open {shown(kata.stub)} and write part 1"), ("then", judge)]
        text = f"not started ({kata.minutes} min)"
        return Standing(kata, "not_started", text, steps=steps)
    again: Steps = [("Next", judge)]
    record = state.read(kata)
    if record is None:
        return Standing(kata, "not_judged", "begun, not judged yet", "yellow", steps=again)
    changed, part = record.changed(state.fingerprint(kata)), record.part
    if changed == "answer":
        words = f"changed since (was: {record.words.partition(' (')[0]})"
        return Standing(kata, "changed", words, "yellow", part, record.spec, steps=again)
    if changed:
        words = f"to be judged again ({changed} changed)"
        return Standing(kata, "outdated", words, "yellow", part, record.spec, steps=again)
    core = record.core_passed(kata)
    if record.passed:
        return Standing(kata, record.code, record.words, "green", part, core_passed=core)
    steps = record.steps or again
    return Standing(kata, record.code, record.words, "yellow", part, record.spec, core, steps)


def _row(found: Standing) -> schema.Row:
    state = schema.Standing(found.code, found.words)
    answer = shown(found.kata.stub)
    return schema.Row(report.kata_name(found.kata), answer, state, found.part, found.core_passed)


def _draw(paper: Paper, standings: list[Standing], todo: Standing | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("  #", "Kata", "State", "File in katas/"):
        table.add_column(heading, overflow="fold")
    for number, found in enumerate(standings, 1):
        words = Text(found.words, found.style)
        mark = ">" if found is todo else " "
        table.add_row(f"{mark} {number}", found.kata.title, words, found.kata.stub.name)
    paper.table(table)
