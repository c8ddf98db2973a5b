"""Whether the figures of a walk-through are those that a proof has measured: a plugin of pytest.

A table with the columns "bar" and "reference" stands in the section of its part. A row is a bar of
the reference by its title, and by the case where the spec has several; the cells under "plain",
"reference" and "limit" are bytes, or empty. Other columns are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kit.catalog import ROOT, all_katas

_MEASURED = ("plain", "reference", "limit")
_BLOCK = 512  # bytes: on a rank that has worked before, a small tensor more or less is there
_TESTED = re.search(r'"torch==(.+?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def is_tested_torch() -> bool:
    """Whether it is the torch of figures and pictures; others need other bytes."""
    return _TESTED is not None and metadata.version("torch").partition("+")[0] == _TESTED[1]


@dataclass(frozen=True)
class Row:
    """A row of a table of bars, by heading; `part` is that of the section that it stands in."""

    part: int
    cells: dict[str, str]


@dataclass(frozen=True)
class Reading:
    """A bar that the reference was held to, as the session keeps it: title and bytes."""

    part: int
    case: str
    bar: dict[str, Any]


def bars_of(text: str) -> list[Row]:
    """The rows of all tables of bars."""
    rows, part, headings = [], 0, list[str]()
    for line in text.splitlines():
        if found := re.match(r"## (?:Part (\d+))?", line):
            part = int(found[1] or 0)
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
        elif {"bar", "reference"} <= {*headings} and not line.startswith("|--"):
            rows.append(Row(part, dict(zip(headings, cells, strict=True))))
    return rows


def misfits(rows: list[Row], found: list[Reading]) -> Iterator[str]:
    """What is not as it was measured, in words."""
    for part in sorted({reading.part for reading in found} - {row.part for row in rows}):
        yield f"part {part} has bars and no table"
    for row in rows:
        bar, case = row.cells["bar"], row.cells.get("case", "")
        mine = [r for r in found if (r.part, r.bar["title"], r.case) == (row.part, bar, case)]
        wrong = [_wrong(row.cells, reading.bar) for reading in mine]
        if not mine:
            yield f"part {row.part} has no bar {bar!r}, case {case!r}"
        elif all(wrong):
            yield f"part {row.part}, {bar}: {wrong[0]}"


def _wrong(cells: dict[str, str], bar: dict[str, Any]) -> str:
    true = bar | {"reference": bar["yours"]}
    return ", ".join(
        f"{key} is {true[key]:,}, not {cells[key]}"
        for key in _MEASURED
        if true[key] is not None and cells.get(key) and _is_other(cells[key], true[key])
    )


def _is_other(cell: str, true: int) -> bool:
    digits = cell.replace(",", "")
    return not digits.isdecimal() or abs(int(digits) - true) > _BLOCK


class Figures:
    """Hears of the reference's bars in a whole proof, and fails it where a figure is another."""

    def __init__(self) -> None:
        self._found: dict[str, list[Reading]] = {}
        self._complaints: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what the reference has taken; processes of a run may share the work."""
        path, _, name = report.nodeid.partition("::")
        cases = name.partition("[")[2].rstrip("]").split("-")
        number = re.match(r"test_part(\d+)", Path(path).name)
        if report.when == "call" and "solutions" in cases and number:
            case = "-".join(word for word in cases if word != "solutions")
            bars = [bar for key, bar in report.user_properties if key == "bar"]
            readings = [Reading(int(number[1]), case, bar) for bar in bars if isinstance(bar, dict)]
            self._found.setdefault(Path(path).parent.name, []).extend(readings)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare, where nothing was left out."""
        option = session.config.option
        is_whole = {"solutions", "mistakes"} <= {*option.answers.split(",")} and not (
            option.keyword or option.markexpr or option.seed_shift or option.device != "cpu"
        )
        folders = [Path(argument) for argument in session.config.args]
        is_done = session.exitstatus == pytest.ExitCode.OK and not option.collectonly
        if not is_whole or not is_tested_torch() or not is_done:
            return
        for kata in all_katas():
            if any(folder.resolve() in (kata.specs, *kata.specs.parents) for folder in folders):
                walk_through = kata.solution.with_suffix(".md")
                rows = bars_of(walk_through.read_text(encoding="utf-8"))
                found = misfits(rows, self._found.get(kata.name, []))
                self._complaints += [f"{walk_through.name}: {words}" for words in found]
        if self._complaints:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each figure that is wrong."""
        for line in self._complaints:
            terminalreporter.write_line(f"FAILED {line}", red=True)
