"""`hint`: one rung of the hints at a time, so that nobody reads more than they need."""

from __future__ import annotations

import re
from collections.abc import Iterable

from desk import board, report, schema
from desk.asked import Misuse, named, there_are
from desk.paper import Paper
from desk.state import State
from kit.catalog import Kata, shown

_PART = re.compile(r"^## Part (\d+): *(.*)$")
_RUNG = re.compile(r"^### (\d+) +(.*)$")

Hints = dict[int, tuple[str, dict[int, tuple[str, list[str]]]]]


def run(name: str | None, part_text: str | None, rung_text: str, paper: Paper) -> int:
    """Print one rung, and the command for the next; without a part, of the part in hand."""
    kata, part_in_hand = _in_hand(name, State(paper.note))
    hint = show(paper, kata, part_text or str(part_in_hand), rung_text)
    if hint.rung == hint.rungs:
        paper.line(f"This was the last hint of part {hint.part}.")
    paper.steps([(step.label, step.text) for step in hint.next])
    paper.report(hint)
    return 0


def show(paper: Paper, kata: Kata, part_text: str, rung_text: str) -> schema.Hint:
    """Print one rung. Misuse says which parts and rungs there are."""
    try:
        hints = parse(kata.hints.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Misuse(
            f"there are no hints for {kata.name} yet ({shown(kata.hints)} is missing)"
        ) from None
    part = _number(part_text, hints, f"{kata.name} has no part", "part")
    subject, rungs = hints[part]
    rung = _number(rung_text, rungs, f"part {part} of {kata.name} has no rung", "rung")
    heading, lines = rungs[rung]
    paper.line(f"{kata.title}, part {part}: {subject} - hint {rung} of {len(rungs)}", "bold")
    paper.line(heading)
    paper.line()
    # The terminal's width, not the file's.
    paragraphs = [" ".join(text.split()) for text in "\n".join(lines).split("\n\n")]
    for paragraph in paragraphs:
        paper.line(f"  {paragraph}")
        paper.line()
    step = f"nox -s hint -- {kata.name} {part} {rung + 1}"
    if rung + 1 not in rungs:
        step = f"nox -s kata -- {kata.name}"
    return schema.Hint(
        command="hint",
        ok=True,
        kata=report.kata_name(kata),
        part=part,
        part_title=subject,
        rung=rung,
        rungs=len(rungs),
        title=heading,
        paragraphs=paragraphs,
        next=report.steps([("Next", step)]),
    )


def _in_hand(name: str | None, state: State) -> tuple[Kata, int]:
    """The named kata, or the first that is not solved, and the part to work at."""
    if name is not None:
        found = board.standing(named(name), state)
    else:
        unsolved = board.first_unsolved(board.all_standings(state))
        if unsolved is None:
            raise Misuse("every kata is solved; say which hint: nox -s hint -- NAME [PART] [RUNG]")
        found = unsolved
    return found.kata, found.part


def _number(text: str, known: Iterable[int], refusal: str, what: str) -> int:
    if text.isdecimal() and int(text) in known:
        return int(text)
    raise Misuse(f"{refusal} {text}: {there_are(what, known)}")


def parse(text: str) -> Hints:
    """Parts by number; each with its title and its rungs by number."""
    hints: Hints = {}
    lines: list[str] = []
    for line in text.splitlines():
        if found := _PART.match(line):
            rungs: dict[int, tuple[str, list[str]]] = {}
            hints[int(found.group(1))] = (found.group(2), rungs)
            lines = []
        elif (found := _RUNG.match(line)) and hints:
            lines = []
            rungs[int(found.group(1))] = (found.group(2), lines)
        else:
            lines.append(line)
    for _, rungs in hints.values():
        for _, lines in rungs.values():
            _strip_blank_ends(lines)
    return hints


def _strip_blank_ends(lines: list[str]) -> None:
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
