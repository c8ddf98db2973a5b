"""The board, hints, fresh stubs, and what is said to a command that cannot be done."""

from __future__ import annotations

import importlib
import re
from functools import cache

import pytest

from desk.__main__ import main
from kit import catalog
from kit.answers.stubs import is_untouched, make_stub
from selftest.tiny import HINTS, SOLUTION, House, house, later, new_folder, result, row_of


@pytest.fixture
def desk(monkeypatch, tmp_path, capsys):
    """Commands in this process, on a house of its own with the kata tiny."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "katas" / "hints").mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    (tmp_path / "katas" / "katas.toml").write_text(row_of("tiny"))
    (tmp_path / "katas" / "hints" / "tiny.md").write_text(HINTS)
    (tmp_path / "solutions" / "tiny.py").write_text(SOLUTION)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def stub(desk):
    """The candidate's file in that house; not there yet."""
    return catalog.find_kata("tiny").stub


@cache
def street() -> House:
    """A house with katas in many states."""
    home = House(new_folder())
    for name in ("solved", "second", "fresh", "broken", "gone"):
        home.add_kata(name)
    home.write("katas/solved.py", SOLUTION)
    home.write("katas/second.py", SOLUTION.replace("self.count += self.step", "self.count += 1"))
    home.write("katas/broken.py", SOLUTION.replace("import math", "import math("))
    (home.root / "katas" / "gone.py").unlink()
    return home


@cache
def walk() -> dict[str, tuple[int, str]]:
    """Commands one after another in that house, each of which changes what is known."""
    home, seen = street(), {}
    seen["fresh board"] = home.desk("board")
    seen["solved"] = home.desk("kata")
    seen["second"] = home.desk("kata")
    home.desk("kata", "4")
    seen["board"] = home.desk("board")
    seen["hint"] = home.desk("hint")
    seen["second again"] = home.desk("kata", "second")
    seen["second, part 1"] = home.desk("kata", "2", "1")
    second = home.root / "katas" / "second.py"
    second.write_text(SOLUTION.replace("return math.fsum", "return 1 + math.fsum"))
    seen["part 1 broken"] = home.desk("kata", "second")
    home.write("katas/solved.py", SOLUTION + "# changed\n")
    seen["changed board"] = home.desk("board")
    return seen


later("walk", walk)
later("gpu", lambda: house().desk("gpu"))


def walked(name: str) -> tuple[int, str]:
    """One step of the walk."""
    return result("walk")[name]


@pytest.mark.timeout(300)
def test_the_board_tells_every_state_apart():
    code, out = walked("board")
    assert code == 0
    for row in (
        r"1 +Solved +passed \(1 not checked\) +solved\.py",
        r"2 +Second +failing at part 2 of 2 +second\.py",
        r"3 +Fresh +not started \(5 min\) ",
        r"4 +Broken +broken file: syntax error, line 5 ",
        r"5 +Gone +the file is missing ",
    ):
        assert re.search(row, out), out
    assert "Next:    fix Counter in katas/second.py:" in out
    assert "then:    nox -s kata -- second\n" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.timeout(300)
def test_the_board_judges_nothing_and_says_what_has_changed():
    out = walked("fresh board")[1]
    assert re.search(r"1 +Solved +begun, not judged yet ", out)
    assert "Next:    nox -s kata -- solved\n" in out
    assert re.search(r"1 +Solved +changed since \(was: passed\) ", walked("changed board")[1])


@pytest.mark.timeout(300)
def test_without_a_name_the_next_unsolved_kata_is_judged_and_no_other():
    code, out = walked("solved")
    assert code == 0
    assert out.startswith("Solved (solved) - judging katas/solved.py on cpu\n")
    assert "Verdict: passed (9 passed, 1 not checked)" in out
    assert "Second" not in out
    assert re.search(r"\nPart +Bytes +yours +reference +limit *\n1 +peak +1.95 KiB +1.95 KiB", out)
    assert "what do you still hold" not in out
    assert "aloud: solutions/solved.py\n" in out
    assert "  - Why not `statistics.fmean`, which does the same?\n  - What of a stream?\n\n" in out
    assert out.endswith("Next:    nox -s kata   (the next unsolved kata)\n")
    code, out = walked("second")
    assert code == 1
    head = "solved: passed (1 not checked), unchanged\n\nSecond (second) - judging katas/second.py"
    assert out.startswith(head)
    assert out.count("  FAIL  ") == 1
    assert "Core part 1 passed: 4 specs (0." in out
    assert "FAIL  works     counts in steps" in out
    assert "not run: 1 more spec of core part 2\n" in out
    assert "(4 passed, 1 failed, 4 not run, 1 not checked)" in out
    assert "fresh" not in out


@pytest.mark.timeout(300)
def test_what_has_passed_with_this_very_code_does_not_run_again():
    out = walked("second again")[1]
    assert "\n\nCore part 1 passed: 4 specs (unchanged)\nCore part 2 of 2: Counter" in out
    assert "(4 passed, 1 failed, 4 not run, 1 not checked)" in out


@pytest.mark.timeout(300)
def test_a_hint_without_a_name_is_for_the_part_in_hand():
    code, out = walked("hint")
    assert code == 0
    assert out.startswith("Second, part 2: Counter - hint 1 of 1\n")


@pytest.mark.timeout(300)
def test_one_part_alone_is_no_verdict_on_the_kata():
    code, out = walked("second, part 1")
    assert code == 0
    assert "Core part 1 passed: 4 specs (0." in out
    assert "Details of part 1 of 2: mean - the middle of some numbers\n" in out
    assert "part 2" not in out
    assert "Verdict: part 1 of 2 passed (6 passed)\n" in out
    assert "Next:    nox -s kata -- second 2\n" in out


@pytest.mark.timeout(300)
def test_the_part_that_failed_last_runs_first():
    code, out = walked("part 1 broken")
    assert code == 1
    assert out.index("Core part 2 passed: 2 specs") < out.index("Core part 1 of 2: mean")
    assert "Verdict: failing at part 1 of 2 (2 passed, 1 failed, 6 not run, 1 not checked)" in out


@pytest.mark.timeout(300)
def test_without_a_gpu_that_is_said_and_nothing_is_judged():
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, out = result("gpu")
    assert code == 1
    assert out.startswith("There is no CUDA GPU that torch can use here, so nothing was judged")
    assert "Verdict" not in out


def test_an_unknown_kata_is_answered_with_the_nearest(desk):
    assert desk("kata", "tinny") == (2, "no kata is named 'tinny'; did you mean tiny?\n")
    assert desk("kata", "2") == (2, "there is no kata 2: there is only kata 1\n")
    assert desk("hint", "tinny")[0] == 2
    assert desk("reset", "tinny")[0] == 2


@pytest.mark.parametrize("part", ["3", "0", "two"])
def test_an_unknown_part_is_answered_with_those_there_are(desk, part):
    expected = (2, f"tiny has no part {part}: there are parts 1 to 2\n")
    assert desk("kata", "1", part) == expected


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("solutoins", "did you mean solutions?"),
        ("katas/nowhere.py", "there is no such file"),
        (".", "it is a folder"),
    ],
)
def test_answers_that_are_not_there_are_refused(desk, answers, words):
    code, out = desk("kata", "tiny", "--answers", answers)
    assert code == 2
    assert words in out


def test_a_file_without_a_kata_must_be_told_its_kata(desk, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOLUTION)
    code, out = desk("kata", "--answers", str(path))
    assert code == 2
    assert "say which kata" in out


def test_hints_go_up_one_rung_at_a_time(desk):
    code, out = desk("hint", "tiny", "1", "2")
    assert code == 0
    assert "`[1e100, 1.0, -1e100]`" in out
    assert "Rounding." not in out
    assert "Next:    nox -s hint -- tiny 1 3\n" in out
    assert desk("hint", "1", "1", "2") == (code, out)
    assert desk("hint")[1].startswith("Tiny, part 1: mean - hint 1 of 4\n")
    assert "This was the last hint of part 1" in desk("hint", "tiny", "1", "4")[1]


def test_hints_that_are_not_there_are_answered_with_what_is(desk):
    assert desk("hint", "1", "two")[1] == "tiny has no part two: there are parts 1 to 2\n"
    assert desk("hint", "tiny", "3") == (2, "tiny has no part 3: there are parts 1 to 2\n")
    assert (
        desk("hint", "tiny", "1", "5")[1]
        == "part 1 of tiny has no rung 5: there are rungs 1 to 4\n"
    )
    catalog.find_kata("tiny").hints.unlink()
    code, out = desk("hint", "tiny")
    assert code == 2
    assert "there are no hints for tiny yet" in out


def test_reset_writes_a_missing_stub_and_an_untouched_one(desk, stub):
    assert desk("reset", "tiny") == (0, "katas/tiny.py is a fresh stub.\n")
    assert stub.read_text() == make_stub(SOLUTION)
    stub.write_text(make_stub(SOLUTION.replace("mean", "older")))
    assert desk("reset", "tiny")[0] == 0
    assert stub.read_text() == make_stub(SOLUTION)


def test_reset_refuses_somebodys_work(desk, stub):
    stub.write_text("mine")
    code, out = desk("reset", "tiny")
    assert code == 1
    assert "katas/tiny.py has somebody's work in it and was left as it is." in out
    assert stub.read_text() == "mine"


def test_reset_by_force_keeps_every_old_file(desk, stub):
    for work in ("first", "second"):
        stub.write_text(work)
        assert desk("reset", "tiny", "--force")[0] == 0
    assert stub.with_name("tiny.old-1.py").read_text() == "first"
    assert stub.with_name("tiny.old-2.py").read_text() == "second"
    assert is_untouched(stub)
    assert not list(stub.parent.glob(".*"))


def test_reset_of_every_kata_goes_on_after_a_refusal(desk, stub):
    with (catalog.ROOT / "katas" / "katas.toml").open("a") as rows:
        rows.write(row_of("other"))
    (catalog.ROOT / "solutions" / "other.py").write_text(SOLUTION)
    stub.write_text("mine")
    assert desk("reset", "--every")[0] == 1
    assert stub.read_text() == "mine"
    assert is_untouched(stub.with_name("other.py"))


def test_reset_wants_a_name_or_every(desk):
    assert desk("reset")[0] == 2
    assert desk("reset", "tiny", "--every")[0] == 2
