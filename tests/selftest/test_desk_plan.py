"""`plan`: the table, what is said of an answer that comes to none, and of sizes that cannot be."""

from __future__ import annotations

import re

import pytest

from desk.__main__ import main
from kit import catalog
from selftest.tiny import SOLUTION, house, row_of
from selftest.tiny_answers import answer, in_mean
from selftest.tiny_plan import PLAN

pytestmark = pytest.mark.timeout(120)


def seen(*arguments: str) -> tuple[int, str]:
    """The plan of tiny_mean in one way."""
    code, out = house().desk("plan", *arguments)
    assert max(map(len, out.splitlines())) <= 100, out
    assert "Traceback" not in out
    return code, out


def of(name: str, text: str, *arguments: str) -> tuple[int, str]:
    """The plan of an answer of this text."""
    path = house().write(f"answers/{name}.py", text)
    return seen("tiny_mean", "--answers", str(path), *arguments)


def test_a_plan_is_a_table_with_words_for_what_fits():
    code, out = of("right", SOLUTION, "--values", "31", "--ranks=8")
    assert code == 0
    assert "Tiny mean - a dry run of answers/right.py\n" in out
    assert "31 values on 8 ranks\n" in out
    assert re.search(r"\n +one configuration with many words +exactly *\n", out), out
    assert re.search(r"\nshards +15\.00 +40\.00 *\noptimizer state +0\.00 +0\.00 *\n", out), out
    assert re.search(r"\nactivations +1\.00 +0\.00 *\npeak +16\.00 +40\.00 *\n", out), out
    assert re.search(r"\n24 GiB +fits +no *\n40 GiB +fits +fits *\n80 GiB +fits +fits *\n", out)
    assert "all as in" not in out
    assert "  one configuration with many words: 3 gathers\n" in out
    assert re.search(r"\nA note\.\n\nTime:    \d+\.\d s\n$", out)


def test_a_stub_is_answered_with_the_table_of_the_reference():
    code, out = seen()
    assert code == 0
    first, second = out.splitlines()[:2]
    assert first == "tiny_mean: nothing is written yet, so the reference plans instead"
    assert second == "Tiny mean - a dry run of solutions/tiny_mean.py"
    assert "49 values on 1,000 ranks\n" in out
    assert re.search(r"\npeak +25\.00 +40\.00 *\n24 GiB +no +no *\n40 GiB +fits +fits *\n", out)


def test_a_configuration_that_changes_nothing_is_named():
    out = of("same", SOLUTION, "--ranks=1")[1]
    words = "alone: all as in exactly; the option does nothing, or is not written yet\n"
    assert out.count("all as in") == out.count(words) == 1


def test_an_error_of_the_answer_is_told_with_its_line():
    text = in_mean("print('mean of', len(values))", "raise ValueError('of the answer')")
    code, out = of("raises", text)
    assert code == 1
    assert "There is no table: error\n" in out
    assert "got       ValueError: of the answer\n" in out
    assert re.search(r"at        answers/raises\.py:\d+ in mean\n", out)
    assert "raise ValueError('of the answer')\n" in out
    assert "printed   mean of 49\n" in out
    assert out.endswith("Next:    nox -s kata -- tiny_mean\n")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("todo", in_mean("raise NotImplementedError"), " before this is written: answers/todo.py:"),
        ("syntax", answer(("import math", "import math(")), ": syntax error\n"),
        ("vanishes", in_mean("import os", "os._exit(0)"), ": process ended\n"),
    ],
)
def test_an_answer_that_comes_to_no_table_is_told_why(name, text, words):
    code, out = of(name, text)
    assert code == 1
    assert f"There is no table{words}" in out
    assert name != "todo" or re.search(r"todo\.py:\d+ in mean\n", out)
    assert name != "syntax" or "at        answers/syntax.py:5\n" in out


def test_a_loop_without_end_ends_with_the_time():
    code, out = of("endless", in_mean("while True:", "    pass"), "--timeout=0.5")
    assert code == 1
    assert "There is no table: time-out\n" in out
    assert "got       time-out: still running after 0.5 s\n" in out
    assert re.search(r"at        answers/endless\.py:\d+ in mean\n", out)
    assert "smaller sizes, or more seconds by --timeout\n" in out


def test_sizes_that_the_plan_refuses_are_refused_in_its_words():
    code, out = of("right", SOLUTION, "--values=30")
    assert code == 2
    assert out.endswith("values must be odd, not 30\n")
    assert "Verdict" not in out


# What is refused before anything runs.


@pytest.fixture
def desk(monkeypatch, tmp_path, capsys):
    """Commands in this process, on a house with the katas near, far and planless."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr("desk.one_call.judge", lambda job: pytest.fail("something was run"))
    (tmp_path / "katas").mkdir()
    rows = [row_of(name) for name in ("near", "far", "planless")]
    (tmp_path / "katas" / "katas.toml").write_text("".join(rows))
    for name in ("near", "far"):
        (tmp_path / "tests" / "specs" / name).mkdir(parents=True)
    near, far = (tmp_path / "tests" / "specs" / name / "plan.py" for name in ("near", "far"))
    near.write_text(PLAN)
    far.write_text("import nothing_of_this_is_imported\nSIZES: dict[str, int] = {'miles': 7}\n")

    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(["plan", *arguments])
        except SystemExit as end:  # argparse
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.parametrize("number", ["0", "many", "1.5"])
def test_a_size_is_a_number_from_1(desk, number):
    code, out = desk("near", "--values", number)
    assert code == 2
    assert out.endswith(f"argument --values: {number!r} is not a whole number from 1\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["near", "--valus", "3"], "--valus is no option here; did you mean --values?"),
        (["near", "--miles", "3"], "--miles is no option here; near has --values, --ranks"),
        (["near", "3"], "3 is no option here; there are --values, --ranks, --miles, --answers"),
        (["planless"], "planless has no plan; those that have one: near, far"),
        ([], "say which kata: nox -s plan -- NAME; those with a plan: near, far"),
        (["near", "--answers", "nowhere.py"], "no answers 'nowhere.py'"),
    ],
)
def test_what_cannot_be_planned_is_answered_with_what_can(desk, arguments, words):
    code, out = desk(*arguments)
    assert code == 2
    assert out.startswith(words)


def test_no_plan_at_all(desk):
    for path in (catalog.ROOT / "tests" / "specs").glob("*/plan.py"):
        path.unlink()
    assert desk() == (2, "no kata has a plan\n")
    assert desk("near") == (2, "no kata has a plan\n")


def test_help_names_the_sizes(desk):
    code, out = desk("--help")
    assert code == 0
    assert re.search(r"--values N +49 for near\n", out)
    assert re.search(r"--miles N +7 for far\n", out)
