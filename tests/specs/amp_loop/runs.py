"""What the specs of train share: batches that overflow, and a run with all its parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.laws import draw
from kit.laws.toys import mse


def batches(count: int, device: torch.device, overflow_at: tuple[int, ...] = ()) -> list:
    """Batches of (5, 6) and (5, 2); those at `overflow_at` have an infinite target."""
    generator = draw.generator(7)
    made = []
    for number in range(count):
        x, y = draw.randn(5, 6, generator=generator), draw.randn(5, 2, generator=generator)
        if number in overflow_at:
            y[0, 0] = math.inf
        made.append((x.to(device), y.to(device)))
    return made


class Run:
    """A model with dropout and all that its training carries along."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        draw.seed(11)
        self.dtype = dtype
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 2)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scaler = None
        if dtype == torch.float16:
            self.scaler = GradScaler(device.type, init_scale=256.0, growth_interval=3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    @property
    def parts(self) -> tuple:
        return self.model, self.optimizer, self.scaler, self.scheduler

    def train(self, answer, data: list) -> list:
        model, optimizer, scaler, scheduler = self.parts
        return answer.train(model, data, mse, optimizer, scaler, scheduler, dtype=self.dtype)


class Unsavable(torch.Tensor):
    """A tensor whose pickling fails, when part of the file has been written."""

    error: type[BaseException] = OSError

    @staticmethod
    def __new__(cls, data: Tensor) -> Unsavable:
        return data.as_subclass(cls)

    def __reduce_ex__(self, protocol: object) -> object:
        raise self.error("no space left on device")
