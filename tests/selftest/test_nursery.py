"""One nursery: worlds of every size that know nothing of each other, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.answers.loading import load
from kit.laws.checks import SpecFailure
from kit.ranks.nursery import Nursery
from kit.ranks.world import World
from selftest import world_programs as programs
from selftest.tiny import House, hears_ctrl_c, new_folder

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def ours(nursery):
    return World(2, nursery)


@pytest.fixture(scope="module")
def large(nursery):
    return World(4, nursery)


@pytest.fixture(scope="module")
def bad():
    path = new_folder() / "bad.py"
    path.write_text(programs.ANSWER, encoding="utf-8")
    return load(path)


def _await(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("size", [1, 3])
def test_a_world_has_the_size_that_it_is_told(nursery, bad, size):
    world = World(size, nursery)
    try:
        results = world.run(bad, programs.world_size)
        assert results == [(size, size * 1.0, nursery.pid)] * size
    finally:
        world.close()


def test_a_world_of_one_is_judged_like_the_others(nursery, bad):
    world = World(1, nursery)
    try:
        with pytest.raises(ValueError, match=r"^bad 0"):
            world.run(bad, programs.value_errors)
        with pytest.raises(SpecFailure, match="time-out: rank 0 is still at line"):
            world.run(bad, programs.on_rank_0, "endless", limit=1.0)
        with pytest.raises(SpecFailure, match=r"rank 0 has ended \(exit code 3\)"):
            world.run(bad, programs.on_rank_0, "vanish")
        assert world.run(bad, programs.who)[0][0] == 0
    finally:
        world.close()


def test_a_world_that_breaks_leaves_the_others_as_they_are(ours, large, bad):
    ours.run(bad, programs.who)
    large.run(bad, programs.who)
    pids = ours.pids
    with pytest.raises(SpecFailure):
        large.run(bad, programs.on_rank_0, "vanish")
    assert large.pids == []
    assert [pid for _, pid, *_ in ours.run(bad, programs.who)] == pids
    assert len(large.run(bad, programs.who)) == 4
    large.close()
    assert [pid for _, pid, *_ in ours.run(bad, programs.who)] == pids


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_world_that_is_closed_at_once_leaves_no_process_and_no_file(ours, nursery, bad):
    ours.run(bad, programs.who)
    children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
    before = children.read_text()
    world, other = World(3, nursery), World(1, nursery)
    world.start()
    world.close()
    other.run(bad, programs.who)  # now the nursery has done what it was asked before
    other.close()
    _await(lambda: not world._folder.exists() and not other._folder.exists())
    assert children.read_text() == before


def test_a_nursery_that_dies_is_replaced(ours, large, nursery, bad):
    ours.run(bad, programs.who)
    large.run(bad, programs.who)
    pids, old = [*ours.pids, *large.pids], nursery.pid
    os.kill(old, signal.SIGKILL)
    _await(lambda: not nursery.is_home_of(ours._folder))
    assert len(large.run(bad, programs.who)) == 4
    assert len(ours.run(bad, programs.who)) == 2
    assert nursery.pid != old
    assert not {*pids} & {*ours.pids, *large.pids}
    _await(lambda: not any(map(_is_alive, [*pids, old])))


# What a run of pytest leaves behind that is ended from outside, in a world of one and one of two.

ENDLESS_SPECS = """\
import pytest

from specs.endless import ranks


@pytest.mark.parametrize("world", [1], indirect=True)
def test_one(answer, world):
    world.run(answer, ranks.note)


def test_two(answer, world):
    world.run(answer, ranks.note, 100, limit=100)
"""

ENDLESS_RANKS = """\
import os
import time
from pathlib import Path


def note(answer, rank, seconds=0):
    for pid in (os.getpid(), os.getppid()):
        Path(os.environ["TMPDIR"], f"pid{pid}").touch()
    time.sleep(seconds)
"""


@pytest.fixture
def endless():
    home = House(new_folder())
    home.add_kata("endless")
    for path in (home.root / "tests/specs/endless").glob("test_*"):
        path.unlink()
    home.write("tests/specs/endless/test_part1.py", ENDLESS_SPECS)
    home.write("tests/specs/endless/ranks.py", ENDLESS_RANKS)
    return home


def test_runs_at_the_same_time_do_not_meet_and_leave_nothing_behind(endless, ours, bad):
    runs = []
    for name in ("SIGINT", "SIGTERM", "SIGKILL"):
        folder = endless.root / name
        folder.mkdir()
        variables = {"TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with hears_ctrl_c():
            run = endless.start("pytest", "tests/specs/endless", **variables)
        runs.append((signal.Signals[name], folder, run))
    for number, folder, run in runs:
        _await(lambda folder=folder: len([*folder.glob("pid*")]) == 4)  # the nursery, 1 + 2 ranks
        pids = [int(path.name.removeprefix("pid")) for path in folder.glob("pid*")]
        assert all(map(_is_alive, pids))
        assert len(ours.run(bad, programs.who)) == 2
        # The terminal sends Ctrl-C to all of them.
        for pid in [*pids, run.pid] if number == signal.SIGINT else [run.pid]:
            os.kill(pid, number)
        run.communicate(timeout=300)
        assert run.returncode == (2 if number == signal.SIGINT else -number)
        _await(lambda pids=pids: not any(map(_is_alive, pids)))
        _await(lambda folder=folder: not [*folder.glob("memory-katas-world-*")])
