"""Core first, then details and stretch; and a failure is told with its clause and its hint."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from selftest import tiny_laps
from selftest.tiny import house
from selftest.tiny_laps import answer

pytestmark = pytest.mark.timeout(300)

# Each is saved and judged after the other, with the commands that follow it.
STEPS = {
    "untouched": "",
    "sign": answer("return value * 2**times", "return abs(value) * 2**times"),
    "details": answer("return value * 2**times", "return min(value * 2**times, 2**64)"),
    "stretch": answer("self.total += value", "self.total -= value"),
    "solved": tiny_laps.SOLUTION,
}


@cache
def walk() -> dict[str, str]:
    """What the commands say after each save."""
    home, seen = house(), {}
    tiny_laps.add(home)
    for name, text in STEPS.items():
        if text:
            home.write("katas/laps.py", text)
        seen[name] = home.desk("kata", "laps", COLUMNS="80")[1]
        seen[f"{name}, board"] = home.desk("board", COLUMNS="80")[1]
        if name in ("sign", "details"):
            seen[f"{name}, hint"] = home.desk("hint", "laps")[1]
        if name == "details":
            seen["json"] = home.desk("kata", "laps", "--json")[1]
        if name == "untouched":
            seen["untouched, all"] = home.desk("kata", "laps", "--all")[1]
    seen["one part"] = home.desk("kata", "laps", "1")[1]
    home.write("katas/laps.py", STEPS["sign"])
    seen["all"] = home.desk("kata", "laps", "--all")[1]
    return seen


def screen(name: str) -> str:
    """One screen, with a fixed time."""
    out = walk()[name]
    assert max(map(len, out.splitlines())) <= 100 or name == "json"
    return re.sub(r"\d+\.\d s", "0.1 s", out)


def test_what_is_not_written_names_its_function():
    out = screen("untouched")
    assert "Core part 1 of 2: double - twice\n  TODO  works     doubles\n" in out
    assert "  not run: 2 more specs of core part 1\n" in out
    assert "Details of part 1, stretch part 2 - not run (4 specs)\n" in out
    assert "Next:    write double in katas/laps.py:4\n" not in out  # the line is that of the raise
    assert re.search(r"Next:    write double in katas/laps\.py:\d+\n", out)


def test_specs_of_what_is_not_written_fold_to_a_line_in_each_section():
    out = screen("untouched, all")
    place = r"katas/laps\.py:\d+ in double\n"
    assert re.search(
        rf"TODO  works     doubles\n +not written yet: {place}  and 2 more specs of {place}", out
    )


def test_a_failure_is_told_with_the_sentence_of_the_contract():
    out = screen("sign")
    assert out.partition("FAIL")[2].startswith(
        """  exact     keeps the sign

        expected  double(-2) = -4
        got       4
        perhaps   abs()
        contract  double, sign: stays, too, however often it is doubled, and
                  this sentence is long enough to go on in a second line of
                  every screen
        at        katas/laps.py:4 in double

"""
    )
    assert "Next:    fix double in katas/laps.py:4\n" in out
    assert out.endswith("a hint:  nox -s hint -- laps 1\n")


def test_the_hint_of_the_spec_that_failed_comes_first():
    out = screen("sign, hint")
    assert out == (
        "Laps, part 1: double - a hint for the spec that failed\nkeeps the sign\n\n"
        "  Twice minus two is minus four; see `abs`.\n\nNext:    nox -s hint -- laps 1 1\n"
    )
    assert screen("details, hint").startswith("Laps, part 1: double - hint 1 of 1\n")
    assert "a hint:  nox -s hint -- laps 1\n" in screen("details")


def test_after_the_core_the_verdict_says_so_in_json_too():
    out = screen("details")
    assert "Core part 1 passed: 3 specs (0.1 s)\nDetails of part 1 of 2: double - twice\n" in out
    assert "contract  double, detail 1: A value beyond 64 bits does not overflow.\n" in out
    assert "Stretch part 2 of 2: Adder - sums - not run (2 specs)\n" in out
    words = "Verdict: core passed, failing at the details of part 1 of 2"
    assert f"{words} (4 passed, 1 failed," in out
    assert "\nCore:    done, the 4 minutes of this kata. Details and stretch follow.\n" in out
    assert "Core:  " not in screen("sign") + screen("solved")
    (verdict,) = json.loads(screen("json"))["verdicts"]
    assert (verdict["core_passed"], verdict["solved"]) == (True, False)
    parts = [(part["lap"], part["number"], part["result"]) for part in verdict["parts"]]
    assert parts == [("core", 1, "passed"), ("details", 1, "failed"), ("stretch", 2, "not_run")]
    failed = next(spec for spec in verdict["specs"] if spec["result"] == "failed")
    assert failed["function"] == "double"
    assert failed["contract"] == "double, detail 1: A value beyond 64 bits does not overflow."
    assert not failed["problem"]["sure"]
    out = screen("stretch")
    order = ["Details of part 1 passed: 2 specs", "Core part 1 passed: 3 specs", "Stretch part 2"]
    assert sorted(order, key=out.index) == order
    assert "Verdict: core passed, failing at part 2 of 2 (" in out


def test_the_board_shows_both_laps():
    assert "Laps       not started (4 min)" in screen("untouched, board")
    assert "failing at part 1 of 2" in screen("sign, board")
    assert "core passed, details 0 of 2" in screen("details, board")
    assert "core passed, details 1 of 2" in screen("stretch, board")
    assert "Laps       passed" in screen("solved, board")
    assert "Verdict: passed (7 passed)\n" in screen("solved")
    assert "held (ten)" not in screen("solved")
    assert re.search(r"\n2 +held +100 B +100 B +200 B", screen("solved"))


def test_a_part_alone_has_both_laps_and_all_runs_on_in_their_order():
    out = screen("one part")
    assert "Core part 1 passed: 3 specs" in out
    assert "Details of part 1 of 2: double - twice\n" in out
    assert "Verdict: part 1 of 2 passed (5 passed)\n" in out
    assert "Next:    nox -s kata -- laps 2\n" in out
    out = screen("all")
    assert "Core part 1 of 2" in out
    assert "Details of part 1 passed: 2 specs" in out
    assert "Verdict: failing at part 1 of 2 (6 passed, 1 failed)" in out
