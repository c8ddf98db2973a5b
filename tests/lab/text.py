"""Real text of another kind than the documentation of kit.laws.toys.text_batches."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor


def source_batches(count: int, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Python source as bytes: (batch, length) int64 inputs, and the next byte of each as target.

    The source is a module that every CPython ships, so nothing is downloaded.
    """
    data = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    for _ in range(count):
        starts = torch.randint(len(data) - length - 1, (batch,)).tolist()
        rows = torch.stack([data[start : start + length + 1] for start in starts]).long()
        yield rows[:, :-1], rows[:, 1:]
