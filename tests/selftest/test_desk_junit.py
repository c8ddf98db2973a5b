"""`--junitxml`: pytest's own file for CI, a test case for each spec."""

from __future__ import annotations

from collections import Counter
from functools import cache
from xml.etree import ElementTree

import pytest

from desk.__main__ import main
from kit import catalog
from selftest.tiny import SOLUTION, House, later, new_folder, result, row_of
from selftest.tiny_answers import in_mean

pytestmark = pytest.mark.timeout(300)


@cache
def home() -> House:
    """A house with an answer of which one spec fails, and with one that ends the process."""
    house = House(new_folder())
    house.add_kata("tiny_mean")
    house.write("katas/tiny_mean.py", SOLUTION.replace("[start, *values]", "values"))
    house.write("answers/vanish.py", in_mean("import os", "os._exit(0)"))
    house.write("results/vanish.xml", "of an older run")
    return house


def _kata(*arguments: str) -> tuple[int, str]:
    return home().desk("kata", "tiny_mean", *arguments)


@cache
def twice() -> tuple[int, str]:
    """The second time nothing has changed, and a part has passed."""
    _kata("--all")
    return _kata("--all", "--junitxml=new/folder/all.xml")


later("junit of all", twice)
later("junit of pytest", lambda: home().run("pytest", "--answers=katas", "--junitxml=plain.xml"))
VANISH = ("--answers", "answers/vanish.py", "--junitxml", "results/vanish.xml")
later("junit of a crash", lambda: _kata(*VANISH))


def _cases(path: str) -> Counter[str]:
    """How many test cases ended in which way."""
    cases = ElementTree.parse(home().root / path).getroot().iter("testcase")
    bad = ("failure", "error", "skipped")
    return Counter(next((c.tag for c in case if c.tag in bad), "passed") for case in cases)


@pytest.mark.parametrize(("name", "path"), [("all", "new/folder/all.xml"), ("pytest", "plain.xml")])
def test_the_file_has_a_case_for_each_spec(name, path):
    code, out = result(f"junit of {name}")
    assert code == 1, out
    assert _cases(path) == {"passed": 8, "failure": 1, "skipped": 1}


def test_a_run_that_is_cut_short_leaves_no_older_file_in_its_place():
    code, out = result("junit of a crash")
    assert code == 1
    assert "The run did not come to its end, so there is no results/vanish.xml.\n" in out
    assert not (home().root / "results" / "vanish.xml").exists()


@pytest.fixture
def desk(monkeypatch, tmp_path, capsys):
    """Commands in this process, where nothing is judged."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr("desk.kata.judge", lambda *_: pytest.fail("something was run"))
    (tmp_path / "katas").mkdir()
    rows = [row_of(name) for name in ("one", "two")]
    (tmp_path / "katas" / "katas.toml").write_text("".join(rows))

    def run(*arguments: str) -> tuple[int, str]:
        return main(["kata", *arguments]), capsys.readouterr().err

    return run


def test_a_file_of_another_kind_is_not_overwritten(desk, tmp_path):
    path = tmp_path / "katas" / "one.py"
    path.write_text("mine")
    words = f"--junitxml wants a file that ends in .xml, not {str(path)!r}\n"
    assert desk("one", "--junitxml", str(path)) == (2, words)
    assert path.read_text() == "mine"


def test_a_place_where_nothing_can_be_written_is_refused(desk, tmp_path):
    (tmp_path / "folder.xml").mkdir()
    code, words = desk("one", "--junitxml", str(tmp_path / "folder.xml"))
    assert code == 2
    assert words.startswith("--junitxml cannot write ")


def test_one_file_is_for_one_kata(desk):
    words = "--junitxml is for one kata: nox -s kata -- NAME --junitxml=FILE\n"
    assert desk("--junitxml=all.xml") == (2, words)
