"""What has changed since the last verdict is judged first, by functions and not by lines."""

from __future__ import annotations

import json
from functools import cache

import pytest

from desk import source
from kit.answers.stubs import make_stub
from selftest.tiny import House, later, new_folder, result

pytestmark = pytest.mark.timeout(300)

MODULE = '''\
"""Numbers."""
import math
from math import pi as PI

LIMIT = 3
other: int = LIMIT


def _helper(x):
    return x + LIMIT


def first(x):
    return _helper(x)


def second(x):
    return math.floor(x)


class Third:
    def go(self):
        return PI
'''


@pytest.mark.parametrize(
    ("find", "put", "changed"),
    [
        ("return math", "# a comment\n    return   math", set()),
        ("math.floor", "math.ceil", {"second"}),
        ("x + LIMIT", "LIMIT + x", {"_helper", "first"}),
        ("LIMIT = 3", "LIMIT = 4", {"_helper", "first"}),
        ("other: int = LIMIT", "other: int = 4", set()),
        ("pi as PI", "tau as PI", {"Third"}),
        ("import math\n", "import cmath as math\n", {"second"}),
        ("return PI", "return -PI", {"Third"}),
        ("other: int = LIMIT", "print(LIMIT)", {"_helper", "first", "second", "Third"}),
    ],
)
def test_a_function_has_changed_with_what_it_leans_on(tmp_path, find, put, changed):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(MODULE)
    after.write_text(MODULE.replace(find, put))
    old, new = source.digests(before), source.digests(after)
    assert {name for name in new if old[name] != new[name]} == changed


def test_two_that_lean_on_each_other_come_to_an_end(tmp_path):
    path = tmp_path / "both.py"
    path.write_text("def a():\n    b()\n\n\ndef b():\n    a()\n")
    assert [*source.digests(path)] == ["a", "b"]


def test_nothing_is_known_of_a_file_that_cannot_be_read(tmp_path):
    deep = [f"def f():\n    return {'-' * count}1\n" for count in (1500, 6000)]
    for text in ("def f(:\n", "x = '\0'\n", *deep):  # the first of these two compiles
        (tmp_path / "x.py").write_text(text)
        assert source.digests(tmp_path / "x.py") == {}
    assert source.digests(tmp_path / "none.py") == {}


SOLUTION = '''\
"""Tiny pair."""


def one(x: int) -> int:
    """One more."""
    if x > 99:
        return x + 1
    return x + 1


def two(x: int) -> int:
    """Two more."""
    return x + 2
'''

SPECS = """\
import pytest

from kit.laws.checks import check_equal


class TestPart{number}:
    @pytest.mark.works("{name}", "")
    def test_small(self, answer):
        check_equal(answer.{name}(3), 3 + {number}, "{name}(3)", cause="x")

    @pytest.mark.survives("{name}", "")
    def test_large(self, answer):
        check_equal(answer.{name}(100), 100 + {number}, "{name}(100)", cause="y")
"""

ROW = """\
[pair]
title = "Pair"
summary = "Tiny"
parts = [
    { lap = "core", minutes = 1, title = "one" },
    { lap = "core", minutes = 1, title = "two" },
]
"""
DETAIL = SOLUTION.replace("x + 1\n", "-x\n", 1)  # one, of a large number
CORE_2 = SOLUTION.replace("x + 2", "x")
TODO_2 = make_stub(SOLUTION).partition("def two")[2]

# Each is saved and judged after the other.
STEPS = {
    "a detail is wrong, and part 2 is not written": DETAIL.partition("def two")[0]
    + "def two"
    + TODO_2,
    "now it is written": DETAIL,
    "all is right": SOLUTION,
    "two is wrong": CORE_2,
    "and so is one, in a detail": DETAIL.replace("x + 2", "x"),
    "a slip": "def one(:\n",
    "two is right again": DETAIL,
    "the detail again": DETAIL.replace("-x", "-x - 1"),
    "one is right, and two is not": CORE_2,
}


@cache
def walk() -> dict[str, list[str]]:
    """What runs after each save until the first failure, in that order."""
    home, seen = House(new_folder()), {}
    home.write("solutions/pair.py", SOLUTION)
    home.write("katas/pair.py", make_stub(SOLUTION))
    home.write("katas/hints/pair.md", "# Hints\n\n## Part 1: one\n\n### 1 A\nB\n")
    for number, name in enumerate(("one", "two"), 1):
        text = SPECS.format(number=number, name=name)
        home.write(f"tests/specs/pair/test_part{number}_{name}.py", text)
    with (home.root / "katas" / "katas.toml").open("a", encoding="utf-8") as rows:
        rows.write(ROW)
    for step, text in STEPS.items():
        home.write("katas/pair.py", text)
        found = json.loads(home.desk("kata", "pair", "--json")[1])["verdicts"][0]
        ran = [
            spec for spec in found["specs"] if spec["result"] in ("passed", "failed", "not_written")
        ]
        seen[step] = [f"{s['function']} {s['sentence']} {s['result']}" for s in ran]
    return seen


later("pair", lambda: (0, json.dumps(walk())))


RAN = {
    "a detail is wrong, and part 2 is not written": "one small passed, two small not_written",
    "now it is written": "two small passed, one small passed, two large passed, one large failed",
    "two is wrong": "two small failed",
    "and so is one, in a detail": "one small passed, two small failed",
    "two is right again": "two small passed, one small passed, two large passed, one large failed",
    "the detail again": "one large failed",
    "one is right, and two is not": "one large passed, one small passed, two small failed",
}


@pytest.mark.parametrize("step", RAN, ids=lambda step: step.replace(" ", "_"))
def test_what_has_changed_is_judged_first(step):
    """In the core and then in the details; past the core of all, and what failed last first."""
    assert ", ".join(json.loads(result("pair")[1])[step]) == RAN[step]
