"""What every kata has: parts, specs in groups, mistakes for all of them, right answers, hints."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from desk.asked import Misuse, locate
from desk.hint_file import parse
from desk.verdict import part_files
from kit.answers.catalogue import catalogue
from kit.answers.loading import load, sources
from kit.catalog import GROUPS, ROOT, Kata, all_katas

KATAS = pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)


def _parts(kata: Kata) -> list[tuple[Path, ast.ClassDef]]:
    """The classes of the specs, those of a part as one: its files in their order."""
    found: dict[int, tuple[Path, ast.ClassDef]] = {}
    for number, paths in part_files(kata).items():
        for path in paths:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                    first = found.setdefault(number, (path, node))[1]
                    if first is not node:
                        first.body += node.body
    return list(found.values())


def _specs(part: ast.ClassDef) -> dict[str, list[str]]:
    """The names of the specs of a part, each with the markers that it carries."""
    return {
        node.name: re.findall(
            r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, node.decorator_list))
        )
        for node in part.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@KATAS
def test_the_parts_of_a_kata_have_specs_and_two_laps(kata):
    assert list(part_files(kata)) == [part.number for part in kata.parts]
    assert 2 <= len(kata.parts) <= 5
    assert {part.lap for part in kata.parts} <= {"core", "stretch"}
    assert kata.parts[0].lap == "core"
    assert all(part.title and part.minutes > 0 for part in kata.parts)


@KATAS
def test_every_spec_has_one_group_and_the_groups_are_in_teaching_order(kata):
    seen = set()
    for path, part in _parts(kata):
        order = []
        for name, markers in _specs(part).items():
            groups = [marker for marker in markers if marker in GROUPS]
            assert len(groups) == 1, f"{path.name}: {name} is of {groups or 'no group'}"
            order.append(GROUPS.index(groups[0]))
        assert order == sorted(order), f"{path.name}: {[GROUPS[group] for group in order]}"
        seen |= set(order)
    assert seen == {0, 1, 2, 3}, "a group is missing"


@KATAS
def test_every_spec_is_named_once_and_catches_a_mistake(kata):
    names = Counter(name for _, part in _parts(kata) for name in _specs(part))
    assert [name for name, times in names.items() if times > 1] == []
    caught = {entry.caught_by.partition("[")[0] for entry in catalogue(kata)[0]}
    assert sorted(caught - set(names)) == [], "no such spec"
    assert sorted(set(names) - caught) == [], "these specs catch nothing"


@KATAS
def test_there_are_enough_answers(kata):
    assert len(sources(kata, "mistakes")) >= 8
    assert len(sources(kata, "right")) >= 2


@KATAS
def test_hints_have_rungs_for_every_part_and_name_specs_that_there_are(kata):
    hints = parse(kata.hints.read_text(encoding="utf-8"))
    assert list(hints.parts) == [part.number for part in kata.parts]
    for ladder in hints.parts.values():
        assert list(ladder.rungs) in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
        assert all(lines for _, lines in ladder.rungs.values())
    assert set(hints.specs) <= {name for _, part in _parts(kata) for name in _specs(part)}
    assert all(hints.specs.values())


def test_unknown_answers_are_an_error():
    with pytest.raises(ValueError, match="no answers 'nobody'"):
        sources(all_katas()[0], "katas,nobody")


def test_a_file_with_the_name_of_a_kata_answers_that_one_only(tmp_path):
    first, second, *_ = all_katas()
    path, free = tmp_path / f"{second.name}.py", tmp_path / "by_a_candidate.py"
    for file in (path, free):
        file.touch()
    both = f"{path},{free}"
    assert [answer.path for answer in sources(first, both)] == [free]
    assert [answer.path for answer in sources(second, both)] == [path, free]
    with pytest.raises(Misuse, match=f"is an answer to {second.name}, not to {first.name}"):
        locate(first, str(path))
    assert locate(first, str(free)) == (free, str(free))


def test_the_readme_lists_the_katas_in_order():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md")
    text = readme.read_text(encoding="utf-8")
    table = text.partition("<!-- katas -->")[2].partition("<!-- /katas -->")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| *\d", line)]
    assert rows == [
        f"| {number} | [{kata.title}](katas/{kata.name}.py) | {kata.minutes} min | {kata.summary} |"
        for number, kata in enumerate(all_katas(), 1)
    ]


def test_a_second_save_within_a_second_and_of_the_same_size_is_read(tmp_path, monkeypatch):
    """Python knows bytecode by the size and the second of a save; a watch is faster."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "answer.py"
    for value in (1, 2):
        path.write_text(f"value = {value}\n", encoding="utf-8")
        os.utime(path, (1e9, 1e9))
        assert load(path).value == value
