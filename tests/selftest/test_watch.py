"""`watch` and the debugger in a terminal, as somebody uses them: save, read, press a key."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from desk import watch as watch_module
from desk.inbox import take
from desk.paper import Paper
from desk.state import State
from desk.watch import Watch
from kit.answers.stubs import make_stub
from kit.catalog import find_kata
from kit.forkserver import is_gone
from selftest.terminal import KEYS, Terminal
from selftest.tiny import SOLUTION, House, hears_ctrl_c, new_folder, wait_for
from selftest.tiny_answers import answer, in_mean

pytestmark = pytest.mark.timeout(120)

WRONG = answer(("math.fsum([start, *values])", "math.fsum(values)"))
_IDLE = 3  # processes: the watch, the warm one, the tracker of the library
# And those that have collected for the next verdict: a second one has a core for itself.
_READY = _IDLE + (2 if len(getattr(os, "sched_getaffinity", lambda _: [0])(0)) > 1 else 1)


@pytest.fixture(scope="module")
def watch() -> Iterator[Terminal]:
    home = House(new_folder())
    for name in ("tiny_mean", "tiny_other", "tiny_third"):
        home.add_kata(name)
    watch = Terminal(home, "watch", "tiny_mean")
    watch.until(KEYS)
    yield watch
    pids = watch.family()
    watch.screen.send("q")
    watch.screen.expect(pexpect.EOF)
    watch.screen.wait()
    assert watch.screen.exitstatus == 0
    wait_for(lambda: all(map(is_gone, pids)))


def fail(watch: Terminal) -> None:
    """Have a verdict on an answer that is wrong in the details of part 1."""
    watch.save(WRONG)
    seen = watch.verdict()
    assert "failing at the details of part 1 of 2" in seen, seen


def test_edit_fail_fix_pass_and_the_part_that_failed_is_judged_first(watch: Terminal) -> None:
    fail(watch)
    watch.save(in_mean("return 7.0"))
    seen = watch.verdict()
    assert "FAIL  survives  starts where it is told" in seen
    assert "the mean = 3.0" in seen
    watch.save(SOLUTION)
    seen = watch.verdict()
    assert seen.index("Details of part 1 passed: 2 specs") < seen.index(
        "Core part 1 passed: 4 specs"
    )
    assert "Verdict: passed (9 passed, 1 not checked)" in seen
    assert "solutions/tiny_mean.py" in seen
    assert "press n for the next kata" in seen
    watch.save(answer(("self.count += self.step", "self.count += 1")))
    assert "failing at part 2 of 2" in watch.verdict()
    watch.save(answer(("self.count += self.step", "self.count += 2")))
    seen = watch.verdict()
    assert "Core part 2 of 2: Counter" in seen
    assert "part 1 passed" not in seen


def _replace(path: Path, text: str) -> None:
    other = path.with_name(f".{path.name}.tmp")
    other.write_text(text)
    os.replace(other, path)


def _rename(path: Path, text: str) -> None:
    path.rename(path.with_name(f"{path.name}~"))
    path.write_text(text)


def _truncate(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.flush()
        time.sleep(0.1)
        file.write(text)


def _delete(path: Path, text: str) -> None:
    path.unlink()
    time.sleep(0.1)
    path.write_text(text)


def _back_up(path: Path, text: str) -> None:
    shutil.copy(path, path.with_name(f"{path.name}.bak"))
    path.with_name(f"#{path.name}#").write_text("half")
    path.write_text(text)
    path.with_name(f"#{path.name}#").unlink()


def test_every_way_to_save_is_one_verdict(watch: Terminal) -> None:
    ways, seen = (_replace, _rename, _truncate, _delete, _back_up), ""
    for how in ways:
        watch.save(SOLUTION, how)
        seen += watch.verdict()
    with pytest.raises(pexpect.TIMEOUT):
        watch.screen.expect_exact("judging", timeout=0.6)
    assert seen.count("Verdict: passed") == seen.count("katas/tiny_mean.py at ") == len(ways), seen


def test_a_file_that_is_gone_or_broken_and_a_save_during_a_run(watch: Terminal) -> None:
    watch.path.unlink()
    assert "katas/tiny_mean.py is gone. Save it again, or press r" in watch.until(KEYS)
    watch.save(answer(("import math", "import math(")))
    seen = watch.verdict()
    assert "This file cannot be judged: syntax error" in seen
    assert "at        katas/tiny_mean.py:5" in seen
    watch.save(in_mean("while True:", "    pass"))
    watch.until("judging")
    watch.until("still running, for 20 s at most: is the sum over the count")
    watch.save(SOLUTION)
    seen = watch.verdict()
    assert seen.count("Verdict") == 1
    assert "Verdict: passed" in seen


def test_processes_that_have_collected_judge_the_next_save_unless_a_spec_has_changed(
    watch: Terminal,
) -> None:
    fail(watch)
    wait_for(lambda: len(watch.family()) == _READY)
    ready = {*watch.family()}
    watch.save(in_mean("while True:", "    pass"))  # so that none is ready for the next yet
    watch.until("judging")
    assert {*watch.family()} <= ready
    fail(watch)
    spec = watch.home.root / "tests" / "specs" / "tiny_mean" / "test_part1_mean.py"
    text = spec.read_text(encoding="utf-8")
    wait_for(lambda: len(watch.family()) == _READY)
    spec.write_text(text.replace("[1.0], start=2.0), 3.0", "[1.0], start=2.0), 1.0"))
    watch.save(WRONG)
    seen = watch.verdict()
    spec.write_text(text)
    assert "Verdict: passed" in seen, seen


def test_a_fork_bomb_ends_in_a_sentence(watch: Terminal) -> None:
    watch.save(in_mean("import os", "while True:", "    os.fork()"))
    seen = watch.verdict()
    assert "more than 256 processes, which were all ended" in seen, seen
    assert re.search(r"at        katas/tiny_mean\.py:\d+ in mean\n +os\.fork\(\)", seen)
    wait_for(lambda: len(watch.family()) == _READY)


def test_keys_for_a_part_and_for_everything(watch: Terminal) -> None:
    watch.save(answer(("self.count += self.step", "self.count += 1"), ("/ len(", "// len(")))
    watch.verdict()
    watch.screen.send("a")
    seen = watch.verdict()
    assert seen.count("  FAIL  ") >= 2
    watch.screen.send("p")
    assert "Press one of 1, 2, or 0 for the whole kata." in watch.until("whole kata.")
    watch.screen.send("2")
    seen = watch.verdict()
    assert "Tiny mean, part 2 - katas/tiny_mean.py at" in seen
    assert "part 1" not in seen
    watch.screen.send("p9")
    watch.until("tiny_mean has no part '9'. Left as it is.")
    watch.screen.send("\x1b[Ap\r")  # an arrow means nothing
    assert KEYS not in watch.until("Left as it is.")
    watch.screen.send("p0")
    assert "failing at part" in watch.verdict()


def test_keys_for_hints_which_go_on_for_the_path_and_for_a_fresh_stub(watch: Terminal) -> None:
    fail(watch)
    watch.screen.send("h")
    assert "part 1: mean - hint" in watch.until("h shows the next one.")
    watch.screen.send("h")
    assert "- hint" in watch.until("h shows the next one.")
    watch.screen.send("o")
    line = SOLUTION.splitlines().index(
        "def mean(values: list[float], *, start: float = 0.0) -> float:"
    )
    watch.until(f"{watch.path}:{line + 1}")

    before = watch.path.read_text()
    for no in ("rx", "r\x1b"):
        watch.screen.send(no)
        watch.until("Left as it is.")
    assert watch.path.read_text() == before
    watch.screen.send("ry")
    assert "is kept as katas/tiny_mean.old-" in watch.until("is a fresh stub.")
    assert watch.path.read_text() == make_stub(SOLUTION)
    assert "part 1 of 2 is not written yet" in watch.verdict()
    kept = watch.path.parent.glob("tiny_mean.old-*.py")
    assert before in [path.read_text() for path in kept]


def test_breakpoint_has_the_terminal_and_gives_it_back(watch: Terminal) -> None:
    watch.save(in_mean("breakpoint()", "return _total(values, start) / len(values)"))
    watch.until("(Pdb) ")
    watch.screen.sendline("p 6 * 7")
    watch.until("42")
    watch.until("(Pdb) ")
    watch.screen.sendline("q")
    assert "stopped in the debugger" in watch.verdict()
    watch.screen.send("x")  # no key, which is answered with those there are
    watch.until(KEYS)


def test_two_watches_at_once_and_a_key_for_the_next_kata(watch: Terminal) -> None:
    fail(watch)  # what the test before has left may be an endless answer, or a breakpoint
    other = Terminal(watch.home, "watch", "tiny_mean")
    other.until(KEYS)
    watch.save(SOLUTION)
    assert "Verdict: passed" in watch.verdict()
    assert "Verdict: passed" in other.verdict()
    other.screen.send("n")
    assert "Tiny other - katas/tiny_other.py at" in other.verdict()
    watch.save(SOLUTION)
    assert "Verdict: passed" in watch.verdict()
    other.until("katas/tiny_mean.py was saved, which is not watched: press n to watch it")
    other.screen.send("n")
    assert "Tiny mean - katas/tiny_mean.py at" in other.verdict()
    wait_for(lambda: len(other.family()) > _IDLE)
    pids = other.family()
    other.screen.sendintr()
    has_stopped(other)
    wait_for(lambda: all(map(is_gone, pids)))
    wait_for(lambda: not [*other.temporary.iterdir()])


def has_stopped(watch: Terminal) -> None:
    watch.until("Stopped; nothing was left running.")
    watch.screen.expect(pexpect.EOF)
    watch.screen.wait()
    assert watch.screen.exitstatus == 130


def test_a_run_that_is_begun_while_somebody_presses_ctrl_c_is_ended(monkeypatch):
    ended = []

    class Begun:
        def __init__(self, *_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        def end(self) -> None:
            ended.append(self)

    monkeypatch.setattr(watch_module, "Run", Begun)
    paper = Paper()
    kata = find_kata("amp_loop")
    watch = Watch(paper, State(paper.note), kata, queue.SimpleQueue(), None, 20.0)
    with hears_ctrl_c(), pytest.raises(KeyboardInterrupt):
        watch.judge()
    watch.end_run()
    assert len(ended) == 1


@pytest.mark.parametrize("when", ["starting", "judging", "killed"])
def test_ctrl_c_and_a_kill_leave_nothing(watch: Terminal, when: str) -> None:
    """While it waits: above, where two watch at once."""
    watch.home.write("katas/tiny_third.py", in_mean("while True:", "    pass"))
    ended = Terminal(watch.home, "watch", "tiny_third")
    ended.until("judging")
    if when != "starting":
        wait_for(lambda: len(ended.family()) > _IDLE)
    pids = ended.family()
    if when == "killed":
        os.kill(ended.screen.pid, signal.SIGKILL)
        ended.close()
    else:
        ended.screen.sendintr()
        has_stopped(ended)
    wait_for(lambda: all(map(is_gone, pids)))
    wait_for(lambda: not [*ended.temporary.iterdir()])


def test_a_ctrl_c_that_does_not_wake_the_wait_ends_it_all_the_same() -> None:
    """It comes a moment before the wait, or as here to another thread."""
    me = threading.get_ident
    interrupt = threading.Timer(0.1, lambda: signal.pthread_kill(me(), signal.SIGINT))
    with hears_ctrl_c():
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            take(queue.SimpleQueue())
