"""Paths as callers give them, and folders as they find and leave them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


class AnyPath(os.PathLike[str]):
    """No str and no Path, as an os.DirEntry is none."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The current folder is this one."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def clear_away(folder: Path) -> None:
    """Once every rank has done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
