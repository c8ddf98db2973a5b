"""How long somebody waits: from a save to the first failure, and for a whole verdict.

Each round saves another mistake of the catalogue into a copy of the repository that is watched in a
terminal, so the part that failed last is seldom the one that fails next: the harder case. Before it
there is time to write a line.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from kit.answers.catalogue import catalogue
from kit.catalog import ROOT, Kata, all_katas
from selftest.terminal import KEYS, Terminal
from selftest.tiny import House, new_folder

ROUNDS = 30
KATAS = all_katas()

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=KATAS, ids=[kata.name for kata in KATAS])
def kata(request: pytest.FixtureRequest) -> Kata:
    found: Kata = request.param
    return found


@pytest.fixture
def watch(kata: Kata) -> Iterator[Terminal]:
    watch = Terminal(_copy(), "watch", kata.name, stub=f"katas/{kata.name}.py")
    watch.until(KEYS)
    yield watch
    watch.close()


def _copy() -> House:
    home = House(new_folder())
    for folder in ("katas", "solutions", "tests"):
        skip = shutil.ignore_patterns("__pycache__", "right", "selftest", "bench")
        shutil.copytree(ROOT / folder, home.root / folder, ignore=skip, dirs_exist_ok=True)
    (home.root / "tmp").mkdir()
    return home


def test_first_failure_after_a_save(benchmark, kata: Kata, watch: Terminal) -> None:
    reference = kata.solution.read_text(encoding="utf-8")
    mistakes, _ = catalogue(kata)
    texts = iter([m.source(reference) for m in mistakes[:: len(mistakes) // ROUNDS]])

    def save() -> None:
        watch.save(next(texts))
        watch.until("FAIL", "cannot be judged", "Verdict")

    def write() -> None:
        watch.until(KEYS)
        time.sleep(2.0)

    benchmark.pedantic(save, teardown=write, rounds=ROUNDS)


def test_a_whole_verdict_after_a_save(benchmark, kata: Kata, watch: Terminal) -> None:
    def save() -> None:
        watch.save(kata.solution.read_text(encoding="utf-8"))
        watch.until("Verdict: passed")

    benchmark.pedantic(save, teardown=lambda: watch.until(KEYS), rounds=5)


def test_a_whole_verdict_without_anything_warm(benchmark, kata: Kata) -> None:
    def judge(home: House) -> None:
        code, _ = home.desk("kata", kata.name, "--answers", "solutions")
        assert code == 0

    benchmark.pedantic(judge, setup=lambda: ((_copy(),), {}), rounds=5)


def test_the_board(benchmark) -> None:
    def board(home: House) -> None:
        code, _ = home.desk("board")
        assert code == 0

    benchmark.pedantic(board, setup=lambda: ((_copy(),), {}), rounds=5)
