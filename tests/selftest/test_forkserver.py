"""One warm process: worlds of every size are forks of it, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing

import psutil
import pytest

from kit import forkserver
from kit.forkserver import is_gone
from kit.laws.checks import SpecFailure
from kit.ranks.world import World
from selftest import fork_programs
from selftest import world_programs as programs
from selftest.tiny import House, hears_ctrl_c, new_folder, wait_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ours():
    with closing(World(2)) as world:
        yield world


@pytest.fixture(scope="module")
def large():
    with closing(World(4)) as world:
        yield world


@pytest.mark.parametrize("size", [1, 3])
def test_a_world_has_the_size_that_it_is_told(bad, size):
    with closing(World(size)) as world:
        results = world.run(bad, programs.world_size)
        assert results == [(size, size * 1.0, forkserver.pid())] * size


def test_a_world_of_one_is_judged_like_the_others(bad):
    with closing(World(1)) as world:
        with pytest.raises(ValueError, match=r"^bad 0"):
            world.run(bad, programs.value_errors)
        with pytest.raises(SpecFailure, match="time-out: rank 0 is still at line"):
            world.run(bad, programs.on_rank_0, "endless", limit=0.5)
        with pytest.raises(SpecFailure, match=r"rank 0 has ended \(exit code 3\)"):
            world.run(bad, programs.on_rank_0, "vanish")
        assert world.run(bad, programs.who)[0][0] == 0


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


def test_a_world_that_is_closed_at_once_leaves_no_process_and_no_file():
    world = World(3)
    world.start()
    pids, folder = world.pids, world._folder
    assert len(pids) == 3
    world.close()
    assert not any(map(psutil.pid_exists, pids))
    assert not folder.exists()


def test_a_server_that_dies_is_replaced(ours, bad):
    ours.run(bad, programs.who)
    pids, old = ours.pids, forkserver.pid()
    os.kill(old, signal.SIGKILL)
    with closing(World(1)) as world:
        assert len(world.run(bad, programs.who)) == 1
    assert forkserver.pid() != old
    assert [pid for _, pid, *_ in ours.run(bad, programs.who)] == pids  # they need no server
    ours.close()
    wait_for(lambda: all(map(is_gone, [*pids, old])))


@pytest.mark.skipif(sys.platform != "linux", reason="there is no server")
def test_a_server_that_dies_between_two_looks_is_replaced_by_one_as_warm(monkeypatch, tmp_path):
    wait = forkserver.wait_until_warm

    def dies_then():
        wait()
        monkeypatch.undo()
        os.kill(forkserver.pid(), signal.SIGKILL)
        wait_for(lambda: psutil.Process(forkserver.pid()).status() == psutil.STATUS_ZOMBIE)

    monkeypatch.setattr(forkserver, "wait_until_warm", dies_then)
    here, there = forkserver.pipe()
    process = forkserver.fork(fork_programs.say, there, log=tmp_path / "log", has_forks=False)
    assert here.recv() == (process.pid, forkserver.pid(), process.pid, True)
    forkserver.end(process)
    assert forkserver.is_warm()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no server")
def test_what_is_preloaded_is_there_in_later_forks_and_what_is_missing_is_no_error(tmp_path):
    names = ["nobodys", "torch.nobodys", "wave"]

    def ask() -> list[bool]:
        here, there = forkserver.pipe()
        process = forkserver.fork(
            fork_programs.has, there, names, log=tmp_path / "log", has_forks=False
        )
        found = here.recv()
        forkserver.end(process)
        return found

    assert ask() == [False, False, False]
    before = forkserver.pid()
    forkserver.preload(names)
    wait_for(lambda: ask()[2])
    assert ask() == [False, False, True]
    forkserver.preload(names)  # once more does no harm
    assert ask() == [False, False, True]
    assert forkserver.pid() == before


@pytest.mark.skipif(sys.platform != "linux", reason="there is no server")
def test_a_fork_of_a_fork_comes_from_the_same_warm_server_and_ends_with_it(tmp_path):
    here, there = forkserver.pipe()
    process = forkserver.fork(
        fork_programs.fork_again, there, str(tmp_path), log=tmp_path / "l", has_forks=True
    )
    first, second, parent, group, is_warm, told = here.recv()
    assert (first, second, parent) == (process.pid, told, forkserver.pid())
    assert group == second
    assert is_warm
    assert forkserver.end(process) == -signal.SIGKILL
    wait_for(lambda: is_gone(second))


def test_where_a_fork_is_not_safe_a_process_starts_afresh(monkeypatch, tmp_path):
    monkeypatch.setattr(forkserver, "_is_safe", lambda: False)
    here, there = forkserver.pipe()
    process = forkserver.fork(fork_programs.say, there, log=tmp_path / "log", has_forks=False)
    assert here.poll(100), forkserver.read(tmp_path / "log")
    assert here.recv() == (process.pid, os.getpid(), process.pid, True)
    assert forkserver.end(process) == -signal.SIGKILL


def test_a_process_that_has_ended_keeps_its_exit_code(tmp_path):
    process = forkserver.fork(fork_programs.exit_with, 7, log=tmp_path / "log", has_forks=False)
    process.join()
    assert forkserver.end(process) == 7


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
        Path(os.environ["NOTES"], f"pid{pid}").touch()
    time.sleep(seconds)
"""


def test_runs_at_the_same_time_do_not_meet_and_leave_nothing_behind(ours, bad):
    home = House(new_folder())
    home.add_kata("endless")
    for path in (home.root / "tests/specs/endless").glob("test_*"):
        path.unlink()
    home.write("tests/specs/endless/test_part1.py", ENDLESS_SPECS)
    home.write("tests/specs/endless/ranks.py", ENDLESS_RANKS)
    runs = []
    for number in (signal.SIGINT, signal.SIGKILL):  # three runs take a gigabyte
        folder = home.root / number.name
        folder.mkdir()
        variables = {
            "TMPDIR": str(folder),
            "NOTES": str(folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        with hears_ctrl_c():
            run = home.start("pytest", "tests/specs/endless", "--answers=solutions", **variables)
        runs.append((number, folder, run))
    for number, folder, run in runs:
        wait_for(lambda folder=folder: len([*folder.glob("pid*")]) == 4)  # the server, 1 + 2 ranks
        pids = [int(path.name.removeprefix("pid")) for path in folder.glob("pid*")]
        assert not any(map(is_gone, pids))
        assert len(ours.run(bad, programs.who)) == 2
        # The terminal sends Ctrl-C to all of them.
        for pid in [*pids, run.pid] if number == signal.SIGINT else [run.pid]:
            os.kill(pid, number)
        run.communicate(timeout=300)
        assert run.returncode == (2 if number == signal.SIGINT else -number)
        wait_for(lambda pids=pids: all(map(is_gone, pids)))
        wait_for(lambda folder=folder: not [*folder.glob("memory-katas-*"), *folder.glob("pymp-*")])
