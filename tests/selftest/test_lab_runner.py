"""Experiments side by side: each comes to its end, and a timing has the processor alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import psutil
import pytest

from kit.catalog import ROOT
from kit.forkserver import is_gone
from kit.patience import family
from lab import runner
from lab.notebook import Lab, Page, Text
from lab.runner import Ended, Job, carry_out_all
from selftest import lab_programs as programs
from selftest.tiny import hears_ctrl_c, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _nothing_is_preloaded(monkeypatch):
    """What real experiments need takes seconds to import."""
    monkeypatch.setattr(runner, "_WARM", set())


def job(name: str, run: Callable[[Lab], None], folder: Path) -> Job:
    return Job(run, Page(name, name, str(folder)), folder, programs.CPU, quick=True)


def ended(folder: Path, *runs: Callable[[Lab], None], at_once: int = 2) -> dict[str, Ended]:
    names = ("one", "two", "three", "four")
    jobs = [job(name, run, folder) for name, run in zip(names, runs, strict=False)]
    return {end.page.name: end for end in carry_out_all(jobs, at_once, lambda pages: None)}


def test_two_are_under_way_at_once(tmp_path):
    found = ended(tmp_path, programs.meets_another, programs.meets_another)
    pids = {end.page.samples["pid"] for end in found.values()}
    assert len(pids | {os.getpid()}) == 3
    assert not any(map(psutil.pid_exists, pids))


def test_a_timing_has_the_processor_alone_and_is_not_kept_waiting_for_ever(tmp_path):
    timed, count = (programs.times, programs.times), programs.counts_until_all_are_timed
    found = ended(tmp_path, *timed, count, count, at_once=4)  # at any time one of the two counts
    assert all(end.page.is_whole for end in found.values()), found
    assert {*found["three"].page.samples.values()} == {1}  # threads
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    spans = [(name, what, float(start), float(end)) for name, what, start, end in rows]
    assert sum(what == "timing" for _, what, *_ in spans) == 2 * 3 * 3
    for (_, one, *first), (_, other, *second) in combinations(spans, 2):
        if "timing" in (one, other):
            assert first[1] <= second[0] or second[1] <= first[0], (first, second)


@pytest.mark.parametrize("at_once", [1, 2])
def test_one_that_cannot_go_on_takes_no_other_with_it(tmp_path, at_once):
    runs = (programs.is_not_here, programs.breaks_off, programs.says)
    found = ended(tmp_path, *runs, at_once=at_once)
    assert found["one"].page.blocks == [Text("Not measured here: no such GPU.")]
    assert found["one"].page.is_whole
    assert found["two"].page.blocks == [Text("Broke off: ValueError: no shape.")]
    assert not found["two"].page.is_whole
    assert 'raise ValueError("no shape")' in found["two"].where
    assert found["three"].page.blocks == [Text("The other one.")]


def test_one_that_is_killed_takes_no_other_with_it(tmp_path):
    found = ended(tmp_path, programs.is_killed, programs.says)
    assert found["one"].how == "broke off: its process ended with signal 9, SIGKILL"
    assert not found["one"].page.is_whole
    assert found["two"].page.blocks == [Text("The other one.")]


def test_all_end_with_the_iteration(tmp_path):
    jobs = [job("one", programs.never_ends, tmp_path), job("two", programs.says, tmp_path)]
    running = carry_out_all(jobs, 2, lambda pages: None)
    assert next(running).page.name == "two"
    kept = tmp_path / "samples" / "one.json"
    wait_for(kept.exists)
    running.close()
    assert not psutil.pid_exists(json.loads(kept.read_text())["samples"]["pid"])


def test_ctrl_c_keeps_what_is_measured_and_leaves_nothing_running(tmp_path):
    command = [sys.executable, "-m", "lab", "four_configurations", "trouble", "--quick"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(tmp_path)}
    with hears_ctrl_c():
        lab = subprocess.Popen(
            [*command, "--out", str(tmp_path / "out")], env=env, stdout=subprocess.PIPE, text=True
        )
    wait_for(lambda: [*tmp_path.glob("out/samples/*.json")])
    pids = family(lab.pid)
    assert len(pids) > 3
    lab.send_signal(signal.SIGINT)
    out, _ = lab.communicate()
    assert lab.returncode == 130
    words = "Interrupted. What was measured is kept; the same command goes on from there."
    assert words in " ".join(out.split())
    wait_for(lambda: all(map(is_gone, pids)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
