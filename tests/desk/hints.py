"""`hint`: one rung of the hints at a time, so that nobody reads more than they need."""

from __future__ import annotations

import re

from desk.kata import Misuse, named
from desk.screen import Paper
from kit.catalog import shown

_PART = re.compile(r"^## Part (\d+): *(.*)$")
_RUNG = re.compile(r"^### (\d+) +(.*)$")

Hints = dict[int, tuple[str, dict[int, tuple[str, list[str]]]]]


def run(name: str, part: int, rung: int) -> int:
    """Print one rung, and the command for the next."""
    kata = named(name)
    try:
        hints = parse(kata.hints.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Misuse(
            f"there are no hints for {name} yet ({shown(kata.hints)} is missing)"
        ) from None
    if part not in hints:
        raise Misuse(f"{name} has no part {part}: there are parts {_range(hints)}")
    subject, rungs = hints[part]
    if rung not in rungs:
        raise Misuse(f"part {part} of {name} has no rung {rung}: there are rungs {_range(rungs)}")
    heading, lines = rungs[rung]
    paper = Paper()
    paper.line(f"{kata.title}, part {part}: {subject} - hint {rung} of {len(rungs)}", "bold")
    paper.line(heading)
    paper.line()
    for paragraph in "\n".join(lines).split("\n\n"):
        paper.line(f"  {' '.join(paragraph.split())}")  # the terminal's width, not the file's
        paper.line()
    if rung + 1 in rungs:
        paper.steps([("Next", f"nox -s hint -- {name} {part} {rung + 1}")])
    else:
        paper.line(f"This was the last hint of part {part}.")
        paper.steps([("Next", f"nox -s kata -- {name}")])
    return 0


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


def _range(numbers: dict[int, tuple[str, list[str]]] | Hints) -> str:
    return f"{min(numbers)} to {max(numbers)}" if numbers else "(none)"
