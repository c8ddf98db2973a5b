"""A limit counts work, or waiting, and a process that is starved has as much of it as any."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kit.patience import Patience, Spent, family, spent
from selftest.tiny import house, wait_for


class Clocks:
    """The wall clock and the processor time of two processes, which the test moves."""

    def __init__(self) -> None:
        self.wall, self.spent = 1000.0, {1: Spent(), 2: Spent()}

    def go(
        self,
        seconds: float,
        *shares: float,
        queued: float = 0.0,
        is_ready: bool = False,
        turns: int = 0,
    ) -> None:
        self.wall += seconds
        for pid, share in enumerate(shares, 1):
            old = self.spent[pid]
            self.spent[pid] = Spent(
                old.worked + seconds * share, old.queued + seconds * queued, is_ready, turns
            )

    def patience(self, limit: float) -> Patience:
        return Patience(limit, lambda: self.wall, self.spent.__getitem__)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def used(clocks: Clocks, seconds: int, *shares: float, queued: float = 0.0) -> float:
    limit = clocks.patience(1e9)
    for _ in range(seconds):
        clocks.go(1.0, *shares, queued=queued)
        limit.look(lambda: [1, 2])
    return limit.used


@pytest.mark.parametrize(
    ("shares", "want"),
    [
        pytest.param((1.0,), 40, id="it works all the time"),
        pytest.param((0.25,), 10, id="it gets a quarter of a processor"),
        pytest.param((0.25, 0.5), 20, id="the busiest counts"),
        pytest.param((4.0,), 40, id="four threads are no four seconds"),
        pytest.param((0.0,), 40, id="all wait"),
        pytest.param((0.05, 0.05), 40, id="to look around now and then is to wait"),
    ],
)
def test_forty_seconds_of_the_wall_clock_use_up(
    clocks: Clocks, shares: tuple[float, ...], want: float
) -> None:
    assert used(clocks, 40, *shares) == pytest.approx(want)


def test_to_be_ready_for_work_and_get_no_processor_is_not_to_wait(clocks: Clocks) -> None:
    assert used(clocks, 100, 0.05, queued=0.9) == pytest.approx(5)


def test_who_has_a_processor_that_does_not_run_does_not_wait(clocks: Clocks) -> None:
    """The host of a virtual machine takes it away for a while: nothing is counted until later."""
    limit = clocks.patience(100.0)
    for is_ready in (False, True, False):
        clocks.go(1.0, 0.0, is_ready=is_ready)
        limit.look(lambda: [1])
        assert limit.idle_seconds(1) == (0.0 if is_ready else 1.0)
    assert limit.used == pytest.approx(2.0)


def test_who_waits_again_and_again_is_not_idle(clocks: Clocks) -> None:
    """Ranks that take turns for many steps, on a busy machine: each works hardly at all."""
    limit = clocks.patience(100.0)
    for turns in (10, 20, 20):
        clocks.go(1.0, 0.01, turns=turns)
        limit.look(lambda: [1])
    assert limit.idle_seconds(1) == 1.0
    assert limit.used == pytest.approx(3.0)


def test_a_limit_ends_and_can_be_shortened(clocks: Clocks) -> None:
    limit = clocks.patience(10.0)
    clocks.go(4.0, 1.0)
    assert limit.look(lambda: [1])
    assert not limit.is_over
    limit.shorten(1.5)
    limit.shorten(100.0)
    clocks.go(0.2, 1.0)
    assert not limit.look(lambda: [1])  # too short to tell work from waiting
    assert limit.used == 4.0
    clocks.go(1.3, 1.0)
    limit.look(lambda: [1])
    assert limit.is_over


def test_it_knows_for_how_long_a_process_has_not_worked(clocks: Clocks) -> None:
    limit = clocks.patience(100.0)
    for shares in ((1.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        clocks.go(1.0, *shares)
        limit.look(lambda: [1, 2])
    assert limit.idle_seconds(1) == pytest.approx(1.0)
    assert limit.idle_seconds(2) == 0.0
    assert limit.idle_seconds(3) == 0.0


def test_a_machine_that_stood_still_has_told_nothing_of_who_waits(clocks: Clocks) -> None:
    limit = clocks.patience(100.0)
    clocks.go(30.0, 0.0, 0.0)
    limit.look(lambda: [1])
    assert limit.idle_seconds(1) == pytest.approx(1.0)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that works, and has a child that sleeps."""
    program = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "while True: pass"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    yield process
    for pid in reversed(family(process.pid)):
        subprocess.run(["kill", "-9", str(pid)], check=False)
    process.wait()


def test_it_reads_a_process_and_its_family(child: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: len(family(child.pid)) == 2)
    wait_for(lambda: spent(child.pid).worked > 0.2)
    assert spent(child.pid).is_ready
    assert not spent(os.getpid()).is_ready
    wait_for(lambda: not spent(family(child.pid)[1]).is_ready)  # it sleeps
    assert spent(child.pid).queued >= 0.0
    assert family(child.pid)[0] == child.pid
    assert child.pid in family()
    child.kill()
    child.wait()
    assert spent(child.pid) == Spent()
    assert family(child.pid) == [child.pid]


SPECS = """\
import time
import pytest

def test_short():  # first: what a run begins with is not to count against so short a limit
    time.sleep(0.7)

@pytest.mark.timeout(0.5)
def test_loop():
    while True:
        pass

@pytest.mark.timeout(0.5)
def test_sleep():
    time.sleep(50)
"""


BRIEF = """
import subprocess

for _ in range(400):
    with subprocess.Popen(["true"]) as brief:
        print(brief.pid, flush=True)
"""


def test_a_process_may_end_while_it_is_looked_at() -> None:
    """The judge looks at processes that end: that cost a verdict, one in some thousands."""
    with subprocess.Popen([sys.executable, "-c", BRIEF], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        for line in parent.stdout:
            assert all(spent(int(line)).worked < 1.0 for _ in range(8))


def test_specs_that_loop_or_wait_come_to_their_limit() -> None:
    house().write("tests/selftest/test_endless.py", SPECS)
    _, out = house().pytest("tests/selftest/test_endless.py", "-q", "-p", "no:randomly")
    assert "2 failed, 1 passed" in out
    assert out.count("Timeout (>0.5s) from pytest-timeout") >= 2
    assert "INTERNALERROR" not in out
