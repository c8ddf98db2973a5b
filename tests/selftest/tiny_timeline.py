"""A picture of a step for the tiny kata."""

from __future__ import annotations

import shutil

from kit.catalog import ROOT
from selftest.tiny import House

# The peak is 64 KiB for each unit of mean([1.0, 3.0]), beside a gradient and a weight of 512 bytes.
TIMELINE = """\
import torch

from kit.memory.account import account

TITLE = "One step of nothing"


def timeline(answer, reference, device):
    ways = {"plain": 4.0, "reference": reference.mean([1.0, 3.0]), "yours": answer.mean([1.0, 3.0])}
    return {name: held(int(size), device) for name, size in ways.items()}


def held(size, device):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x = torch.ones(size * 2**14, 1)
        model(x).sum().backward()

    return account(step, device, model=model, optimizer=optimizer)
"""


def add_timeline(house: House) -> None:
    """Give tiny_mean a picture."""
    house.write("tests/specs/tiny_mean/timeline.py", TIMELINE)
    add_lab(house)


def add_lab(house: House) -> None:
    """The lab draws pictures."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests" / "lab", house.root / "tests" / "lab", ignore=skip)
