"""Walk-throughs name mistakes that there are, and their tables of bars have the measured bytes."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from desk.verdict import part_of
from kit.answers.catalogue import catalogue as entries
from kit.catalog import Kata, all_katas
from selftest.test_pictures import is_tested_torch
from selftest.tiny import later, new_folder, repository, result

KATAS = pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)

# In a table of bars these columns are measured; others, and cells without a figure, are free.
_MEASURED = ("plain", "reference", "limit")


@dataclass(frozen=True)
class Row:
    """A row of a table of bars, by heading; `part` is that of the section that it stands in."""

    part: int
    cells: dict[str, str]


def bars_of(text: str) -> list[Row]:
    """The rows of all tables that have the columns "bar" and "reference"."""
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


def names_of(text: str) -> set[str]:
    """Back-quoted names of mistakes: in paragraphs that list them, and in their columns."""
    lists = re.findall(r"^Mistakes by name: (.*?)(?=\n\n|\Z)", text, re.M | re.S)
    columns = [row.cells.get("mistake", "") for row in bars_of(text)]
    words = re.sub(r"\([^()]*\)", "", " ".join([*lists, *columns]))  # remarks name other things
    return set(re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+)+)`", words))


def catalogue(kata: Kata) -> set[str]:
    """The names of all mistakes that a spec catches."""
    return {entry.name for entry in entries(kata)[0]}


def _measure() -> tuple[int, str]:
    """The references' bars, in pytest's own file."""
    file = new_folder() / "saves.xml"
    arguments = ("tests/specs", "-m", "saves", "--answers=solutions", "-q", "-p", "no:randomly")
    code, out = repository().run("pytest", *arguments, f"--junitxml={file}")
    return code, out if code else str(file)


if is_tested_torch():
    later("bars", _measure)

Bar = dict[str, object]


def measured(kata: Kata) -> list[tuple[int, str, Bar]]:
    """The part, the case and the bar of each reading that the specs of a kata take."""
    code, out = result("bars")
    assert code == 0, out
    found = []
    for case in ElementTree.parse(out).iter("testcase"):
        _, _, name, module, *_ = case.get("classname", "").split(".")
        inner = (case.get("name") or "").partition("[")[2].rstrip("]")
        words = "-".join(word for word in inner.split("-") if word != "solutions")
        for entry in case.iter("property"):
            if name == kata.name and entry.get("name") == "bar":
                bar = ast.literal_eval(entry.get("value") or "")
                found.append((part_of(Path(f"{module}.py")), words, bar))
    return found


def misfit(row: Row, found: list[tuple[int, str, Bar]]) -> str:
    """What is not as it was measured, in words; nothing if all is."""
    cells = row.cells
    case = cells.get("case", "")
    bars = [
        bar
        for part, name, bar in found
        if (part, bar["title"]) == (row.part, cells["bar"]) and name == case
    ]
    if not bars:
        return f"part {row.part} has no bar {cells['bar']!r}, case {case!r}"
    misfits = []
    for bar in bars:
        true = {**bar, "reference": bar["yours"]}
        wrong = [
            f"{key} is {true[key]:,}, not {cells[key]}"
            for key in _MEASURED
            if true[key] is not None and cells.get(key) not in (None, "", f"{true[key]:,}")
        ]
        misfits.append(f"part {row.part}, {cells['bar']}: {', '.join(wrong)}" if wrong else "")
    return "" if "" in misfits else misfits[0]


@KATAS
def test_mistakes_that_a_walk_through_names_are_in_the_catalogue(kata):
    named = names_of(kata.solution.with_suffix(".md").read_text(encoding="utf-8"))
    assert named
    assert sorted(named - catalogue(kata)) == []


@KATAS
@pytest.mark.timeout(300)
def test_the_bars_of_a_walk_through_are_those_that_are_measured(kata):
    if not is_tested_torch():
        pytest.skip("another torch may need other bytes")
    rows = bars_of(kata.solution.with_suffix(".md").read_text(encoding="utf-8"))
    found = measured(kata)
    assert {row.part for row in rows} == {part for part, _, _ in found}
    assert [words for row in rows if (words := misfit(row, found))] == []


TEXT = """\
## Part 2: x

Mistakes by name: `one_two` and `three`, `F.four_five`,
`six_seven` (not `a_b`).

| bar | case | reference | limit | mistake |
|---|---|---|---|---|
| peak | bf16 | 1,024 | 2,048 | 3 `eight_nine` |

After `ten_eleven`.
"""


def test_names_and_figures_are_read_off_a_walk_through():
    assert names_of(TEXT) == {"one_two", "six_seven", "eight_nine"}
    (row,) = bars_of(TEXT)
    assert (row.part, row.cells["bar"], row.cells["limit"]) == (2, "peak", "2,048")
    bar: Bar = {"title": "peak", "plain": None, "yours": 1024, "limit": 2048}
    assert misfit(row, [(2, "bf16", bar)]) == ""
    assert "limit is 2,049, not 2,048" in misfit(row, [(2, "bf16", {**bar, "limit": 2049})])
    assert "has no bar 'peak'" in misfit(row, [(1, "bf16", bar), (2, "fp16", bar)])
