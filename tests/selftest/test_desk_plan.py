"""`plan`: the table, what is said of an answer that comes to none, and of sizes that cannot be."""

from __future__ import annotations

import re
from functools import cache

import pytest

from desk.__main__ import main
from kit import catalog
from selftest.tiny import SOLUTION, House, later, new_folder, result, row_of
from selftest.tiny_answers import answer, in_mean

pytestmark = pytest.mark.timeout(120)

# mean() of 0 ... values - 1, in GiB, is what "shards" holds.
PLAN = """\
from kit.memory.plan import Plan, Row

SIZES = {"values": 49, "ranks": 1_000}


def plan(answer, **sizes):
    if sizes["values"] % 2 == 0:
        raise ValueError(f"values must be odd, not {sizes['values']}")
    held = int(answer.mean([float(n) for n in range(sizes["values"])]) * 2**30)
    kinds = {"shards": held, "optimizer state": 0, "gradients": 0, "unsharded": 0}
    more = {"communication": 0, "activations": 2**30}
    return Plan(
        f"{sizes['values']} values on {sizes['ranks']:,} ranks",
        [
            Row("one configuration with many words", {**kinds, **more}, held + 2**30, "3 gathers"),
            Row("exactly", {"shards": 40 * 2**30}, 40 * 2**30),
        ],
        ["A note."],
    )
"""


@cache
def home() -> House:
    """A house in which one of two katas has a plan."""
    home = House(new_folder())
    home.add_kata("tiny_mean")
    home.add_kata("planless")
    home.write("tests/specs/tiny_mean/plan.py", PLAN)
    return home


ANSWERS = {
    "right": SOLUTION,
    "raises": in_mean("print('mean of', len(values))", "raise ValueError('of the answer')"),
    "todo": in_mean("raise NotImplementedError"),
    "syntax": answer(("import math", "import math(")),
    "endless": in_mean("while True:", "    pass"),
    "vanishes": in_mean("import os", "os._exit(0)"),
}


def _run(name: str, *arguments: str) -> tuple[int, str]:
    path = home().write(f"answers/{name}.py", ANSWERS[name])
    return home().desk("plan", "tiny_mean", "--answers", str(path), *arguments)


later("plan of a stub", lambda: home().desk("plan"))
later("plan of right", lambda: _run("right", "--values", "31", "--ranks=8"))
later("plan of raises", lambda: _run("raises"))
later("plan of todo", lambda: _run("todo"))
later("plan of syntax", lambda: _run("syntax"))
later("plan of endless", lambda: _run("endless", "--timeout=2"))
later("plan of vanishes", lambda: _run("vanishes"))
later("plan of refused sizes", lambda: _run("right", "--values=30"))


def _seen(name: str) -> tuple[int, str]:
    code, out = result(f"plan of {name}")
    assert max(map(len, out.splitlines())) <= 100, out
    assert "Traceback" not in out
    return code, out


def test_a_plan_is_a_table_with_words_for_what_fits():
    code, out = _seen("right")
    assert code == 0
    assert "Tiny mean (tiny_mean) - a dry run of answers/right.py\n" in out
    assert "31 values on 8 ranks\n" in out
    numbers = r" 15\.00 +0\.00 +0\.00 +0\.00 +0\.00 +1\.00 +16\.00 +fits +fits +fits *\n"
    assert re.search(r"\none +" + numbers + r"configuration *\nwith many words", out), out
    exact = r" 40\.00 +0\.00 +0\.00 +0\.00 +0\.00 +0\.00 +40\.00 +no +fits +fits *\n"
    assert re.search(r"\nexactly +" + exact, out), out
    assert "  one configuration with many words: 3 gathers\n" in out
    assert re.search(r"\nA note\.\n\nTime:    \d+\.\d s\n$", out)


def test_a_stub_is_answered_with_the_table_of_the_reference():
    code, out = _seen("a stub")
    assert code == 0
    first, second = out.splitlines()[:2]
    assert first == "tiny_mean: nothing is written yet, so the reference plans instead"
    assert second == "Tiny mean (tiny_mean) - a dry run of solutions/tiny_mean.py"
    assert "49 values on 1,000 ranks\n" in out
    assert re.search(r" 25\.00 +no +fits +fits *\n", out)


def test_an_error_of_the_answer_is_told_with_its_line():
    code, out = _seen("raises")
    assert code == 1
    assert "There is no table: error\n" in out
    assert "got       ValueError: of the answer\n" in out
    assert re.search(r"at        answers/raises\.py:\d+ in mean\n", out)
    assert "raise ValueError('of the answer')\n" in out
    assert "printed   mean of 49\n" in out
    assert out.endswith("Next:    nox -s kata -- tiny_mean\n")


def test_an_unwritten_part_is_no_error():
    code, out = _seen("todo")
    assert code == 1
    assert re.search(r"There is no table: not written yet: answers/todo\.py:\d+ in mean\n", out)


def test_a_syntax_error_is_told_with_its_line():
    code, out = _seen("syntax")
    assert code == 1
    assert "There is no table: syntax error\n" in out
    assert "at        answers/syntax.py:5\n" in out


def test_a_loop_without_end_ends_with_the_time():
    code, out = _seen("endless")
    assert code == 1
    assert "There is no table: time-out\n" in out
    assert "got       time-out: still running after 2 s\n" in out
    assert re.search(r"at        answers/endless\.py:\d+ in mean\n", out)
    assert "smaller sizes, or more seconds by --timeout\n" in out


def test_a_process_that_ends_is_no_table():
    code, out = _seen("vanishes")
    assert code == 1
    assert "There is no table: process ended\n" in out


def test_sizes_that_the_plan_refuses_are_refused_in_its_words():
    code, out = _seen("refused sizes")
    assert code == 2
    assert out.endswith("values must be odd, not 30\n")
    assert "Verdict" not in out


# What is refused before anything runs.


@pytest.fixture
def desk(monkeypatch, tmp_path, capsys):
    """Commands in this process, on a house with the katas near, far and planless."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr("desk.plan.judge", lambda job: pytest.fail("something was run"))
    (tmp_path / "katas").mkdir()
    rows = [row_of(name) for name in _KATAS]
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


_KATAS = ("near", "far", "planless")


@pytest.mark.parametrize("number", ["0", "-3", "many", "1.5", ""])
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
        (["nearr"], "no kata is named 'nearr'; did you mean near?"),
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
