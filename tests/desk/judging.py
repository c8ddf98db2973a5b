"""What runs in the judging process: pytest on one answer, in a fork of the warm process."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from desk import events
from desk.events import Debugging, Event
from kit import forkserver

STACKS = "stacks"  # what faulthandler writes when the desk asks where the process is


def run(arguments: list[str], folder: str, pipe: Connection, terminal: str) -> None:
    """Run pytest, which collects, waits for its Order, and tells each event.

    `terminal` is where breakpoint() may ask, or empty.
    """
    # Not above, for the desk imports this module, and it must not wait for torch.
    import pytest

    from desk.recorder import Recorder

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # what a killed process leaves goes with it
    # Only the plugins that judging needs, whatever else is installed beside them.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.path.insert(0, os.getcwd())  # as with python -m pytest
    owner = os.getpid()

    def tell(event: Event) -> None:
        if os.getpid() == owner:  # not from a process that an answer has forked
            pipe.send_bytes(events.encode(event).encode())

    with (Path(folder) / STACKS).open("w", encoding="utf-8") as stacks:
        faulthandler.register(forkserver.STACKS_SIGNAL, stacks)
        plugins: list[object] = [Recorder(tell, pipe.recv)]
        if terminal:
            plugins.append(_Debugger(tell, terminal))
        pytest.main(arguments, plugins=plugins)


class _Debugger:
    """Gives breakpoint() the terminal, which the desk hands over and takes back."""

    def __init__(self, tell: Callable[[Event], None], terminal: str) -> None:
        self._tell, self._terminal = tell, terminal
        self._has_it = False

    def pytest_enter_pdb(self, pdb: Any) -> None:
        setup = pdb.setup

        def setup_again(*arguments: Any) -> Any:  # at its own breakpoints, after `continue`
            result = setup(*arguments)
            self._take()
            return result

        pdb.setup = setup_again
        self._take()

    def pytest_leave_pdb(self) -> None:
        self._give_back()

    def pytest_runtest_logfinish(self) -> None:
        self._give_back()

    def _take(self) -> None:
        if not self._has_it:
            self._has_it = True
            self._tell(Debugging(True))
        with open(self._terminal, "r+b", buffering=0) as terminal:
            until = time.monotonic() + 5.0
            while os.tcgetpgrp(terminal.fileno()) != os.getpgrp() and time.monotonic() < until:
                time.sleep(0.01)
            for number in (0, 1):  # the real ones, so that the line can be edited
                os.dup2(terminal.fileno(), number)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115

    def _give_back(self) -> None:
        if self._has_it:
            self._has_it = False
            self._tell(Debugging(False))
