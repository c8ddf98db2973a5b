"""`timeline`: the picture, its peaks, and what is said of an answer that comes to none."""

from __future__ import annotations

import inspect
import json
from functools import cache
from importlib import import_module

import pytest
import torch

from kit.answers.loading import load
from kit.catalog import all_katas
from kit.memory.stack import highest, stacked, thin
from kit.ranks.world import World
from selftest.tiny import SOLUTION, House, later, new_folder, repository, result
from selftest.tiny_answers import answer, in_mean
from selftest.tiny_timeline import add_lab, add_timeline

pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
pytestmark = pytest.mark.timeout(120)


@cache
def home() -> House:
    """A house in which one of two katas has a picture."""
    home = House(new_folder())
    home.add_kata("tiny_mean")
    home.add_kata("plain")
    add_timeline(home)
    return home


ANSWERS = {
    "right": SOLUTION,
    "large": in_mean("return 3.0"),
    "raises": in_mean("raise ValueError('of the answer')"),
    "syntax": answer(("import math", "import math(")),
    "endless": in_mean("while True:", "    pass"),
    "vanishes": in_mean("import os", "os._exit(0)"),
}


def _run(name: str, *arguments: str) -> tuple[int, str]:
    path = home().write(f"answers/{name}.py", ANSWERS[name])
    return home().desk("timeline", "tiny_mean", "--answers", str(path), *arguments)


later("timeline of right", lambda: _run("right"))
later("timeline of large", lambda: _run("large"))
later("timeline of raises", lambda: _run("raises"))
later("timeline of syntax", lambda: _run("syntax"))
later("timeline of endless", lambda: _run("endless", "--timeout=2"))
later("timeline of vanishes", lambda: _run("vanishes"))
later("timeline of a stub", lambda: home().desk("timeline", "1"))
later("timeline of nothing", lambda: home().desk("timeline"))
later("timeline of plain", lambda: home().desk("timeline", "plain"))


def seen(name: str) -> tuple[int, str]:
    code, out = result(f"timeline of {name}")
    assert max(map(len, out.splitlines())) <= 100, out
    assert "Traceback" not in out
    return code, out


def test_the_peaks_of_three_ways_and_the_place_of_the_picture():
    code, out = seen("right")
    assert code == 0
    assert "Tiny mean (tiny_mean) - one step of answers/right.py\n" in out
    plain, yours, reference = (line.split()[-2:] for line in out.splitlines()[3:6])
    assert yours == reference
    assert float(plain[0]) > float(yours[0])
    assert out.endswith("Picture: lab-report/timeline-tiny_mean.png (and .svg)\n")
    for suffix in (".png", ".svg"):
        assert (home().root / "lab-report" / f"timeline-tiny_mean{suffix}").stat().st_size > 1000


def test_an_answer_that_holds_more_is_seen_in_its_peak():
    lines = dict(line.split(" peak ") for line in seen("large")[1].splitlines() if " peak " in line)
    sizes = {name.strip(): float(size.split()[0]) for name, size in lines.items()}
    assert sizes["reference"] < sizes["yours"] < sizes["plain"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "got       ValueError: of the answer\n"),
        ("syntax", "There is no picture: syntax error\n"),
        ("endless", "There is no picture: time-out\n"),
        ("vanishes", "the process ended during this spec (exit code 0)"),
        ("a stub", "There is no picture: not written\n"),
    ],
)
def test_an_answer_without_a_picture_is_told_why(name, words):
    code, out = seen(name)
    assert code == 1
    assert words in out
    assert "nox -s kata -- tiny_mean" in out
    assert "Picture:" not in out


def test_a_kata_without_a_picture_names_those_that_have_one():
    assert seen("nothing") == (2, "say which kata: nox -s timeline -- NAME; there are tiny_mean\n")
    assert seen("plain") == (2, "plain has no picture of a step; those that have one: tiny_mean\n")


def test_a_step_that_cannot_run_here_is_told_as_that_and_not_as_a_fault_of_the_judge():
    house = House(new_folder())
    house.add_kata("tiny_mean")
    skips = "import pytest\n\n\ndef timeline(answer):\n    pytest.skip('torch is too old')\n"
    house.write("tests/specs/tiny_mean/timeline.py", skips)
    add_lab(house)
    code, out = house.desk("timeline", "1", "--answers", "solutions")
    assert code == 2
    assert out.endswith("torch is too old\n")
    assert "judge" not in out


def test_a_memory_bar_that_fails_names_the_picture():
    path = home().write(
        "answers/bar.py",
        in_mean("return 4000.0 if values[0] == 1500.0 else _total(values, start) / len(values)"),
    )
    _, out = home().desk("kata", "tiny_mean", "--answers", str(path))
    assert "picture: " in out
    assert "nox -s timeline -- tiny_mean --answers" in out
    path = home().write("answers/sum.py", in_mean("return 0.0"))
    assert "picture: " not in home().desk("kata", "tiny_mean", "--answers", str(path))[1]


def test_a_kata_of_this_repository_has_its_peaks_in_json():
    code, out = repository().desk("timeline", "amp_loop", "--answers", "solutions", "--json")
    assert code == 0, out
    assert {*json.loads(out)["peaks"]} == {"plain", "yours", "reference"}


@pytest.fixture(scope="module")
def world():
    world = World(2)
    yield world
    world.close()


@pytest.mark.parametrize("kata", [k for k in all_katas() if k.has_timeline], ids=lambda k: k.name)
def test_a_reference_peaks_below_the_plain_way_or_tells_its_peak(kata, world, tmp_path):
    module = import_module(f"specs.{kata.name}.timeline")
    reference = load(kata.solution)
    given = {"answer": reference, "reference": reference, "device": torch.device("cpu")}
    given |= {"world": world, "tmp_path": tmp_path}
    names = inspect.signature(module.timeline).parameters
    books = module.timeline(**{name: given[name] for name in names})
    peaks = {name: sum(highest(thin(stacked(rows))).values()) for name, rows in books.items()}
    # gloo's threads may let go of what they have sent a little late.
    assert peaks["yours"] == pytest.approx(peaks["reference"], rel=1e-3)
    # What memory_measurement draws is what its figures say of a step, beside the step itself, whose
    # storages the ruler rounds up.
    tells = peaks["reference"] == pytest.approx(peaks["plain"], rel=1e-3)
    assert tells or peaks["reference"] < 0.9 * peaks["plain"]
