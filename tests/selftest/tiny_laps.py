"""A tiny kata whose specs name functions and clauses, with a stretch part and a hint for a spec."""

from __future__ import annotations

from kit.answers.stubs import make_stub
from selftest.tiny import House

SOLUTION = '''\
"""Tiny laps. Errors are ValueError and name the value."""


def double(value: int, *, times: int = 1) -> int:
    """The value, doubled.

        zero  stays zero
        sign  stays, too, however often it is doubled, and this sentence is long enough
              to go on in a second line of every screen

    Args:
        value: any whole number.
        times: how often.
    Returns:
        a whole number.
    Raises:
        a negative number of times.

    Details:
        1. A value beyond 64 bits does
           not overflow.
    """
    if times < 0:
        raise ValueError(f"times is {times}")
    return value * 2**times


class Adder:
    """Adds.

        total  of all that was added
    """

    def __init__(self) -> None:
        self.total = 0

    def add(self, value: int) -> None:
        """One more."""
        self.total += value
'''

SPECS_1 = """\
import pytest

from kit.laws.checks import check_equal, check_raises


class TestPart1:
    @pytest.mark.works("double", "Returns")
    def test_doubles(self, answer):
        check_equal(answer.double(2), 4, "double(2)", cause="not doubled")

    @pytest.mark.exact("double", "zero")
    def test_zero_stays(self, answer):
        check_equal(answer.double(0), 0, "double(0)", cause="zero is special")

    @pytest.mark.exact("double", "sign")
    def test_keeps_the_sign(self, answer):
        check_equal(answer.double(-2), -4, "double(-2)", cause="abs()")

    @pytest.mark.survives("double", "Raises")
    def test_refuses(self, answer):
        check_raises(lambda: answer.double(1, times=-1), ValueError, mentions=[-1], when="below 0")

    @pytest.mark.survives("double", 1)
    def test_is_of_any_size(self, answer):
        check_equal(answer.double(2**80), 2**81, "double(2**80)", cause="64 bits")
"""

SPECS_2 = """\
import pytest

from kit.laws.checks import check_bar, check_equal


class TestPart2:
    @pytest.mark.works("Adder", "total")
    def test_adds(self, answer):
        adder = answer.Adder()
        adder.add(3)
        check_equal(adder.total, 3, "the total", cause="not added")

    @pytest.mark.saves("Adder", "total")
    @pytest.mark.parametrize("size", [10], ids=["ten"])
    def test_holds_little(self, answer, reference, size):
        check_bar("held", 10 * size, 2 * size**2, formula="2 n", cause="a list", plain=1000,
                  reference=100)
"""

HINTS = """\
# Hints

## Part 1: double

### 1 A question
What is twice two?

## Part 2: Adder

### 1 A question
Where does the total live?

## When a spec fails

- `test_keeps_the_sign`: Twice minus two is minus four;
  see `abs`.
"""

ROW = """\
[laps]
title = "Laps"
summary = "Tiny"
parts = [
    { lap = "core", minutes = 4, title = "double - twice" },
    { lap = "stretch", minutes = 9, title = "Adder - sums" },
]
"""


def add(home: House) -> None:
    """Put the kata `laps` into the house, with an untouched stub."""
    home.write("solutions/laps.py", SOLUTION)
    home.write("katas/laps.py", make_stub(SOLUTION))
    home.write("katas/hints/laps.md", HINTS)
    home.write("tests/specs/laps/test_part1_double.py", SPECS_1)
    home.write("tests/specs/laps/test_part2_adder.py", SPECS_2)
    with (home.root / "katas" / "katas.toml").open("a", encoding="utf-8") as rows:
        rows.write(ROW)


def answer(find: str, put: str) -> str:
    """The reference with a text replaced, which occurs once."""
    assert SOLUTION.count(find) == 1
    return SOLUTION.replace(find, put)
