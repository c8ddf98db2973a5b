"""A right answer of another shape: a running mean of gradients, and data read one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (samples, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to the mean over their samples


class WindowResult(NamedTuple):
    loss: Tensor  # the mean over the window's samples: detached float32 scalar, unscaled
    grad_norm: Tensor  # 2-norm of all gradients, unscaled, before clipping: float32 scalar
    skipped: bool  # whether an overflow cancelled the step


# Helpers


def _some(micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    if len(micro_batches) == 0:
        raise ValueError("0 micro-batches in the window")
    return micro_batches


def _samples(batch: Batch) -> int:
    """Check a micro-batch and return its number of samples."""
    inputs, targets = batch
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets in a micro-batch")
    return len(inputs)


def _labelled(batch: Batch, ignore_index: int) -> int:
    """Check a micro-batch and return its number of labelled tokens."""
    inputs, targets = batch
    if inputs.shape != targets.shape or inputs.numel() == 0:
        raise ValueError(f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}")
    return int((targets != ignore_index).sum())


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _drop_gradients(params: list[Tensor]) -> None:
    for p in params:
        p.grad = None


def _rescale(params: list[Tensor], factor: float) -> None:
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _backward_sum(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Tensor:
    """Backward of the sum (not the mean) over the samples; return the sum."""
    inputs, targets = batch
    loss = _wide(loss_fn(model(inputs), targets)) * len(inputs)
    loss.backward()
    return loss.detach()


def _backward_share(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    share: float,
    dtype: torch.dtype,
    scaler: GradScaler | None,
) -> Tensor:
    """Backward of `share` times the mean over the samples; return the mean."""
    inputs, targets = batch
    low = dtype is not torch.float32
    with torch.autocast(inputs.device.type, dtype, enabled=low):
        output = [model(inputs).float() if low else model(inputs)]
        loss = loss_fn(output.pop(), targets)
    goal = loss * share
    if scaler is not None:
        goal = scaler.scale(goal)
    goal.backward()
    return loss.detach().float()


def _token_nll(model: nn.Module, batch: Batch, ignore_index: int) -> Tensor:
    """The sum of -log p(label) over the labelled tokens; 0, with a graph, if there are none."""
    inputs, targets = batch
    labelled = targets != ignore_index
    logits = _wide(model(inputs)[labelled])
    labels = targets[labelled].unsqueeze(-1)
    return -(logits.gather(-1, labels).squeeze(-1) - logits.logsumexp(-1)).sum()


def _norm(params: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together."""
    return torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()


@contextmanager
def _without_gradients(params: list[Tensor]) -> Iterator[None]:
    """Start without gradients and leave none."""
    _drop_gradients(params)
    try:
        yield
    finally:
        _drop_gradients(params)


# Part 1


def accumulate(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn, optimizer: Optimizer
) -> Tensor:
    samples = sum(_samples(batch) for batch in _some(micro_batches))
    params = _held(optimizer)
    _drop_gradients(params)
    total = sum(_backward_sum(model, batch, loss_fn) for batch in micro_batches)
    _rescale(params, 1 / samples)
    optimizer.step()
    return total / samples


# Part 2


def accumulate_tokens(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    tokens = sum(_labelled(batch, ignore_index) for batch in _some(micro_batches))
    if tokens == 0:
        raise ValueError(f"0 labelled tokens in {len(micro_batches)} micro-batches")
    params = _held(optimizer)
    _drop_gradients(params)
    total = torch.zeros((), dtype=torch.float32)
    for batch in micro_batches:
        nll = _token_nll(model, batch, ignore_index)
        nll.backward()
        total = total.to(nll.device) + nll.detach()
        del nll
    _rescale(params, 1 / tokens)
    optimizer.step()
    return total / tokens


# Part 3


def train_epoch(
    model: nn.Module,
    micro_batches: Iterable[Batch],
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    window: int,
    dtype: torch.dtype = torch.float32,
    scaler: GradScaler | None = None,
    scheduler: LRScheduler | None = None,
    max_norm: float | None = None,
) -> list[WindowResult]:
    if window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
    if (dtype is torch.float16) != (scaler is not None and scaler.is_enabled()):
        raise ValueError(f"a scaler belongs to float16 and to it alone: {dtype}, scaler {scaler}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")

    params = _held(optimizer)
    source = iter(micro_batches)
    results: list[WindowResult] = []
    for first in source:
        with _without_gradients(params):
            samples = 0
            total = torch.zeros((), dtype=torch.float32)
            for batch in chain([first], islice(source, window - 1)):
                # The gradients are always those of the mean over the samples so far: the window's
                # size need not be known in advance.
                new = _samples(batch)
                _rescale(params, samples / (samples + new))
                share = new / (samples + new)
                loss = _backward_share(model, batch, loss_fn, share, dtype, scaler)
                total = total.to(loss.device) + loss * new
                samples += new
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = _norm(params)
            finite = dtype is not torch.float16 or bool(norm.isfinite())
            if finite:
                if max_norm is not None and norm > max_norm:
                    _rescale(params, max_norm / float(norm))
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        if finite and scheduler is not None:
            scheduler.step()
        results.append(WindowResult(total / samples, norm.float(), not finite))
    if not results:
        raise ValueError("0 micro-batches in the epoch")
    return results


def scaled_lr(lr: float, batch_size: int, new_batch_size: int, *, rule: str) -> float:
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule must be 'linear' or 'sqrt', not {rule!r}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, not {lr}")
    for size in (batch_size, new_batch_size):
        if size < 1:
            raise ValueError(f"a batch size must be at least 1, not {size}")
    growth = new_batch_size / batch_size
    return lr * (growth if rule == "linear" else math.sqrt(growth))


# Part 4


def accumulate_on_ranks(
    model: DistributedDataParallel,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    bad: Exception | None = None
    mine = 0
    try:
        mine = sum(_labelled(batch, ignore_index) for batch in _some(micro_batches))
    except Exception as error:  # the other ranks wait for this one
        bad = error
    device = next(model.parameters()).device
    facts = torch.tensor([mine, bad is not None, 1], dtype=torch.int64, device=device)
    dist.all_reduce(facts, group=model.process_group)
    tokens, bad_ranks, ranks = facts.tolist()
    if bad is not None:
        raise ValueError(f"bad window on this rank: {bad}") from bad
    if bad_ranks:
        raise ValueError(f"bad window on {bad_ranks} of {ranks} ranks, not on this one")
    if tokens == 0:
        raise ValueError(f"0 labelled tokens on all {ranks} ranks")

    params = _held(optimizer)
    _drop_gradients(params)

    def backward(batch: Batch) -> Tensor:
        nll = _token_nll(model, batch, ignore_index)
        nll.backward()
        return nll.detach()

    total = torch.zeros((), dtype=torch.float32, device=device)
    with model.no_sync():
        for batch in islice(micro_batches, len(micro_batches) - 1):
            total = total + backward(batch)
    total = total + backward(micro_batches[-1])
    _rescale(params, ranks / tokens)  # DDP left sum / ranks
    optimizer.step()
    return total / tokens
