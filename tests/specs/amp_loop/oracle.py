"""The contract of amp_loop as slow and obvious code, on torch's own GradScaler."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kit.laws.trace import World


class Step(NamedTuple):
    loss: Tensor
    grad_norm: Tensor
    skipped: bool


def train_step(w: World) -> Step:
    """Forward, backward, unscale, norm, clip, step, update: one after the other."""
    inputs, targets = _checked(w)
    scaler, optimizer = w.grad_scaler, w.optimizer
    for p in _held(w):
        p.grad = None
    with torch.autocast(w.device.type, w.dtype, enabled=w.dtype != torch.float32):
        loss = w.loss_fn(w.model(inputs).float(), targets)
    with torch.autocast(w.device.type, enabled=False):
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in _held(w) if p.grad is not None]
    # In float64 no square of a float32 overflows.
    norms = [g.double().norm() for g in gradients] or [torch.zeros(())]
    norm = torch.stack(norms).norm().float()
    max_norm = w.options.get("max_norm")
    if max_norm is not None and norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    skipped = False
    if scaler is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
    return Step(loss.detach().float(), norm, skipped)


def train(w: World) -> list[Step]:
    """A step for each batch; the schedule follows the steps that were taken."""
    results = []
    for batch in w.batches:
        w.visits("data")
        w.batch = batch
        results.append(train_step(w))
        if w.scheduler is not None and not results[-1].skipped:
            w.scheduler.step()
    return results


def _held(w: World) -> list[Tensor]:
    return [p for group in w.optimizer.param_groups for p in group["params"]]


def _checked(w: World) -> Any:
    batch, max_norm = w.batch, w.options.get("max_norm")
    _refuse_unless(w.dtype in (torch.float32, torch.bfloat16, torch.float16))
    _refuse_unless((w.grad_scaler is not None) == (w.dtype == torch.float16))
    _refuse_unless(max_norm is None or max_norm > 0)
    _refuse_unless(isinstance(batch, (tuple, list)) and len(batch) == 2)
    inputs, targets = batch
    _refuse_unless(isinstance(inputs, Tensor) and isinstance(targets, Tensor))
    _refuse_unless(inputs.dim() > 0 and targets.dim() > 0)
    _refuse_unless(len(inputs) == len(targets) > 0)
    return batch


def _refuse_unless(ok: bool) -> None:
    if not ok:
        raise ValueError("the contract refuses this")
