"""What has changed since the last verdict is judged first, by functions and not by lines."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest

from desk import source
from kit.answers.stubs import make_stub
from selftest.tiny import SOLUTION, house

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


DETAIL_FAILS = ["mean details passed", "mean details failed"]
DETAIL = SOLUTION.replace("[start, *values]", "values")  # wrong in a detail of part 1
CORE_2 = SOLUTION.replace("+= self.step", "+= 1")
TODO_2 = "class Counter" + make_stub(SOLUTION).partition("class Counter")[2]

# Each is saved and judged after the other; with what runs until the first failure, in that order.
STEPS = {
    "a detail is wrong, and part 2 is not written": (
        DETAIL.partition("class Counter")[0] + TODO_2,
        ["mean core passed", "Counter core not_written"],
    ),
    "now it is written": (
        DETAIL,
        ["Counter core passed", "mean core passed", "Counter details passed", *DETAIL_FAILS],
    ),
    "all is right": (SOLUTION, None),
    "two is wrong": (CORE_2, ["Counter core failed"]),
    "and so is one, in a detail": (
        DETAIL.replace("+= self.step", "+= 1"),
        ["mean core passed", "Counter core failed"],
    ),
    "a slip": ("def one(:\n", None),
    "two is right again": (
        DETAIL,
        ["Counter core passed", "mean core passed", "Counter details passed", *DETAIL_FAILS],
    ),
    "the detail again": (
        DETAIL.replace("fsum(values)", "fsum([*values])"),
        ["mean details failed"],
    ),
    "one is right, and two is not": (
        CORE_2,
        ["mean details passed", "mean core passed", "Counter core failed"],
    ),
}


@cache
def walk() -> dict[str, list[str]]:
    """What runs after each save."""
    seen = {}
    house().add_kata("changed")
    for step, (text, _) in STEPS.items():
        house().write("katas/changed.py", text)
        found = json.loads(house().desk("kata", "changed", "--json")[1])["verdicts"][0]
        ran = [s for s in found["specs"] if s["result"] in ("passed", "failed", "not_written")]
        told = (f"{spec['function']} {spec['lap']} {spec['result']}" for spec in ran)
        seen[step] = [key for key, _ in itertools.groupby(told)]
    return seen


@pytest.mark.parametrize("step", [step for step, (_, ran) in STEPS.items() if ran])
def test_what_has_changed_is_judged_first(step):
    """In the core and then in the details; past the core of all. The spec that failed, before."""
    assert walk()[step] == STEPS[step][1]
