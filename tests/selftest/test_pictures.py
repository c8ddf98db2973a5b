"""The README's pictures show what the commands print, and each has a text for who cannot see it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from rich.table import Table

from desk.pictures import PICTURES, Recording, folder, lines
from kit.answers.figures import is_tested_torch
from kit.catalog import ROOT


@pytest.mark.timeout(300)
@pytest.mark.skipif(not is_tested_torch(), reason="another torch has other specs and other bytes")
def test_the_pictures_show_what_the_commands_print():
    done = subprocess.run(
        [sys.executable, "-m", "desk.pictures", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_each_picture_is_in_the_readme_with_its_text():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[([^\]]{20,})\]\(\.pictures/(\w+)\.svg\)", readme)
    names = sorted(picture.name for picture in PICTURES)
    assert sorted(name for _, name in shown) == names
    assert sorted(path.stem for path in folder().iterdir()) == names


def test_a_picture_is_as_wide_as_80_columns_and_loads_nothing():
    for picture in PICTURES:
        path = folder() / f"{picture.name}.svg"
        title, *screen = lines(path)
        assert title == picture.command
        assert max(map(len, screen)) <= 80
        assert not re.search(r"@import|url\((?!#)|href", path.read_text(encoding="utf-8"))


def test_the_text_of_a_picture_is_that_of_the_screen(tmp_path):
    paper = Recording(start="Verdict", seconds="3.2")
    table = Table("Bytes", box=None)
    paper.table(table)
    paper.line("Part 1 passed: 3 specs (0.4 s)")
    paper.line("Verdict: passed", "bold green")
    paper.line("Time:    12.5 s")
    paper.line("  - indented by two  and by two more")
    paper.table(table)
    path = tmp_path / "some.svg"
    path.write_text(paper.svg("some", "nox"), encoding="utf-8")
    screen = ["Verdict: passed", "Time:    3.2 s", "  - indented by two  and by two more", " Bytes"]
    assert lines(path) == ["nox", *screen, ""]
