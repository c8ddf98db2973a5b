"""Text on the terminal: at most 100 columns, plain ASCII of our own, colour only on a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

WIDTH = 100
LABEL = 10
_MOST_LINES = 8
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_START_OF_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_UNITS = re.compile(r"(?<=\d) (?=(?:[KMG]i)?B\b|bytes?\b|ms\b|s\b|%)")
_HELD = "\x00"  # stands for the space between a number and its unit, where no line ends

if TYPE_CHECKING:
    from desk.schema import Document

# Each a label and a sentence or a command.
Steps = Iterable[tuple[str, str]]


class Paper:
    """Where lines go: wrapped to the width, without control characters, markup or emoji codes."""

    def __init__(self, console: Console | None = None) -> None:
        if hasattr(sys.stdout, "reconfigure"):  # a log in ASCII must not end the desk
            sys.stdout.reconfigure(errors="backslashreplace")
        columns = console.width if console else shutil.get_terminal_size((WIDTH, 24)).columns
        self.width = max(40, min(WIDTH, columns))
        self._console = console or Console(
            width=self.width, highlight=False, markup=False, emoji=False
        )
        self._has_status = False

    def line(self, text: str = "", style: str = "", *, hang: int = 0) -> None:
        """One paragraph; what does not fit goes on, indented by `hang`."""
        text = clean(text)
        indent = " " * (len(text) - len(text.lstrip()))
        hanging = " " * (hang or len(indent))
        for row in wrap(text.strip(), self.width, indent, hanging):
            self._put(Text(row, style))

    def note(self, text: str) -> None:
        """A sentence that --json has too."""
        self.line(text)

    def report(self, document: Document) -> None:
        """What the command comes to, as data; on a screen it has been said in words."""

    def labelled(self, indent: int, label: str, text: str, style: str = "") -> None:
        """A label and its text beside it, at most a few lines of it."""
        room = self.width - indent - LABEL
        rows = [row for part in clean(text).splitlines() for row in wrap(part, room)]
        if len(rows) > _MOST_LINES:
            rows = [*rows[: _MOST_LINES - 1], "..."]
        for number, row in enumerate(rows or [""]):
            head = " " * indent + (label if number == 0 else "").ljust(LABEL)
            self._put(Text().append(head, "bold").append(row, style))

    def verbatim(self, indent: int, text: str) -> None:
        """One line as it is, cut where the paper ends."""
        row = " " * indent + clean(text)
        self._put(Text(row if len(row) <= self.width else row[: self.width - 4] + " ..."))

    def marked(self, word: str, style: str, rest: str) -> None:
        """A line that starts with a coloured word."""
        first, *others = wrap(clean(rest), self.width - 18)
        self._put(Text("  ") + Text(word, style) + Text("  " + first))
        for row in others:
            self._put(Text(" " * 18 + row))

    def table(self, table: Table) -> None:
        """A table, as wide as the paper at most."""
        self.status()
        self._console.print(table)

    def steps(self, steps: Steps) -> None:
        """What to do next, each command on a line of its own, ready to be copied."""
        for label, text in steps:
            self.line(f"{label + ':':<9}{text}", hang=9)

    def status(self, text: str = "") -> None:
        """A line that the next one replaces; on a terminal only."""
        if not sys.stdout.isatty() or self._console.is_dumb_terminal:
            return
        if self._has_status:
            self._console.control(_START_OF_LINE)
        self._has_status = bool(text)
        self._console.print(Text(clean(text)[: self.width - 1], "dim"), end="", soft_wrap=True)

    def _put(self, text: Text) -> None:
        self.status()
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def wrap(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """Lines of at most that width, one at least; a number is not parted, nor from its unit."""
    held = _UNITS.sub(_HELD, text)
    rows = textwrap.wrap(
        held, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
    return [row.replace(_HELD, " ") for row in rows] or [""]


def clean(text: str) -> str:
    """Text of somebody's program, without what would move the cursor or colour the screen."""
    return _CONTROLS.sub("?", _ESCAPES.sub("", text.replace("\r\n", "\n")).expandtabs(4))
