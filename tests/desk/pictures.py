"""The README's pictures: real screens, recorded in a copy of the repository and drawn by rich.

`python -m desk.pictures` draws them afresh; with --check it says which of them no longer show what
the commands print. Times differ from run to run, so the pictures have fixed ones.
"""

from __future__ import annotations

import argparse
import difflib
import io
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from desk import board, kata, watch
from desk.inbox import Inbox, Key
from desk.kata import Wanted
from desk.paper import Paper
from desk.state import State
from desk.terminal import Terminal
from kit import catalog
from kit.answers.catalogue import catalogue
from kit.answers.stubs import make_stub

_WIDTH = 80
_TIMES = (
    (re.compile(r"(?<=^Time:    )[\d.]+"), "{seconds}"),
    (re.compile(r"[\d.]+ s\)"), "0.1 s)"),
    (re.compile(r" at \d\d:\d\d:\d\d$"), " at 14:03:22"),
)
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.S)  # a README's picture can load none
_COLUMN = 12.2  # the width of a character in rich's pictures
_TEXT = "{http://www.w3.org/2000/svg}text"


class Recording(Paper):
    """Remembers what is put on it, from the first line that begins with `start`."""

    def __init__(self, start: str = "", seconds: str = "") -> None:
        console = Console(
            width=_WIDTH,
            file=io.StringIO(),
            record=True,
            force_terminal=True,
            color_system="truecolor",
            no_color=False,
            highlight=False,
            markup=False,
            emoji=False,
        )
        super().__init__(console)
        self._start, self._seconds, self._is_open = start, seconds, not start

    def svg(self, name: str, title: str) -> str:
        """The picture, in a window with that title."""
        self._put(Text())  # the last line of a picture loses what hangs below it
        return _FONTS.sub("", self._console.export_svg(title=title, unique_id=name))

    def status(self, text: str = "") -> None:
        """Nothing: it would have been replaced."""

    def table(self, table: Table) -> None:
        """As on a screen."""
        if self._is_open:
            super().table(table)

    def _put(self, text: Text) -> None:
        self._is_open = self._is_open or text.plain.startswith(self._start)
        if self._is_open:
            for pattern, fixed in _TIMES:
                text.plain = pattern.sub(fixed.format(seconds=self._seconds), text.plain)
            super()._put(text)


def _solved(paper: Paper) -> None:
    _hand_in("memory_measurement")
    kata.run(Wanted("memory_measurement"), paper)


def _failing(paper: Paper) -> None:
    _hand_in("gradient_accumulation", "keeps_the_output_alive_during_backward")
    kata.run(Wanted("gradient_accumulation"), paper)


def _board(paper: Paper) -> None:
    _hand_in("amp_loop")
    kata.run(Wanted("amp_loop"), Recording())
    board.run(paper)


def _watch(paper: Paper) -> None:
    """A save, a hint, and a better save; the keys are there, and nobody can debug."""
    found = catalog.find_kata("amp_loop")
    inbox: Inbox = queue.SimpleQueue()
    watching = watch.Watch(paper, State(paper.note), found, inbox, Terminal(""), 20.0)
    for mistake, key in (("backward_under_autocast", "h"), ("never_raises_the_scale", "")):
        _hand_in("amp_loop", mistake)
        watching.judge()
        while watching.is_judging:
            watching.answer(inbox.get())
        if key:
            watching.answer(Key(key))
    watching.end_run()  # or it gets ready for another save while this process ends


def _hand_in(name: str, mistake: str = "") -> None:
    """Make the reference the candidate's answer, with one of the mistakes of the catalogue."""
    found = catalog.find_kata(name)
    text = found.solution.read_text(encoding="utf-8")
    if mistake:
        text = {entry.name: entry for entry in catalogue(found)[0]}[mistake].source(text)
    found.stub.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Picture:
    """NAME.svg: what `play` puts on the paper after this command, from a line that begins so.

    `seconds` stand for the time, which differs: medians on two cores, by `nox -s bench`.
    """

    name: str
    command: str
    play: Callable[[Paper], None]
    seconds: str
    start: str = ""


# In the order in which they are played; each finds the answers and verdicts of those before it.
PICTURES = (
    Picture("failing", "nox -s kata -- gradient_accumulation", _failing, "3.0"),
    Picture("solved", "nox -s kata -- memory_measurement", _solved, "3.5", start="Verdict:"),
    Picture("board", "nox", _board, ""),
    Picture("watch", "nox -s watch -- amp_loop", _watch, "0.6"),
)


def folder() -> Path:
    """Where they are kept."""
    return catalog.ROOT / ".pictures"


def main() -> int:
    """Draw all pictures, or check them; 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(prog="desk.pictures", description="The README's pictures")
    parser.add_argument("--check", action="store_true", help="draw nothing; compare their text")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # in the copy: draw to there
    options = parser.parse_args()
    if options.here:
        _play(options.here)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary) / "pictures"
        _draw(Path(temporary) / "copy", fresh)
        if options.check:
            return max([_compare(path, folder() / path.name) for path in sorted(fresh.iterdir())])
        shutil.rmtree(folder(), ignore_errors=True)
        shutil.copytree(fresh, folder())
    print(f"{len(PICTURES)} pictures drawn in {catalog.shown(folder())}")
    return 0


def _draw(copy: Path, fresh: Path) -> None:
    """Play them in a copy, where no answer and no verdict is somebody's."""
    skip = shutil.ignore_patterns("__pycache__", "*.old-*.py")
    for name in ("tests", "katas", "solutions"):
        shutil.copytree(catalog.ROOT / name, copy / name, ignore=skip)
    shutil.copy(catalog.ROOT / "pyproject.toml", copy)
    for found in catalog.all_katas():
        stub = copy / found.stub.relative_to(catalog.ROOT)
        stub.write_text(make_stub(found.solution.read_text(encoding="utf-8")), encoding="utf-8")
    fresh.mkdir()
    subprocess.run(
        [sys.executable, "-m", "desk.pictures", "--here", str(fresh)],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "tests")},
        check=True,
    )


def _play(fresh: Path) -> None:
    for picture in PICTURES:
        paper = Recording(picture.start, picture.seconds)
        picture.play(paper)
        svg = paper.svg(picture.name, picture.command)
        (fresh / f"{picture.name}.svg").write_text(svg, encoding="utf-8")


def _compare(fresh: Path, kept: Path) -> int:
    new, old = lines(fresh), lines(kept) if kept.exists() else []
    if new == old:
        return 0
    print(f"{catalog.shown(kept)} is not what the command prints; `nox -s pictures` draws it again")
    print("\n".join(difflib.unified_diff(old, new, "picture", "command", lineterm="")))
    return 1


def lines(path: Path) -> list[str]:
    """The text of a picture: its title, then each line of the screen."""
    texts = ElementTree.parse(path).getroot().iter(_TEXT)
    found: list[str] = []
    for _, row in itertools.groupby(texts, lambda text: text.get("y")):
        line = ""
        for text in row:
            column = round(float(text.get("x", 0)) / _COLUMN)
            line = line.ljust(column) + (text.text or "").replace("\N{NO-BREAK SPACE}", " ")
        found.append(line.strip() if not found else line.rstrip())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
