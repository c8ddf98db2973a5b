"""The catalogue of mistakes: its form, its laws, and what becomes of entries that are wrong."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kit.answers.catalogue import Entry, catalogue, read, together
from kit.catalog import Kata, all_katas
from selftest.test_clauses import clauses_of
from selftest.tiny import (
    MISTAKES,
    SOLUTION,
    SPECS_1,
    THREE,
    TOTAL,
    VARIANTS,
    entry,
    house,
)

KATAS = pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)
Read = Callable[[str], list[Entry]]


@pytest.fixture
def page(tmp_path: Path) -> Read:
    """Reads a page of this text."""
    path = tmp_path / "page.md"

    def entries(text: str) -> list[Entry]:
        path.write_text(text, encoding="utf-8")
        return read(path)

    return entries


def _diff(*lines: str) -> str:
    """An entry `it` with these lines for a diff; they begin in line 8."""
    return "\n".join(
        ["### it", "", "Why.", "", "Caught by `test_x`: y", "", "```diff", *lines, "```"]
    )


def test_an_entry_says_what_is_believed_and_what_catches_it(page: Read) -> None:
    text = entry("it", "return 1.0", "`test_x[a]`, where it raises TypeError: `*words`")
    text = text.replace("it.\n\n", "it.\nIn two lines.\n\nDiffers: in this.\n\nShows in: mean\n\n")
    text = text.replace("### it", "### the caller's 16-bit sum")
    (it,) = page("# Mistakes\n\nWords.\n\n## Part 1: mean\n\nMore words.\n" + text)
    assert (it.heading, it.name) == ("the caller's 16-bit sum", "the_callers_16_bit_sum")
    assert it.belief == "Believed of it. In two lines."
    assert (it.caught_by, it.raises, it.says) == ("test_x[a]", TypeError, "*words")
    assert (it.differs, it.shows_in) == ("in this.", "mean")
    assert it.source(SOLUTION) == SOLUTION.replace(TOTAL, "return 1.0")


def test_hunks_are_looked_for_in_their_functions(page: Read) -> None:
    """A new method follows a line, and an empty line of context may have lost its space."""
    limits = "        return Pair(0, self.count)"
    (it,) = page(
        _diff(
            *("@@ Counter.limits @@", f" {limits}", "+", "+    def zero(self) -> int:"),
            *("+        return 0", "@@ Counter.add @@", "-        self.count += self.step"),
            *("@@ module @@", " import math", " from typing import NamedTuple", "", "+import os"),
        )
    )
    text = SOLUTION.replace(limits, f"{limits}\n\n    def zero(self) -> int:\n        return 0")
    text = text.replace("        self.count += self.step\n", "")
    assert it.source(SOLUTION) == text.replace("NamedTuple\n\n", "NamedTuple\n\nimport os\n", 1)


STALE = {
    r"page\.md:8: it: the reference has no Counter\.sub": ["@@ Counter.sub @@", "-x"],
    r"page\.md:8: it: .* stands 0 times in mean .* begins with 'return math": [
        *("@@ mean @@", f"-    {TOTAL}")
    ],
    r"page\.md:8: it: .* stands 3 times in Counter ": ["@@ Counter @@", "", "+    x = 1"],
    r"page\.md:8: it: this hunk in module and another overlap": [
        *("@@ module @@", " def _total(values: list[float], start: float) -> float:"),
        *(f"-    {TOTAL}", "@@ _total @@", f"-    {TOTAL}", "+    return 1.0"),
    ],
}


@pytest.mark.parametrize("problem", STALE)
def test_an_edit_that_does_not_apply_is_an_error_with_file_and_line(page: Read, problem: str):
    (it,) = page(_diff(*STALE[problem]))
    with pytest.raises(ValueError, match=problem):
        it.source(SOLUTION)


def test_variants_that_edit_different_lines_are_one_answer(page: Read) -> None:
    """Also in one function; two that edit the same line are two."""
    total = ("_total", f"    {TOTAL}")
    places = {"one": total, "two": total, "three": ("mean", "    if not values:"), "four": total}
    text = "## Accepted variants\n"
    for name, (scope, line) in places.items():
        text += f"### {name}\n\nWhy.\n\n```diff\n@@ {scope} @@\n-{line}\n+{line}  # {name}\n```\n"
    found = [it.name for it in together(page(text), SOLUTION)]
    assert found == ["one+three", "two", "four"]


GOOD = _diff("@@ mean @@", "-a")
BAD = {
    "page.md:1: '16 bits' stands here twice, or does not begin": "### 16 bits",
    "page.md:11: 'It!' stands here twice": f"{GOOD}\n{GOOD.replace('it', 'It!')}",
    "page.md:1: it lacks a sentence or a diff": "### it\n\nWhy.",
    "page.md:11: it goes on after its diff": f"{GOOD}\nMore.",
    "page.md:1: it: all but variants say what": GOOD.replace("Caught", "Seen"),
    "page.md:2: it: all but variants say": f"## Accepted variants\n{GOOD}",
    "page.md:5: wanted: Caught by `test_name": GOOD.replace("`: y", "`, where it raises Foo: y"),
    "page.md:8: wanted: @@ function @@": _diff("-a"),
    "page.md:9: wanted: @@ function @@": _diff("@@ mean @@", "a"),
    "page.md:8: a hunk needs an old line": _diff("@@ mean @@", "+a"),
    "page.md:8: a hunk needs an old line, and changes": _diff("@@ mean @@", " a"),
    "page.md:7: this block has no end": GOOD.removesuffix("```"),
}


@pytest.mark.parametrize("problem", BAD)
def test_what_is_not_in_the_form_is_an_error_with_file_and_line(page: Read, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        page(BAD[problem])


@KATAS
def test_entries_with_the_same_spec_and_words_say_what_differs(kata: Kata) -> None:
    first: dict[tuple[str, str], Entry] = {}
    alike = []
    for mistake in catalogue(kata)[0]:
        other = first.setdefault((mistake.caught_by, mistake.says), mistake)
        if other is not mistake and not mistake.differs:
            alike.append(f"{mistake.name} is as {other.name}")
    assert alike == [], "drop one, or let the second have a line that begins with Differs:"


@KATAS
def test_a_verdict_names_the_function_of_the_mistake(kata: Kata) -> None:
    reference, clauses = kata.solution.read_text(encoding="utf-8"), clauses_of(kata.specs)
    elsewhere = []
    for mistake in catalogue(kata)[0]:
        function, _ = clauses.get(mistake.spec, ("", ""))
        if function and mistake.shows_in != function:
            text = mistake.source(reference) + END
            if all(part in text for part in _reached(function, reference)):
                elsewhere.append(f"{mistake.name}: {function}, but it is not changed in it")
    assert elsewhere == []


END = "\0"


@cache
def _definitions(source: str) -> dict[str, tuple[ast.stmt, str]]:
    """The functions and classes of a module, and what it assigns, with the text up to the next."""
    found, lines = {}, [*source.splitlines(keepends=True), END]
    body = ast.parse(source).body
    starts = [min(p.lineno for p in [n, *getattr(n, "decorator_list", [])]) - 1 for n in body]
    for node, start, end in zip(body, starts, [*starts[1:], len(lines)], strict=True):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for name in (getattr(node, "name", None), *(getattr(to, "id", None) for to in targets)):
            if name:
                found[name] = node, "".join(lines[start:end])
    return found


@cache
def _reached(function: str, source: str) -> list[str]:
    """The text of its definition, or its class, and of the private ones that this leans on."""
    known, found, todo = _definitions(source), set[str](), {function.partition(".")[0]}
    while todo:
        found.add(name := todo.pop())
        used = {node.id for node in ast.walk(known[name][0]) if isinstance(node, ast.Name)}
        todo |= {name for name in used & set(known) if name.startswith("_")} - found
    return [known[name][1] for name in sorted(found)]


def test_a_function_leads_to_private_definitions() -> None:
    helper, own = _reached("mean", SOLUTION)
    assert helper.startswith("def _total(")
    assert own.startswith("def mean(")
    (own,) = _reached("Counter.add", SOLUTION)
    assert own.endswith("return Pair(0, self.count)\n\0")


def test_a_new_kata_is_some_files_and_one_row_and_the_proof_holds_for_it():
    """Nine specs for four answers (a variant too), two mistakes, and one spec that needs a GPU."""
    answers = "--answers=solutions,right,stubs,mistakes"
    code, out = house().pytest("tests/specs/tiny_mean", answers, "-q")
    assert "38 passed, 4 skipped" in out
    assert code == 0


@pytest.mark.timeout(300)
def test_the_proof_reports_mistakes_that_are_not_caught_and_variants_that_are():
    house().add_kata("caught")
    crash = "return 1 / 0"
    entries = [
        entry("harmless", "return math.fsum([*values, start])", f"{THREE}: the mean"),
        entry("other_reason", "return 1.0", f"{THREE}: never said"),
        entry("no_python", "return 1.0 +", f"{THREE}: the mean"),
        entry("no_module", f"{TOTAL}\n+import no_such_module", f"{THREE}: the mean"),
        entry("crashes", crash, f"{THREE}: the mean"),
        entry("honest_crash", crash, f"{THREE}, where it raises ZeroDivisionError: by zero"),
        entry("no_case", crash, f"{THREE}: the mean".replace("three", "four")),
        VARIANTS,
        entry("no_variant", crash),
    ]
    house().write("tests/mistakes/caught.md", MISTAKES + "".join(entries))
    proof = ("tests/specs/caught", "--answers=right,mistakes", "-q", "-rA", "-p", "no:randomly")
    code, out = house().pytest(*proof)
    assert code == 1
    ends = {(name, end) for end, name in re.findall(r"^(PASSED|FAILED|ERROR) \S*/(\w+)", out, re.M)}
    assert ends >= {
        ("harmless", "FAILED"),
        ("other_reason", "FAILED"),
        ("no_python", "ERROR"),
        ("no_module", "ERROR"),
        ("crashes", "FAILED"),
        ("honest_crash", "PASSED"),
        ("forgets_one", "PASSED"),
        ("ignores_start", "PASSED"),
        ("no_variant", "FAILED"),
        ("no_case", "FAILED"),
    }
    assert ("start_last", "FAILED") not in ends
    assert "the spec accepts mistakes/harmless: Believed of harmless." in out
    assert "mistakes/other_reason is caught, but not for the reason that it names" in out
    assert re.search(r"caught\.md:\d+: no spec has the case test_is_the_sum.*\[four\]", out)
    assert "the cause is named" not in out  # no mark says what its spec is about


@pytest.mark.timeout(300)
def test_the_proof_fails_where_too_few_causes_are_named():
    """The first mistake of the tiny kata is caught without its cause."""
    house().add_kata("causes")
    specs = re.sub(r"(@pytest\.mark\.(works|survives))", r'\1("mean", 1)', SPECS_1)
    house().write("tests/specs/causes/test_part1_mean.py", specs)
    code, out = house().pytest("tests/specs/causes", "--answers=mistakes", "-q")
    assert code == 1
    assert "\n2 passed" in out
    assert "\ncauses: the cause is named in 1 of 2 mistakes (50 %)\n" in out
    assert re.search(r"\nFAILED causes: fewer than 80 % .* these have not: forgets_one\n", out)
