"""What the specs of train_epoch share: a run with all its parts, and one with large batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from kit.laws.precisions import scaler_for
from kit.laws.toys import mse
from specs.gradient_accumulation.common import Batch, LossFn, count_steps, joined

# Rounding of one 16-bit operation; sums of a few hundred products stay within four of them.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


class Epoch:
    """A model and all that trains it: SGD with momentum, a scaler for float16, a schedule."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        lr: float = 0.02,
        momentum: float = 0.9,
        **scaler: float,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        self.scaler = scaler_for(dtype, device, **scaler)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.5)
        self.steps = count_steps(self.optimizer)
        self.start = self.weights()

    def run(
        self,
        answer: object,
        batches: Iterable[Batch],
        window: int,
        loss_fn: LossFn = mse,
        max_norm: float | None = None,
    ) -> list:
        return answer.train_epoch(
            self.model,
            batches,
            loss_fn,
            self.optimizer,
            window=window,
            dtype=self.dtype,
            scaler=self.scaler,
            scheduler=self.scheduler,
            max_norm=max_norm,
        )

    def weights(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def rate(self) -> float:
        return self.scheduler.get_last_lr()[0]


def with_large_batches(
    epoch: Epoch, batches: Sequence[Batch], window: int, max_norm: float
) -> list[tuple[float, float]]:
    """The slow and obvious epoch: each window in one batch. Its losses and gradient norms."""
    results = []
    for start in range(0, len(batches), window):
        inputs, targets = joined(batches[start : start + window])
        epoch.optimizer.zero_grad()
        loss = mse(epoch.model(inputs), targets)
        loss.backward()
        norm = clip_grad_norm_(epoch.model.parameters(), max_norm)
        epoch.optimizer.step()
        epoch.scheduler.step()
        results.append((loss.item(), norm.item()))
    return results


def spoil(parameter: torch.Tensor, at: int) -> torch.utils.hooks.RemovableHandle:
    """Make one element of the gradient infinite in the backward pass number `at`, from 0."""
    passes = itertools.count()

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if next(passes) == at:
            grad = grad.clone()
            grad[-1] = torch.inf
        return grad

    return parameter.register_hook(hook)
