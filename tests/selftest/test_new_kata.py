"""Adding a kata is adding files and one row: kit and desk are copied and never edited."""

from __future__ import annotations

import pytest

from selftest.tiny import house


@pytest.mark.timeout(300)
def test_the_proof_holds_for_it():
    """Nine specs for four answers (a variant too), two mistakes, and one spec that needs a GPU."""
    answers = "--answers=solutions,right,stubs,mistakes"
    code, out = house().run("pytest", "tests/specs/tiny_mean", answers, "-q")
    assert "38 passed, 4 skipped" in out
    assert code == 0
