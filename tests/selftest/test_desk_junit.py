"""`--junitxml`: pytest's own file for CI, a test case for each spec."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from selftest.tiny import SOLUTION, house
from selftest.tiny_answers import in_mean, judge_text

pytestmark = pytest.mark.timeout(300)


def _cases(path: str) -> Counter[str]:
    """How many test cases ended in which way."""
    cases = ElementTree.parse(house().root / path).getroot().iter("testcase")
    bad = ("failure", "error", "skipped")
    return Counter(next((c.tag for c in case if c.tag in bad), "passed") for case in cases)


def test_the_file_has_a_case_for_each_spec_of_a_second_run_too():
    """The second time nothing has changed, and a part has passed."""
    house().add_kata("junit")
    house().write("katas/junit.py", SOLUTION.replace("[start, *values]", "values"))
    house().desk("kata", "junit", "--all")
    code, out = house().desk("kata", "junit", "--all", "--junitxml=new/folder/all.xml")
    assert code == 1, out
    assert _cases("new/folder/all.xml") == {"passed": 8, "failure": 1, "skipped": 1}


def test_a_run_that_is_cut_short_leaves_no_older_file_in_its_place():
    older = house().write("results/vanish.xml", "of an older run")
    text = in_mean("import os", "os._exit(0)")
    code, out = judge_text("vanish", text, "--junitxml", "results/vanish.xml")
    assert code == 1
    assert "The run did not come to its end, so there is no results/vanish.xml.\n" in out
    assert not older.exists()
