"""Training runs that are saved and resumed, and saves that fail."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
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
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Tanh(), nn.Linear(9, 2)
    batches = [(draw.randn(n, 6), draw.randn(n, 2)) for n in (5, 3, 4, 2, 6, 3)]
    world = World(nn.Sequential(*layers), batches, adam={"lr": 0.02})
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


def save(answer: ModuleType, path: Any, w: World) -> None:
    answer.save_checkpoint(path, w.model, w.optimizer, w.grad_scaler, w.scheduler)


def load(answer: ModuleType, path: Any, w: World) -> None:
    answer.load_checkpoint(path, w.model, w.optimizer, w.grad_scaler, w.scheduler)


class Unsavable(torch.Tensor):
    """A tensor whose pickling fails, when part of the file may have been written."""

    error: type[BaseException] = OSError

    @staticmethod
    def __new__(cls, data: Tensor) -> Unsavable:
        return data.as_subclass(cls)

    def __reduce_ex__(self, protocol: object) -> object:
        raise self.error("no space left on device")


# How a save fails: the disk has room for so many quarters of the file, an error while the state is
# pickled, or a rename that does not happen.
FAILURES = [0, 1, 2, 3, OSError, RuntimeError, KeyboardInterrupt, "rename"]


def fails(failure: object, call: Callable[[], None], model: nn.Module, size: int) -> bool:
    """Whether the call raised when the save had to fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        try:
            if isinstance(failure, int):
                resource.setrlimit(resource.RLIMIT_FSIZE, (failure * size // 4, hard))
            elif isinstance(failure, type):
                patch.setattr(Unsavable, "error", failure)
                model.register_buffer("breaks", Unsavable(torch.zeros(5)))
            else:
                for name in ("replace", "rename"):
                    patch.setattr(os, name, _no_rename)
            call()
        except (OSError, RuntimeError, KeyboardInterrupt) as error:
            if isinstance(error, NotImplementedError):
                raise
            return True
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            if hasattr(model, "breaks"):
                del model.breaks
    return False


def _no_rename(*paths: object) -> None:
    raise OSError("no rename")
