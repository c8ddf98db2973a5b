"""A right answer from the stub alone, in torch's own idioms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def _count_samples(micro_batches: Sequence[Batch]) -> list[int]:
    """The number of samples of each micro-batch, all of them checked."""
    if len(micro_batches) == 0:
        raise ValueError("need at least one micro-batch, got 0")
    counts = []
    for index, (inputs, targets) in enumerate(micro_batches):
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise ValueError(
                f"micro-batch {index} has {len(inputs)} inputs and {len(targets)} targets, "
                "expected the same number, at least 1"
            )
        counts.append(len(inputs))
    return counts


def _count_tokens(micro_batches: Sequence[Batch], ignore_index: int) -> int:
    """The number of labelled tokens of all micro-batches, all of them checked."""
    if len(micro_batches) == 0:
        raise ValueError("need at least one micro-batch, got 0")
    for index, (inputs, targets) in enumerate(micro_batches):
        if inputs.shape != targets.shape or inputs.numel() == 0:
            raise ValueError(
                f"micro-batch {index} has inputs {tuple(inputs.shape)} and targets "
                f"{tuple(targets.shape)}, expected the same shape, not empty"
            )
    return sum(int((targets != ignore_index).sum()) for _, targets in micro_batches)


def _token_loss_sum(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits = logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="sum")


def _backward(loss: Tensor) -> Tensor:
    """Run backward and return the detached loss; the graph is freed with this call."""
    loss.backward()
    return loss.detach()


# Part 1


def accumulate(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn, optimizer: Optimizer
) -> Tensor:
    counts = _count_samples(micro_batches)
    samples = sum(counts)

    optimizer.zero_grad()
    total = 0.0
    for (inputs, targets), count in zip(micro_batches, counts, strict=True):
        total += _backward(loss_fn(model(inputs), targets) * (count / samples))
    optimizer.step()
    return total


# Part 2


def accumulate_tokens(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    tokens = _count_tokens(micro_batches, ignore_index)
    if tokens == 0:
        raise ValueError(f"0 labelled tokens in {len(micro_batches)} micro-batches")

    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in micro_batches:
        total += _backward(_token_loss_sum(model(inputs), targets, ignore_index) / tokens)
    optimizer.step()
    return total


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
        raise ValueError(f"window must be at least 1, got {window}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    if (dtype == torch.float16) != (scaler is not None and scaler.is_enabled()):
        raise ValueError(f"a scaler goes with float16 and only with it, got {dtype} and {scaler}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")

    results = []
    iterator = iter(micro_batches)
    # A whole window is read before its first forward pass: each weight depends on all its samples.
    while batches := list(itertools.islice(iterator, window)):
        counts = _count_samples(batches)
        try:
            results.append(
                _train_window(
                    model, batches, counts, loss_fn, optimizer, dtype, scaler, scheduler, max_norm
                )
            )
        finally:
            optimizer.zero_grad()
        del batches
    if not results:
        raise ValueError("need at least one micro-batch, got 0")
    return results


def _train_window(
    model: nn.Module,
    batches: Sequence[Batch],
    counts: Sequence[int],
    loss_fn: LossFn,
    optimizer: Optimizer,
    dtype: torch.dtype,
    scaler: GradScaler | None,
    scheduler: LRScheduler | None,
    max_norm: float | None,
) -> WindowResult:
    samples = sum(counts)

    optimizer.zero_grad()
    total = 0.0
    for (inputs, targets), count in zip(batches, counts, strict=True):
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_fn(
                model(inputs) if dtype == torch.float32 else model(inputs).float(), targets
            )
        loss = loss.float() * (count / samples)
        total += loss.detach()
        (loss if scaler is None else scaler.scale(loss)).backward()
        del loss  # its graph must not live through the next forward pass

    if scaler is not None:
        scaler.unscale_(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grad_norm = nn.utils.get_total_norm([p.grad for p in params])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(params, max_norm, grad_norm)

    if scaler is not None:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale  # it backs off after an overflow, and only then
    else:
        skipped = False
        optimizer.step()

    if scheduler is not None and not skipped:
        scheduler.step()
    return WindowResult(total, grad_norm.float(), skipped)


def scaled_lr(lr: float, batch_size: int, new_batch_size: int, *, rule: str) -> float:
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule must be 'linear' or 'sqrt', got {rule!r}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    for size in (batch_size, new_batch_size):
        if size < 1:
            raise ValueError(f"a batch size must be at least 1, got {size}")
    ratio = new_batch_size / batch_size
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))


# Part 4


def accumulate_on_ranks(
    model: DistributedDataParallel,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    group = model.process_group
    device = next(model.parameters()).device

    # A rank with a bad window must still take part in the all-reduce: the others wait in it.
    error = None
    tokens = 0
    try:
        tokens = _count_tokens(micro_batches, ignore_index)
    except Exception as e:
        error = e
    stats = torch.tensor([tokens, int(error is not None)], dtype=torch.int64, device=device)
    dist.all_reduce(stats, group=group)
    all_tokens, bad_ranks = stats.tolist()
    if error is not None:
        raise error
    if bad_ranks:
        raise ValueError(f"{bad_ranks} other rank(s) have a bad window")
    if all_tokens == 0:
        raise ValueError("0 labelled tokens on all ranks together")

    world_size = dist.get_world_size(group)
    optimizer.zero_grad()
    total = 0.0
    last = len(micro_batches) - 1
    for index, (inputs, targets) in enumerate(micro_batches):
        # The forward pass belongs inside no_sync: it prepares the backward pass's all-reduce.
        with nullcontext() if index == last else model.no_sync():
            share = _token_loss_sum(model(inputs), targets, ignore_index) / all_tokens
            total += share.detach()
            (share * world_size).backward()  # DDP divides the gradients by the world size
            del share
    optimizer.step()
    return total
