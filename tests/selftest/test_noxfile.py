"""What nox adds to the desk: its exit code, and no line of nox's own after a verdict."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache

import pytest

from desk.__main__ import parse
from kit.catalog import ROOT
from selftest.tiny import House, hears_ctrl_c, house, new_folder, wait_for

pytest.importorskip("nox")
pytestmark = pytest.mark.timeout(300)


@cache
def home() -> House:
    """A house with the noxfile."""
    house = House(new_folder())
    house.add_kata("tiny_mean")
    shutil.copy(ROOT / "noxfile.py", house.root)
    return house


def test_the_exit_code_is_the_desks_and_the_verdict_is_the_last_word():
    slip = ("--answers", str(home().write("answers/slip.py", "def (")))  # it needs no torch
    code, out = home().run("nox", "--no-venv", "-s", "kata", "--", "tiny_mean", *slip)
    assert code == 1, out
    assert "Verdict: broken file: syntax error" in out
    assert out.endswith("then:    nox -s kata -- tiny_mean --answers answers/slip.py\n")


def test_misuse_is_told_by_the_desk_alone_and_json_is_alone_on_stdout():
    done = subprocess.run(
        [sys.executable, "-m", "nox", "--no-venv", "-s", "kata", "--", "nope", "--json"],
        cwd=home().root,
        env={**os.environ, "PYTHONPATH": str(home().root / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "no kata is named 'nope'; did you mean tiny_mean?"
    assert re.fullmatch(r"nox > .*\n", done.stderr)


def test_what_stands_before_the_hyphens_is_answered_with_the_line_that_works():
    code, out = home().run("nox", "--no-venv", "-s", "kata", "tiny_mean", "2")
    assert code == 2
    assert out.endswith(": nox -s kata -- tiny_mean 2\n")
    assert "Sessions not found" not in out


def test_the_readme_and_the_noxfile_have_the_same_commands():
    sessions = re.findall(r"^@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.M)
    named = re.findall(r"\bnox -s (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"board", *named} == set(sessions)


def test_what_the_readme_says_can_be_typed(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"\bnox -s (kata|hint|reset|plan|timeline|gpu) -- ((?:[^ `\n]+ ?)+)", text)
    assert len(lines) >= 10
    for command, words in lines:
        # nox itself takes --lab
        parse([command, *(word for word in words.split() if word != "--lab")])


def test_ctrl_c_is_told_by_the_desk_alone(tmp_path):
    for number in range(3):  # if the desk is gone before nox hears of it, CPython loses its code
        (folder := tmp_path / str(number)).mkdir()
        with hears_ctrl_c():
            process = home().start(
                *("nox", "--no-venv", "-s", "kata", "--", "tiny_mean"),
                new_group=True,
                TMPDIR=str(folder),
            )
        wait_for(lambda folder=folder: [*folder.glob("memory-katas-*")])  # the verdict has begun
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to nox and to the desk
        out, _ = process.communicate(timeout=200)
        assert "Stopped; nothing was left running.\n" in out
        if process.returncode != 0:
            break
    assert process.returncode == 130, out
    assert out.endswith("Stopped; nothing was left running.\n")


def test_plain_pytest_on_untouched_stubs_is_one_sentence():
    code, out = house().pytest("tests/specs/tiny_mean")
    assert code == 4
    assert "ERROR: nothing is written in katas/ yet, so there is nothing to test." in out
    assert "FAILED" not in out
    assert "Traceback" not in out
