"""The desk starts without torch: whoever asks for the board or a hint waits for no import of it."""

from __future__ import annotations

import os
from functools import cache

import pytest

from selftest.tiny import House, later, new_folder, result

COMMANDS = {
    "board": ("board",),
    "hint": ("hint", "tiny"),
    "reset": ("reset", "tiny"),
    "help": ("kata", "--help"),
    "plan help": ("plan", "--help"),
}


@cache
def torchless() -> House:
    """A house in which the import of torch is an error."""
    home = House(new_folder())
    home.add_kata("tiny")
    home.write("blocked/torch.py", "raise ImportError('the desk must not import torch')\n")
    return home


def _run(*arguments: str) -> tuple[int, str]:
    folders = (torchless().root / "blocked", torchless().root / "tests")
    return torchless().run("desk", *arguments, PYTHONPATH=os.pathsep.join(map(str, folders)))


for name, arguments in COMMANDS.items():
    later(f"{name} without torch", lambda arguments=arguments: _run(*arguments))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_desk_imports_no_torch(name):
    code, out = result(f"{name} without torch")
    assert code == 0, out
    assert "ImportError" not in out
