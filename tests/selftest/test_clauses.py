"""Contracts and specs are in step: a spec for each clause, a clause for each spec, within a budget.

It holds for a kata once its specs name functions and clauses in their marks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from desk.verdict import part_files
from kit.answers.contract import Clause, contract_of, functions, sentence, words
from kit.catalog import GROUPS, Kata, all_katas
from selftest import tiny_laps

MOST_WORDS = (450, 400)  # without the details, and of the details

Clauses = dict[str, tuple[str, Clause]]


def clauses_of(folder: Path) -> Clauses:
    """The function and the clause that each spec names; none for a spec that names nothing."""
    found: Clauses = {}
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    name = ast.unparse(mark).partition("(")[0].removeprefix("pytest.mark.")
                    if name in GROUPS and isinstance(mark, ast.Call):
                        function, clause = map(ast.literal_eval, mark.args)
                        found[node.name] = (function, clause)
    return found


def without_spec(solution: Path, clauses: Clauses) -> list[str]:
    """Laws, refusals and details of the contract that no spec names."""
    named = set(clauses.values())
    missing = []
    for function in functions(solution):
        contract = contract_of(solution, function)
        wanted: list[Clause] = [*contract.laws, *contract.details]
        wanted += ["Raises"] if contract.raises else []
        missing += [f"{function}, {clause}" for clause in wanted if (function, clause) not in named]
    return missing


def without_clause(solution: Path, clauses: Clauses) -> list[str]:
    """Specs that name what is not in the contract."""
    return [
        spec for spec, (name, clause) in clauses.items() if not sentence(solution, name, clause)
    ]


def too_many_words(solution: Path, stretch: Collection[str] = ()) -> bool:
    """Whether it is over the budget; functions of the stretch count as details."""
    counts = words(solution, stretch)
    return any(mine > most for mine, most in zip(counts, MOST_WORDS, strict=True))


NAMED = pytest.mark.parametrize(
    "kata", [kata for kata in all_katas() if clauses_of(kata.specs)], ids=lambda kata: kata.name
)


@NAMED
def test_every_spec_names_a_clause(kata: Kata):
    specs = [
        path.read_text(encoding="utf-8").count("    def test_")
        for path in kata.specs.glob("test_*.py")
    ]
    assert len(clauses_of(kata.specs)) == sum(specs)


@NAMED
def test_every_clause_has_a_spec_and_every_spec_a_clause(kata: Kata):
    clauses = clauses_of(kata.specs)
    assert without_spec(kata.solution, clauses) == []
    assert without_clause(kata.solution, clauses) == []


@NAMED
def test_the_contract_keeps_its_budget(kata: Kata):
    clauses = clauses_of(kata.specs)
    stretch = {part.number for part in kata.parts if part.lap == "stretch"}
    spec = r"    def (test_\w+)"
    core = {
        clauses[name][0].partition(".")[0]
        for number, paths in part_files(kata).items()
        for path in paths
        for name in re.findall(spec, path.read_text(encoding="utf-8"))
        if number not in stretch
    }
    later = {name.partition(".")[0] for name, _ in clauses.values()} - core
    assert not too_many_words(kata.solution, later), words(kata.solution, later)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """The solution of a tiny kata, with its specs beside it."""
    (tmp_path / "laps.py").write_text(tiny_laps.SOLUTION)
    (tmp_path / "test_part1.py").write_text(tiny_laps.SPECS_1)
    (tmp_path / "test_part2.py").write_text(tiny_laps.SPECS_2)
    return tmp_path / "laps.py"


def test_a_kata_in_step_has_nothing_missing(tiny):
    clauses = clauses_of(tiny.parent)
    assert clauses["test_is_of_any_size"] == ("double", 1)
    assert without_spec(tiny, clauses) == without_clause(tiny, clauses) == []
    assert not too_many_words(tiny)


def test_what_is_out_of_step_is_named(tiny):
    clauses = clauses_of(tiny.parent)
    del clauses["test_refuses"], clauses["test_is_of_any_size"], clauses["test_zero_stays"]
    assert without_spec(tiny, clauses) == ["double, zero", "double, 1", "double, Raises"]
    clauses["test_other"] = ("double", 2)
    clauses["test_elsewhere"] = ("halve", "zero")
    assert without_clause(tiny, clauses) == ["test_other", "test_elsewhere"]


@pytest.mark.parametrize(("find", "most"), [("Adds.", 450), ("does\n           not", 400)])
def test_words_over_the_budget_are_noticed(tiny, find, most):
    tiny.write_text(tiny_laps.answer(find, f"{find} {'word ' * most}"))
    assert too_many_words(tiny)
