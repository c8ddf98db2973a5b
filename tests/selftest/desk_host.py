"""Commands of the desk one after another in one process, so that torch is imported once for them.

A line of JSON on stdin is a command with its variables, one on stdout its exit code and what it
has printed; the command "pytest" runs that in a fork. The host leaves when nobody has asked for a
while.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

from desk.__main__ import main
from kit import forkserver

IDLE = 100.0  # seconds


def run(words: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Run one command as in a process of its own."""
    if words[0] == "pytest":
        return run_pytest(words[1:])
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, out.getvalue()


def run_pytest(words: list[str]) -> tuple[int, str]:
    """Run pytest in a fork of the warm process."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = forkserver.fork(in_fork, words, log=log, has_forks=True)
        process.join()
        return forkserver.end(process), forkserver.read(log)


def in_fork(words: list[str]) -> None:
    """What the fork does."""
    import pytest  # it is there already

    sys.exit(pytest.main(words))


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stdout has answers only
    while select.select([sys.stdin], [], [], IDLE)[0] and (line := sys.stdin.readline()):
        print(json.dumps(run(**json.loads(line))), flush=True)
