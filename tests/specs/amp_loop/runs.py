"""Training runs that are saved and resumed, and disks that fail."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.trace import World
from kit.laws.twists import in_precision
from specs.amp_loop import oracle

BATCHES = 6


def run(precision: str, device: torch.device) -> World:
    """A run with all that training carries along: dropout, batch norm, Adam, scale and schedule."""
    draw.seed(11)
    model = nn.Sequential(
        nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Tanh(), nn.Linear(9, 2)
    )
    batches = [(draw.randn(n, 6), draw.randn(n, 2)) for n in (5, 3, 4, 2, 6, 3)]
    world = World(model, batches, adam={"lr": 0.02})
    in_precision(precision)(world)
    if precision == "fp16":
        world.scaler = {"init_scale": 256.0, "growth_interval": 2}
        batches[1][1][0, 0] = torch.inf
    world.ready(device)
    world.scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, step_size=2, gamma=0.5)
    return world


def go_on(world: World, first: int, last: int) -> list[float]:
    """Train on these batches, as the contract of train says; the losses."""
    every, world.batches = world.batches, world.batches[first:last]
    results = oracle.train(world)
    world.batches = every
    return [result.loss.item() for result in results]


def save(answer: ModuleType, path: Path, world: World) -> None:
    answer.save_checkpoint(path, world.model, world.optimizer, world.grad_scaler, world.scheduler)


def load(answer: ModuleType, path: Path, world: World) -> None:
    answer.load_checkpoint(path, world.model, world.optimizer, world.grad_scaler, world.scheduler)


@contextlib.contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file may grow beyond `free` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Unsavable(torch.Tensor):
    """A tensor whose pickling fails, when part of the file may have been written."""

    error: Any = OSError

    @staticmethod
    def __new__(cls, data: Tensor) -> Unsavable:
        return data.as_subclass(cls)

    def __reduce_ex__(self, protocol: object) -> object:
        raise self.error("no space left on device")
