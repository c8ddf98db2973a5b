"""Walk-throughs name mistakes that there are, and tables of bars are read and compared."""

from __future__ import annotations

import re

import pytest

from kit.answers.catalogue import catalogue as entries
from kit.answers.figures import Reading, bars_of, is_tested_torch, misfits
from kit.catalog import Kata, all_katas
from selftest.tiny import WALK_THROUGH, house

KATAS = pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)


def named_in(text: str) -> set[str]:
    """Mistakes in italics: in paragraphs that list them, and in their columns."""
    lists = re.findall(r"^Mistakes: (.*?)(?=\n\n|\Z)", text, re.M | re.S)
    columns = [row.cells.get("mistake", "") for row in bars_of(text)]
    words = re.sub(r"\([^()]*\)", "", " ".join([*lists, *columns]))  # remarks name other things
    return {" ".join(name.split()) for name in re.findall(r"\*([^*]+)\*", words)}


def headings(kata: Kata) -> set[str]:
    """The headings of all mistakes that a spec catches."""
    return {entry.heading for entry in entries(kata)[0]}


@KATAS
def test_mistakes_that_a_walk_through_names_are_in_the_catalogue(kata):
    named = named_in(kata.solution.with_suffix(".md").read_text(encoding="utf-8"))
    assert named
    assert sorted(named - headings(kata)) == []


TEXT = """\
## Part 2: x

Mistakes: *one two* and `three`, *the caller's
six* (not *a b*).

| bar | case | reference | limit | mistake |
|---|---|---|---|---|
| peak | bf16 | 1,024 | 2,048 | 3 *eight* |

After *ten*.
"""


def test_names_and_figures_are_read_off_a_walk_through():
    assert named_in(TEXT) == {"one two", "the caller's six", "eight"}
    (row,) = rows = bars_of(TEXT)
    assert (row.part, row.cells["bar"], row.cells["limit"]) == (2, "peak", "2,048")
    bar = {"title": "peak", "plain": None, "yours": 1024, "limit": 2048}
    right, other = Reading(2, "bf16", bar), Reading(2, "bf16", {**bar, "limit": 2561})
    near = Reading(2, "bf16", {**bar, "limit": 2560})  # as far as a block of the allocator
    assert [*misfits(rows, [right, other])] == [*misfits(rows, [near])] == []
    assert [*misfits(rows, [other])] == ["part 2, peak: limit is 2,561, not 2,048"]
    assert "has no bar 'peak', case 'bf16'" in next(misfits(rows, [Reading(2, "fp16", bar)]))
    assert [*misfits(rows, [right, Reading(3, "", bar)])] == ["part 3 has bars and no table"]


@pytest.mark.timeout(120)
@pytest.mark.skipif(not is_tested_torch(), reason="another torch may need other bytes")
def test_a_proof_fails_where_a_figure_is_another():
    house().add_kata("figures")
    house().write("solutions/figures.md", WALK_THROUGH.replace("2,000", "1,487"))
    proof = ("tests/specs/figures", "--answers=solutions,mistakes", "-q", "-rN")
    code, out = house().pytest(*proof, "-n1", "--dist=loadfile")  # they come from another process
    assert code == 1
    assert "\nFAILED figures.md: part 1, peak: reference is 2,000, not 1,487\n" in out
    assert " failed" not in out
    code, out = house().pytest(*proof, "-k", "few_bytes or start")
    assert code == 0
    assert "figures.md" not in out
