"""Two processes judge one answer, and the verdict is that of one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest

from desk.events import FAILED, Collected, Event, Outcome, Spec
from desk.judge import _Run
from desk.judging_process import JudgingProcess
from desk.recorder import _claimed
from desk.verdict import Job
from kit.catalog import Kata
from kit.patience import family
from selftest.tiny import wait_for
from selftest.tiny_answers import MEAN, answer, block, judge_text

pytestmark = pytest.mark.timeout(300)
TWO_CORES = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False
SLOW = "    import os, time\n    print('pid', os.getpid())\n    time.sleep(0.4)\n"
ADD = "        self.count += self.step\n"


def pids(out: str) -> set[str]:
    return set(re.findall(r"pid (\d+)", out))


def test_both_take_specs_and_all_is_told_once_and_in_its_order():
    text = answer((MEAN, SLOW + MEAN), ("import math", "import math\nprint('imported')"))
    for _ in range(3):  # on a busy machine the second one may come when all is done
        code, out = judge_text("slow", text, "-v")
        assert code == 0
        if len(pids(out)) == 2:
            break
    assert len(pids(out)) == (2 if TWO_CORES else 1)
    assert "Verdict: passed (9 passed, 1 not checked)" in out
    order = ["is the sum", "loses no digits", "few bytes", "counts in steps", "knows its limits"]
    places = [out.index(sentence) for sentence in order]
    assert places == sorted(places)
    assert out.count("imported") == 1


@pytest.mark.parametrize("comment", ["# breakpoint() here?", "# pdb.set_trace()", "# no more"])
def test_one_is_enough_where_a_debugger_may_ask(comment, tmp_path):
    path = tmp_path / "debugged.py"
    path.write_text(comment)
    assert Job(Kata("tiny", "Tiny", "Tiny", ()), path).may_share == (comment == "# no more")


def test_the_first_failure_is_told_though_a_later_spec_has_failed_before():
    fails = MEAN.replace("return", "return 1 +")
    text = answer((MEAN, SLOW + fails), (ADD, "        raise ValueError\n"))
    code, out = judge_text("fails_twice", text)
    assert code == 1
    assert "FAIL" in out
    assert "got       4.0" in block(out, "is the sum over the count (three)")
    assert "counts in steps" not in out
    assert "1 failed" in out


def test_a_process_that_dies_is_told_when_all_before_has_passed():
    text = answer((MEAN, SLOW + MEAN), (ADD, "        import os\n        os._exit(3)\n"))
    code, out = judge_text("dies", text)
    assert code == 1
    assert "Core part 1 passed: 4 specs" in out
    assert "the process ended during this spec (exit code 3)" in block(out, "counts in steps")
    assert "The judge itself failed" not in out


@pytest.mark.parametrize("who", ["first", "second"] if TWO_CORES else ["first"])
def test_a_bomb_is_told_of_the_process_in_which_it_is(who):
    bomb = f"""    import subprocess, tempfile, time
    while tempfile.gettempdir().endswith({who!r}):
        subprocess.Popen(["sleep", "60"])
    time.sleep(0.4)
"""
    code, out = judge_text(f"bomb_in_{who}", answer((MEAN, bomb + MEAN)))
    assert code == 1
    assert "more than 256 processes, which were all ended" in out
    assert "subprocess.Popen" in out
    assert "The judge itself failed" not in out


def test_what_a_bomb_of_the_helper_starts_meanwhile_is_not_of_the_other():
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True) as bomb:
        wait_for(lambda: len(family(bomb.pid)) == 3)
        first, helper = (object.__new__(JudgingProcess) for _ in range(2))
        first.helper, helper._child = helper, SimpleNamespace(pid=bomb.pid)
        helper._family = lambda: [bomb.pid]  # as it was a moment before
        assert first._without_helper([os.getpid(), *family(bomb.pid)]) == [os.getpid()]
        os.killpg(bomb.pid, signal.SIGKILL)


def test_a_judge_that_failed_says_nothing_where_the_other_process_has_decided():
    def process(*events: Event, trouble: str = "") -> SimpleNamespace:
        return SimpleNamespace(
            go=lambda job: None,
            look=lambda: events,
            trouble=trouble,
            is_over=True,
            has_finished=not trouble,
            ends=[],
            running=None,
            running_since=0.0,
            is_debugging=False,
        )

    spec = Spec("id", 1, "core", "mean", "", "is the sum", "", gpu=False)
    failed = Outcome("id", FAILED)
    broken, whole = process(trouble="starved"), process(Collected([spec]), failed)
    for processes, trouble in (([broken, whole], ""), ([broken], "starved")):
        told: list[Event] = []
        run = _Run(SimpleNamespace(run_all=False), told.append, processes)
        assert run.follow(threading.Event()) == trouble
        assert (failed in told) == (not trouble)


def test_a_group_and_real_ranks_fall_to_one_process(tmp_path):
    def item(group: str = "", fixtures: tuple[str, ...] = ()) -> SimpleNamespace:
        mark = SimpleNamespace(args=(group,)) if group else None
        return SimpleNamespace(get_closest_marker=lambda name: mark, fixturenames=fixtures)

    def session(*, helps: bool) -> SimpleNamespace:
        options = {"--claims": str(tmp_path), "--helps": helps}
        return SimpleNamespace(items=items, config=SimpleNamespace(getoption=options.get))

    items = [item("slow"), item(), item("slow"), item("", ("world",)), item("slow")]
    second = _claimed(session(helps=True))
    assert next(second) is items[0]
    first = list(_claimed(session(helps=False)))
    assert first == [items[1], items[3]]
    assert list(second) == [items[2], items[4]]
