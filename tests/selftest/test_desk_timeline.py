"""`timeline`: the picture, its peaks, and what is said of an answer that comes to none."""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from importlib import import_module

import pytest
import torch

from kit.answers.loading import load
from kit.catalog import all_katas
from kit.memory.stack import highest, stacked, thin
from kit.ranks.world import World
from selftest.tiny import house
from selftest.tiny_answers import answer, in_mean, judge_text

pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
pytestmark = pytest.mark.timeout(120)


def seen(name: str, text: str = "") -> tuple[int, str]:
    """What is said of the picture of a kata, or of tiny_mean for an answer of this text."""
    answers = ()
    if text:
        answers = ("--answers", str(house().write(f"answers/{name}.py", text)))
    code, out = house().desk("timeline", "tiny_mean" if text else name, *answers)
    assert max(map(len, out.splitlines())) <= 100, out
    assert "Traceback" not in out
    return code, out


def test_the_peaks_of_three_ways_and_the_place_of_the_picture():
    code, out = seen("large", in_mean("return 3.0"))
    assert code == 0
    assert "Tiny mean - one step of answers/large.py\n" in out
    peaks = re.findall(r"^  (\w+) +peak ([\d.]+) KiB$", out, re.M)
    sizes = {name: float(size) for name, size in peaks}
    assert sizes["reference"] < sizes["yours"] < sizes["plain"]
    assert out.endswith("Picture: lab-report/timeline-tiny_mean.png (and .svg)\n")
    for suffix in (".png", ".svg"):
        assert (house().root / "lab-report" / f"timeline-tiny_mean{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("raises", in_mean("raise ValueError('x')"), "got       ValueError: x\n"),
        ("syntax", answer(("import math", "import math(")), "There is no picture: syntax error\n"),
        ("tiny_mean", "", "There is no picture before this is written: katas/tiny_mean.py:"),
    ],
)
def test_an_answer_without_a_picture_is_told_why(name, text, words):
    code, out = seen(name, text)
    assert code == 1
    assert words in out
    assert "nox -s kata -- tiny_mean" in out
    assert "Picture:" not in out


def test_a_kata_without_a_picture_names_those_that_have_one_and_torch_may_be_too_old():
    for name in ("plain", "skips"):
        house().add_kata(name)
    skips = "import pytest\n\n\ndef timeline(answer):\n    pytest.skip('torch is too old')\n"
    house().write("tests/specs/skips/timeline.py", skips)
    there = "tiny_mean, skips\n"
    assert seen("plain") == (2, f"plain has no picture of a step; those that have one: {there}")
    code, out = house().desk("timeline", "skips", "--answers", "solutions")
    assert code == 2
    assert out.endswith("torch is too old\n")
    assert "judge" not in out


def test_a_memory_bar_that_fails_names_the_picture():
    text = in_mean("return 4000.0 if values[0] == 1500.0 else _total(values, start) / len(values)")
    out = judge_text("bar", text)[1]
    assert "picture: " in out
    assert "nox -s timeline -- tiny_mean --answers" in out
    assert "picture: " not in judge_text("sum", in_mean("return 0.0"))[1]


@pytest.fixture(scope="module")
def world():
    with closing(World(2)) as world:
        yield world


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
