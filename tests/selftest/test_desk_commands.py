"""The board, hints, fresh stubs, and what is said to a command that cannot be done."""

from __future__ import annotations

import importlib
import re
from functools import cache

import pytest

from desk.__main__ import main
from kit import catalog
from kit.answers.stubs import is_untouched, make_stub
from selftest.tiny import HINTS, SOLUTION, House, house, new_folder, row_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def desk(monkeypatch, tmp_path, capsys):
    """Commands in this process, on a house of its own with the kata tiny."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr("desk.kata.judge", lambda *_: pytest.fail("something was run"))
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
def walk() -> dict[str, tuple[int, str]]:
    """Commands one after another on katas in many states, each of which changes what is known."""
    home, seen = House(new_folder()), {}
    for name in ("solved", "second", "fresh", "broken", "gone"):
        home.add_kata(name)
    home.write("katas/broken.py", SOLUTION.replace("import math", "import math("))
    home.write("katas/solved.py", SOLUTION)
    (home.root / "katas" / "gone.py").unlink()
    seen["fresh board"] = home.desk("board")
    seen["solved"] = home.desk("kata")
    home.write("katas/second.py", SOLUTION.replace("self.count += self.step", "self.count += 1"))
    seen["second"] = home.desk("kata")
    home.desk("kata", "4")
    seen["board"] = home.desk("board")
    seen["hint"], seen["timeline"] = home.desk("hint"), home.desk("timeline")
    seen["second again"] = home.desk("kata", "second")
    home.write("katas/solved.py", SOLUTION + "# changed\n")
    seen["changed board"] = home.desk("board")
    return seen


def test_the_board_tells_every_state_apart_judges_nothing_and_says_what_has_changed():
    code, out = walk()["board"]
    assert code == 0
    for row in (
        r"  1 +Solved +passed \(1 not checked\) +solved\.py",
        r"> 2 +Second +failing at part 2 of 2 +second\.py",
        r"3 +Fresh +not started \(5 min\) ",
        r"4 +Broken +broken file: syntax error, line 5 ",
        r"5 +Gone +the file is missing ",
    ):
        assert re.search(row, out), out
    assert "Next:    fix Counter in katas/second.py:" in out
    assert "then:    nox -s kata -- second\n" in out
    assert max(map(len, out.splitlines())) <= 100
    out = walk()["fresh board"][1]
    assert re.search(r"1 +Solved +begun, not judged yet ", out)
    assert "Next:    nox -s kata -- solved\n" in out
    out = walk()["changed board"][1]
    assert re.search(r"1 +Solved +changed since \(was: passed\) ", out)
    assert "Next:    nox -s kata -- solved\n" in out


def test_without_a_name_the_kata_that_was_saved_last_is_judged_and_no_other():
    code, out = walk()["solved"]
    assert code == 0
    assert out.startswith("Solved - judging katas/solved.py on cpu\n")
    assert "Verdict: passed (9 passed, 1 not checked)" in out
    assert "Second" not in out
    assert re.search(r"\nPart +Bytes +yours +reference +limit *\n1 +peak +1.95 KiB +1.95 KiB", out)
    assert "need not be?" not in out
    assert "aloud: solutions/solved.py\n" in out
    assert "  - Why not `statistics.fmean`, which does the same?\n  - What of a stream?\n\n" in out
    assert out.endswith("Next:    nox -s kata   (the next unsolved kata)\n")
    code, out = walk()["second"]
    assert code == 1
    head = "solved: passed (1 not checked), unchanged\n\nSecond - judging katas/second.py"
    assert out.startswith(head)
    assert out.count("  FAIL  ") == 1
    assert re.search(r"Core part 1 passed: 4 specs \(\d+\.\d s\)\n", out)
    assert "FAIL  works     counts in steps" in out
    assert "not run: 1 more spec of core part 2\n" in out
    assert "(4 passed, 1 failed, 4 not run, 1 not checked)" in out
    assert "fresh" not in out


def test_what_has_passed_does_not_run_again_and_hints_and_pictures_are_of_what_is_in_hand():
    out = walk()["second again"][1]
    assert "\n\nCore part 1 passed: 4 specs (unchanged)\nCore part 2 of 2: Counter" in out
    assert "(4 passed, 1 failed, 4 not run, 1 not checked)" in out
    code, out = walk()["hint"]
    assert code == 0
    assert out.startswith("Second, part 2: Counter - hint 1 of 1\n")
    assert walk()["timeline"][1].startswith("second has no picture of a step")


def test_without_a_gpu_that_is_said_and_nothing_is_judged():
    if importlib.import_module("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    code, out = house().desk("gpu")
    assert code == 1
    assert out.startswith("There is no CUDA GPU that torch can use here, so nothing was judged")
    assert "Verdict" not in out


def test_an_unknown_kata_is_answered_with_the_nearest(desk):
    assert desk("kata", "tinny") == (2, "no kata is named 'tinny'; did you mean tiny?\n")
    for name in ("tiny", "katas/tiny.py", "tiny.py", "Tiny", "ti"):  # its file, title, or beginning
        assert desk("kata", name, "9") == (2, "tiny has no part 9: there are parts 1 to 2\n")
    assert desk("kata", "tiny", "1", "2") == (
        2,
        "one kata, or one part of it, is judged at a time; '2' is too much\n",
    )
    assert desk("kata", "2") == (2, "there is no kata 2: there is only kata 1\n")
    assert desk("hint", "tinny")[0] == 2
    assert desk("reset", "tinny")[0] == 2


@pytest.mark.parametrize("part", ["3", "0", "two"])
def test_an_unknown_part_is_answered_with_those_there_are(desk, part):
    expected = (2, f"tiny has no part {part}: there are parts 1 to 2\n")
    assert desk("kata", "1", part) == expected
    assert desk("hint", "tiny", part) == expected


def test_answers_that_are_not_there_are_refused_and_a_file_needs_its_kata(desk, tmp_path):
    for answers, words in {
        "solutoins": "did you mean solutions?",
        "katas/nowhere.py": "there is no such file",
        ".": "it is a folder",
    }.items():
        code, out = desk("kata", "tiny", "--answers", answers)
        assert code == 2
        assert words in out
    path = tmp_path / "mine.py"
    path.write_text(SOLUTION)
    code, out = desk("kata", "--answers", str(path))
    assert code == 2
    assert "say which kata" in out


def test_a_file_for_ci_replaces_no_other_and_is_refused_where_it_cannot_be(desk, tmp_path):
    path = tmp_path / "katas" / "tiny.py"
    path.write_text("mine")
    words = f"--junitxml wants a file that ends in .xml, not {str(path)!r}\n"
    assert desk("kata", "tiny", "--junitxml", str(path)) == (2, words)
    assert path.read_text() == "mine"
    (tmp_path / "folder.xml").mkdir()
    code, words = desk("kata", "tiny", "--junitxml", str(tmp_path / "folder.xml"))
    assert code == 2
    assert words.startswith("--junitxml cannot write ")
    with (tmp_path / "katas" / "katas.toml").open("a") as rows:
        rows.write(row_of("other"))
    words = "--junitxml is for one kata: nox -s kata -- NAME --junitxml=FILE\n"
    assert desk("kata", "--junitxml=all.xml") == (2, words)


def test_hints_go_up_one_rung_at_a_time_and_end(desk):
    code, out = desk("hint", "tiny", "1", "2")
    assert code == 0
    assert "`[1e100, 1.0, -1e100]`" in out
    assert "Rounding." not in out
    assert "Next:    nox -s hint -- tiny 1 3\n" in out
    assert desk("hint", "1", "1", "2") == (code, out)
    assert desk("hint")[1].startswith("Tiny, part 1: mean - hint 1 of 4\n")
    assert "This was the last hint of part 1" in desk("hint", "tiny", "1", "4")[1]
    words = "part 1 of tiny has no hint 5: there are hints 1 to 4\n"
    assert desk("hint", "tiny", "1", "5") == (2, words)
    catalog.find_kata("tiny").hints.unlink()
    code, out = desk("hint", "tiny")
    assert code == 2
    assert "there are no hints for tiny yet" in out


def test_reset_writes_a_missing_stub_and_an_untouched_one(desk, stub):
    words = "katas/tiny.py is a fresh stub.\nNext:    open katas/tiny.py and write part 1\n"
    assert desk("reset", "tiny") == (0, words)
    assert stub.read_text() == make_stub(SOLUTION)
    stub.write_text(make_stub(SOLUTION.replace("mean", "older")))
    assert desk("reset", "tiny")[0] == 0
    assert stub.read_text() == make_stub(SOLUTION)


def test_reset_by_force_keeps_every_old_file(desk, stub):
    for work in ("first", "second"):
        stub.write_text(work)
        assert desk("reset", "tiny", "--force")[0] == 0
    assert stub.with_name("tiny.old-1.py").read_text() == "first"
    assert stub.with_name("tiny.old-2.py").read_text() == "second"
    assert is_untouched(stub)
    assert not list(stub.parent.glob(".*"))


def test_reset_refuses_somebodys_work_and_goes_on_with_the_next(desk, stub):
    with (catalog.ROOT / "katas" / "katas.toml").open("a") as rows:
        rows.write(row_of("other"))
    (catalog.ROOT / "solutions" / "other.py").write_text(SOLUTION)
    stub.write_text("mine")
    code, out = desk("reset", "--every")
    assert code == 1
    assert "katas/tiny.py has somebody's work in it and was left as it is." in out
    assert stub.read_text() == "mine"
    assert is_untouched(stub.with_name("other.py"))
    assert desk("reset")[0] == 2
    assert desk("reset", "tiny", "--every")[0] == 2
