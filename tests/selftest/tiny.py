"""A house of its own for the tests of the desk: a copy of kit and desk, and tiny katas.

Nothing in the copied files knows these katas, which is the proof that a kata is added by adding
files and one row. Nothing of the candidate's is in the copy.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kit.answers.stubs import make_stub
from kit.catalog import ROOT
from selftest import desk_host
from selftest.tiny_plan import PLAN, TIMELINE

SOLUTION = '''\
"""Tiny mean: the smallest kata that has all of a kata."""

from __future__ import annotations

import math
from typing import NamedTuple


class Pair(NamedTuple):
    """Given: two numbers."""

    low: float
    high: float


def mean(values: list[float], *, start: float = 0.0) -> float:
    """The mean of `values`, added up from `start`; ValueError if there are none."""
    if not values:
        raise ValueError("values is empty")
    return _total(values, start) / len(values)


def _total(values: list[float], start: float) -> float:
    return math.fsum([start, *values])


class Counter:
    """Counts in steps of `step`."""

    def __init__(self, step: int) -> None:
        """Start at 0."""
        self.step, self.count = step, 0

    def add(self) -> int:
        """One step more; the new count."""
        self.count += self.step
        return self.count

    def limits(self) -> Pair:
        """From 0 to the count."""
        return Pair(0, self.count)
'''

SPECS_1 = """\
import pytest

from kit.laws.checks import check_bar, check_equal, check_raises


class TestPart1Mean:
    subject = "mean"

    @pytest.mark.works
    @pytest.mark.parametrize("values", [[1.0, 2.0, 6.0], [4.0]], ids=["three", "one"])
    def test_is_the_sum_over_the_count(self, answer, values):
        check_equal(answer.mean(values), sum(values) / len(values), "the mean", cause="a wrong sum")

    @pytest.mark.exact
    def test_loses_no_digits(self, answer):
        check_equal(answer.mean([1e100, 1.0, -1e100, 1.0]), 0.5, "the mean", cause="plain sum()")

    @pytest.mark.saves
    def test_holds_few_bytes(self, answer, reference):
        yours, best = (int(a.mean([1500.0, 2500.0])) for a in (answer, reference))
        check_bar("peak", yours, 0.6 * 4096, formula="0.6 * plain", cause="a copy of the list",
                  plain=4096, reference=best)

    @pytest.mark.survives
    def test_refuses_no_values(self, answer):
        check_raises(lambda: answer.mean([]), ValueError, mentions=["empty"], when="given nothing")

    @pytest.mark.survives
    def test_starts_where_it_is_told(self, answer):
        check_equal(answer.mean([1.0], start=2.0), 3.0, "the mean", cause="start is not used")
"""

SPECS_2 = """\
import pytest

from kit.laws.checks import check, check_equal


class TestPart2Counter:
    subject = "Counter"

    @pytest.mark.works
    def test_counts_in_steps(self, answer):
        counter = answer.Counter(3)
        check_equal([counter.add(), counter.add()], [3, 6], "two counts", cause="step is not used")

    @pytest.mark.exact
    def test_knows_its_limits(self, answer):
        counter = answer.Counter(2)
        check_equal(counter.limits().high, 0, "the limit", cause="not counted")

    @pytest.mark.saves
    @pytest.mark.gpu
    def test_saves_on_a_gpu(self, answer):
        check(answer.Counter(1) is not None, expected="a counter", got=None, cause="none")

    @pytest.mark.survives
    def test_survives_a_step_of_zero(self, answer):
        check_equal(answer.Counter(0).add(), 0, "the count", cause="zero is not special")
"""


def entry(name: str, line: str, caught: str = "") -> str:
    """An entry of the catalogue: another line instead of that of `_total`."""
    caught = caught and f"Caught by {caught}\n\n"
    diff = f"@@ _total @@\n-    {TOTAL}\n+    {line}\n"
    return f"\n### {name}\n\nBelieved of {name}.\n\n{caught}```diff\n{diff}```\n"


TOTAL = "return math.fsum([start, *values])"
THREE = "`test_is_the_sum_over_the_count[three]`"
MISTAKES = (
    "# Mistakes in Tiny mean\n"
    + entry("forgets_one", "return math.fsum([start, *values[:-1]])", f"{THREE}: the mean = 3.0")
    + entry("ignores_start", "return math.fsum(values)", "`test_starts_where_it_is_told`: not used")
)
VARIANTS = "\n## Accepted variants\n" + entry("start_last", "return math.fsum([*values, start])")

RIGHT = SOLUTION.replace("self.count += self.step", "self.count = self.count + self.step")

HINTS = """\
# Hints: Tiny mean

## Part 1: mean

### 1 A question
What is the mean of one number?

### 2 An input that fails
`[1e100, 1.0, -1e100]`

### 3 The kind of mistake
Rounding.

### 4 The invariant
The error does not grow with the count.

## Part 2: Counter

### 1 A question
What does a step of zero do?
"""

WALK_THROUGH = """\
# Walk-through: Tiny mean

## Part 1: mean

| bar | plain | reference |
|---|---|---|
| peak | 4,096 | 2,000 |

## What to ask next, and good answers

- *Why not `statistics.fmean`,
  which does the same?* It does; read it.
- *What of a stream?* Welford.
- *And a third?* It is not shown.
"""

_ROW = """\
[{name}]
title = "{title}"
summary = "Tiny"
parts = [
    {{ lap = "core", minutes = 5, title = "mean - the middle of some numbers" }},
    {{ lap = "core", minutes = 0, title = "Counter - steps of a given size" }},
]
"""


def row_of(name: str) -> str:
    """What katas.toml has of such a kata."""
    return _ROW.format(name=name, title=name.replace("_", " ").capitalize())


class Repository:
    """A repository, and one process for many commands in it, so that torch is imported once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._host: subprocess.Popen[str] | None = None

    def start(
        self, *arguments: str, new_group: bool = False, **variables: str
    ) -> subprocess.Popen[str]:
        """`python -m ...` at home in this repository."""
        return self._popen("-m", *arguments, new_group=new_group, **variables)

    def _popen(
        self, *arguments: str, new_group: bool = False, stdin: int | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        # What a house has compiled need not be compiled again, whatever is set outside of it.
        unwanted = ("FORCE_COLOR", "PYTHONDONTWRITEBYTECODE")
        env = {k: v for k, v in os.environ.items() if k not in unwanted and "PYTEST" not in k}
        env |= {"PYTHONPATH": str(self.root / "tests"), "COLUMNS": "100", **variables}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=new_group,
        )

    def run(self, *arguments: str, **variables: str) -> Result:
        """Its exit code and everything that it printed."""
        process = self.start(*arguments, **variables)
        out, _ = process.communicate(timeout=600)  # the specs' own limits end it
        return process.returncode, out

    def desk(self, *arguments: str, **variables: str) -> Result:
        """`python -m desk ...`, but in the one process."""
        line = json.dumps({"words": arguments, "variables": variables}) + "\n"
        while True:
            if self._host is None or self._host.poll() is not None:
                self._host = self._popen(desk_host.__file__, stdin=subprocess.PIPE)
            with suppress(BrokenPipeError):  # it has just left, for nobody asked for long
                self._host.stdin.write(line)
                self._host.stdin.flush()
            if answer := self._host.stdout.readline():
                return tuple(json.loads(answer))
            self._host.wait()

    def pytest(self, *arguments: str) -> Result:
        """`python -m pytest ...`, but in a fork of the same warm process as the desk's verdicts."""
        return self.desk("pytest", *arguments)


class House(Repository):
    """A small one in a temporary folder."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for folder in ("kit", "desk"):
            self._copy(folder)
        shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
        shutil.copy(ROOT / "pyproject.toml", root)

    def add_kata(self, name: str) -> None:
        """Everything that a new kata is: some files and one row."""
        self.write(f"solutions/{name}.py", SOLUTION)
        self.write(f"solutions/{name}.md", WALK_THROUGH)
        self.write(f"katas/{name}.py", make_stub(SOLUTION))
        self.write(f"katas/hints/{name}.md", HINTS)
        self.write(f"tests/specs/{name}/test_part1_mean.py", SPECS_1)
        self.write(f"tests/specs/{name}/test_part2_counter.py", SPECS_2)
        self.write(f"tests/mistakes/{name}.md", MISTAKES + VARIANTS)
        self.write(f"tests/right/{name}/other.py", RIGHT)
        with (self.root / "katas" / "katas.toml").open("a", encoding="utf-8") as rows:
            rows.write(row_of(name))

    def add_plan_and_timeline(self) -> None:
        """Give tiny_mean a plan, and a picture, which the lab draws."""
        self.write("tests/specs/tiny_mean/plan.py", PLAN)
        self.write("tests/specs/tiny_mean/timeline.py", TIMELINE)
        self._copy("lab")

    def _copy(self, folder: str) -> None:
        skip = shutil.ignore_patterns("*.pyc.*")  # another process compiles it just now
        shutil.copytree(ROOT / "tests" / folder, self.root / "tests" / folder, ignore=skip)

    def write(self, path: str, text: str) -> Path:
        """Write one file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file


Result = tuple[int, str]


@contextmanager
def hears_ctrl_c() -> Iterator[None]:
    """A run in the background may ignore SIGINT, and what it starts would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait until it is so; the time limit of the test ends it otherwise."""
    while not is_so():
        time.sleep(0.02)


@cache
def house() -> House:
    """One house for all tests that change nothing of its kata tiny_mean; they may add others.

    So which kata is in hand there nobody knows.
    """
    home = House(new_folder())
    home.add_kata("tiny_mean")
    home.add_plan_and_timeline()
    return home


def new_folder() -> Path:
    """An empty folder that goes when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="memory-katas-test-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
