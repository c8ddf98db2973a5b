"""The desk starts without torch: whoever asks for the board or a hint waits for no import of it."""

from __future__ import annotations

import os
import subprocess
import sys

from selftest.tiny import house

PROGRAM = """
import sys
from desk.__main__ import main

for words in ("board", "hint tiny_mean", "reset tiny_mean", "kata --help", "plan --help"):
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    assert code == 0, (words, code)
    assert "torch" not in sys.modules, words
"""


def test_the_desk_imports_no_torch():
    environment = {**os.environ, "PYTHONPATH": str(house().root / "tests")}
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, cwd=house().root, env=environment, stdout=subprocess.PIPE, check=True)
