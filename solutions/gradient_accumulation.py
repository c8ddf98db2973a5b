"""Gradient accumulation: the gradients of a large batch in the memory of a small one.

A window is the micro-batches whose gradients make one optimizer step. Its loss is the mean over
all its samples.

    untouched  modes, hooks and requires_grad, after an error too; data; the random seed
    errors     ValueError, before any change; the message names the offending value, or the
               number in parentheses
"""

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
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (samples, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to the mean over their samples


class WindowResult(NamedTuple):
    """What one window did."""

    loss: Tensor  # the mean over the window's samples: detached float32 scalar, unscaled
    grad_norm: Tensor  # 2-norm of all gradients, unscaled, before clipping: float32 scalar
    skipped: bool  # whether an overflow cancelled the step


# Part 1


def accumulate(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn, optimizer: Optimizer
) -> Tensor:
    """One optimizer step on the mean loss over a window's samples.

        gradients  those of the window in one batch, up to rounding; older ones do not count
        step       one, after the last backward; the window's gradients stay in `grad`
        passes     one forward pass per micro-batch, in order
        memory     one micro-batch's activations, one set of gradients; your code holds no output
                   during backward

        >>> accumulate(model, [(x, y), (more_x, more_y)], F.mse_loss, optimizer)
        tensor(0.6931)

    Args:
        model: maps inputs to one output, each sample independently.
        micro_batches: pairs of inputs and targets of the same length.
        loss_fn: maps output and targets to the mean over samples.
        optimizer: holds everything that is trained, the loss's parameters too.

    Returns:
        That loss, a detached scalar.

    Raises:
        no micro-batch (0); one without samples, or with inputs and targets of different lengths.

    Details:
        1. A parameter that gets no gradient in this window, such as a frozen one, is not stepped.
    """
    samples = _count_samples(micro_batches)
    optimizer.zero_grad()
    shares = []
    for inputs, targets in micro_batches:
        # The share of the samples, not 1 / len(micro_batches): sizes differ. The output has no
        # name, which would keep it alive during backward.
        loss = loss_fn(model(inputs), targets) * (len(inputs) / samples)
        # Backward right away: this graph is freed before the next one is built.
        loss.backward()
        shares.append(loss.detach())
    optimizer.step()
    return torch.stack(shares).sum()


def _count_samples(micro_batches: Sequence[Batch]) -> int:
    """The number of samples in a window, after checking every micro-batch."""
    for inputs, targets in micro_batches:
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets in a micro-batch")
    if len(micro_batches) == 0:
        raise ValueError(f"a window needs a micro-batch, got {len(micro_batches)}")
    return sum(len(inputs) for inputs, _ in micro_batches)


# Part 2


def accumulate_tokens(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """One optimizer step on the mean cross entropy over all labelled tokens of a window.

        divisor  the number of labelled tokens in the window
        window   otherwise as in `accumulate`; the loss may use `F.cross_entropy`'s memory

        >>> accumulate_tokens(model, [(ids, labels)], optimizer, ignore_index=0)
        tensor(4.1589)

    Args:
        model: maps inputs to logits (samples, length, classes).
        micro_batches: inputs and already shifted targets, both (samples, length), int64.
        ignore_index: the target of a token without a label.

    Raises:
        as in `accumulate`; also different shapes, or no labelled token (0).

    Details:
        1. A micro-batch without a labelled token adds nothing, and need not run.
        2. Targets and logits may be non-contiguous.
        3. 16-bit logits become float32 before the loss.
    """
    tokens = _count_tokens(micro_batches, ignore_index)
    if tokens == 0:
        raise ValueError(f"{len(micro_batches)} micro-batches with {tokens} labelled tokens")
    optimizer.zero_grad()
    shares = []
    for inputs, targets in micro_batches:
        loss = _sum_over_tokens(model(inputs), targets, ignore_index) / tokens
        loss.backward()
        shares.append(loss.detach())
    optimizer.step()
    return torch.stack(shares).sum()


def _count_tokens(micro_batches: Sequence[Batch], ignore_index: int) -> int:
    for inputs, targets in micro_batches:
        if inputs.shape != targets.shape or inputs.numel() == 0:
            shapes = f"inputs {tuple(inputs.shape)}, targets {tuple(targets.shape)}"
            raise ValueError(f"expected the same shape, and not an empty one: {shapes}")
    if len(micro_batches) == 0:
        raise ValueError(f"a window needs a micro-batch, got {len(micro_batches)}")
    return sum(int((targets != ignore_index).sum()) for _, targets in micro_batches)


def _sum_over_tokens(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # a sum over thousands of tokens does not fit in 16 bits
    # reduction="mean" would divide by this micro-batch's tokens, and by 0 if it has none.
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )


# Part 3; mixed precision is part 5, the stretch


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
    """Train on all micro-batches, `window` per step.

        windows    as in `accumulate`; the last may be shorter, divided by the samples it has
        data       no micro-batch is taken before the previous window has stepped
        clipping   once per window, by the norm over all of `optimizer`'s parameters
        scheduler  advances after each step taken
        end        `grad` of `optimizer`'s parameters is None, after an error in a window too

        >>> results = train_epoch(model, loader, F.mse_loss, optimizer, window=4)

    Args:
        micro_batches: iterable of pairs.
        window: at least 1.
        dtype: torch.float32; others, and `scaler`, in details.
        max_norm: above 0.

    Returns:
        One result per window.

    Raises:
        any other window, dtype, scaler or max_norm; no micro-batch (0).

    Details:
        1. An error, or a bad micro-batch, ends the epoch without a step for its window. Earlier
           steps remain.
        2. torch.bfloat16 and torch.float16: forward and loss run under autocast, backward outside;
           the loss gets the output as float32.
        3. torch.float16 needs an enabled `scaler`; no other dtype may have an enabled one. Unscale
           once per window, before norm and clipping, and update once.
        4. With a scaler, an overflow in any micro-batch skips the window: weights, optimizer state
           and schedule stay.
    """
    _check_epoch(window, dtype, scaler, max_norm)
    iterator, results = iter(micro_batches), list[WindowResult]()
    # islice takes at most a window, and fewer at the end of the data.
    while batches := list(itertools.islice(iterator, window)):
        result = _window_step(model, batches, loss_fn, optimizer, dtype, scaler, max_norm)
        if scheduler is not None and not result.skipped:
            scheduler.step()
        results.append(result)
    if not results:
        raise ValueError("0 micro-batches: the iterator is empty or used up")
    return results


def _window_step(
    model: nn.Module,
    batches: list[Batch],
    loss_fn: LossFn,
    optimizer: Optimizer,
    dtype: torch.dtype,
    scaler: GradScaler | None,
    max_norm: float | None,
) -> WindowResult:
    samples = _count_samples(batches)
    optimizer.zero_grad()
    try:
        shares = []
        for inputs, targets in batches:
            with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
                loss = loss_fn(_output(model, inputs, dtype), targets) * (len(inputs) / samples)
            # Outside autocast, and with the same scale for the whole window.
            (loss if scaler is None else scaler.scale(loss)).backward()
            shares.append(loss.detach().float())

        if scaler is not None:
            scaler.unscale_(optimizer)  # once, when the window's gradients are complete
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grad_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if max_norm is not None:
            clip_grads_with_norm_(parameters, max_norm, grad_norm)
        skipped = _step(optimizer, scaler)
    finally:
        optimizer.zero_grad()
    return WindowResult(torch.stack(shares).sum(), grad_norm.float(), skipped)


def _output(model: nn.Module, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    output: Tensor = model(inputs)
    # Unchanged in float32: the loss of a float64 model stays in float64.
    return output if dtype == torch.float32 else output.float()


def _step(optimizer: Optimizer, scaler: GradScaler | None) -> bool:
    """Step, and say whether the scaler skipped it."""
    if scaler is None:
        optimizer.step()
        return False
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < before  # it falls after an overflow and at no other time


def _check_epoch(
    window: int, dtype: torch.dtype, scaler: GradScaler | None, max_norm: float | None
) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1 micro-batch, not {window}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
    if (scaler is not None and scaler.is_enabled()) != (dtype == torch.float16):
        raise ValueError(f"float16, and only float16, needs a scaler: {dtype} with {scaler}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")


# Part 4


def accumulate_on_ranks(
    model: DistributedDataParallel,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """`accumulate_tokens` over the windows of all ranks.

        divisor  the number of labelled tokens on all ranks; DDP averages
        window   as in `accumulate_tokens`
        sends    one all-reduce of at most 8 numbers before any forward; gradients only in
                 the last backward, by DDP

        >>> share = accumulate_on_ranks(DistributedDataParallel(model), my_window, optimizer)

    Args:
        model: in DDP with default options, and without buffers.

    Returns:
        This rank's share of the mean loss; the shares add up to it.

    Raises:
        on all ranks, if one has a bad window (that rank names it) or none has a labelled token.

    Details:
        1. Any micro-batch, or a whole rank, may be without a labelled token.
        2. Ranks are those of `model.process_group`.
    """
    tokens, problem = 0, None
    try:
        tokens = _count_tokens(micro_batches, ignore_index)
    except Exception as error:  # raised below: the other ranks wait in the all-reduce
        problem = error
    device = next(model.parameters()).device
    counts = torch.tensor([tokens, int(problem is not None)], device=device)
    dist.all_reduce(counts, group=model.process_group)
    all_tokens, bad_ranks = counts.tolist()
    if problem:
        raise problem
    if bad_ranks or all_tokens == 0:
        raise ValueError(
            f"{all_tokens} labelled tokens in all, {bad_ranks} ranks with a bad window"
        )

    ranks = dist.get_world_size(model.process_group)
    optimizer.zero_grad()
    shares = []
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        # Forward inside no_sync() too: there DDP decides whether this backward will communicate.
        with model.no_sync() if number < len(micro_batches) else nullcontext():
            loss = _sum_over_tokens(model(inputs), targets, ignore_index) / all_tokens
            # DDP averages over the ranks, and a sum is wanted: multiply by their number.
            (loss * ranks).backward()
        shares.append(loss.detach())
    optimizer.step()
    return torch.stack(shares).sum()


# Part 5, the stretch


def scaled_lr(lr: float, batch_size: int, new_batch_size: int, *, rule: str) -> float:
    """The learning rate for a new batch size, from one that works.

        linear  grows with the batch (SGD; Goyal et al., arXiv 1706.02677)
        sqrt    grows with the square root of the batch (Adam)

        >>> scaled_lr(0.1, 256, 8192, rule="linear")
        3.2

    Args:
        lr: above 0, tuned for `batch_size`.
        batch_size: samples per step, over all micro-batches and ranks; at least 1.
        new_batch_size: the same for the new rate.
        rule: a name from the table.

    Raises:
        any other rule, lr or batch size.
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, not {lr}")
    for size in (batch_size, new_batch_size):
        if size < 1:
            raise ValueError(f"a batch size must be at least 1, not {size}")
    if rule == "linear":
        return lr * new_batch_size / batch_size
    if rule == "sqrt":
        return lr * math.sqrt(new_batch_size / batch_size)
    raise ValueError(f"rule must be 'linear' or 'sqrt', not {rule!r}")
