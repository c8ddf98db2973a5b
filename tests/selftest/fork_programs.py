"""What the tests of the forkserver run in its forks.

Not in the file of the tests, which has another name where pytest is not run as a module.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from kit import forkserver


def fork_again(pipe, folder):
    """In a fork: one more, which says where it comes from."""
    here, there = forkserver.pipe()
    process = forkserver.fork(say, there, log=Path(folder, "log"), has_forks=False)
    pipe.send((os.getpid(), *here.recv(), process.pid))
    time.sleep(1000)


def say(pipe):
    pipe.send((os.getpid(), os.getppid(), os.getpgrp(), "torch._dynamo" in sys.modules))
    while True:  # no thread of Python's runs beside this
        re.match(r"(a|aa)+$", "a" * 60 + "b")


def has(pipe, names):
    pipe.send([name in sys.modules for name in names])


def exit_with(code):
    os._exit(code)
