"""One command of the desk in a terminal, with somebody at the keyboard and at an editor."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect

from kit.patience import family
from selftest.tiny import House, hears_ctrl_c, new_folder

KEYS = "n next   h hint   a all   p part   r reset   o place   Enter again   q quit"
_EDITS = itertools.count()


class Terminal:
    """One command of the desk in a terminal of 100 columns."""

    def __init__(self, home: House, *arguments: str, stub: str = "katas/tiny_mean.py") -> None:
        self.home, self.path, self.temporary = home, home.root / stub, new_folder()
        env = {**os.environ, "PYTHONPATH": str(home.root / "tests"), "TERM": "xterm"}
        for name in ("PYTEST_CURRENT_TEST", "COLUMNS", "NO_COLOR", "PYTEST_ADDOPTS"):
            env.pop(name, None)
        with hears_ctrl_c():
            self.screen = pexpect.spawn(
                sys.executable,
                ["-m", "desk", *arguments],
                cwd=home.root,
                env={**env, "TMPDIR": str(self.temporary)},
                dimensions=(60, 100),
                encoding="utf-8",
                timeout=None,  # that of the test counts work and not the wall clock
            )

    def until(self, *texts: str) -> str:
        """What has come up to one of these texts, without colours."""
        self.screen.expect_exact([*texts])
        return _plain(self.screen.before + self.screen.after)

    def save(self, text: str, how: Callable[[Path, str], None] | None = None) -> None:
        """Save the file, each time with other bytes."""
        (how or Path.write_text)(self.path, f"{text}\n# edit {next(_EDITS)}\n")

    def verdict(self) -> str:
        """The rest of the screen of one verdict."""
        return self.until("Verdict: ") + self.until(KEYS)

    def family(self) -> list[int]:
        return family(self.screen.pid)

    def close(self) -> None:
        try:
            self.screen.close(force=True)
        except pexpect.ExceptionPexpect:  # it is killed, but not gone after a tenth of a second
            self.screen.wait()


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
