"""Adding a kata is adding files and one row: kit and desk are copied and never edited."""

from __future__ import annotations

import re

import pytest

from selftest.tiny import house

pytestmark = pytest.mark.timeout(300)


def test_the_board_lists_it_and_its_hints_are_told():
    code, out = house().desk("board")
    assert code == 0
    row = r"1 +Tiny mean +not started \(5 min\) +tiny_mean\.py"
    assert re.search(row, out)
    assert "Next:    open katas/tiny_mean.py and write part 1\n" in out
    assert "then:    nox -s kata -- tiny_mean\n" in out
    code, out = house().desk("hint", "tiny_mean")
    assert code == 0
    assert "What is the mean of one number?" in out


def test_the_proof_holds_for_it():
    """Nine specs for four answers (a variant too), two mistakes, and one spec that needs a GPU."""
    answers = "--answers=solutions,right,stubs,mistakes"
    code, out = house().run("pytest", "tests/specs/tiny_mean", answers, "-q")
    assert "38 passed, 4 skipped" in out
    assert code == 0
