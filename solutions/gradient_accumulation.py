"""Gradient accumulation: the gradients of a large batch in the memory of a small one.

A window is the micro-batches whose gradients make one optimizer step. Its loss is the mean over
all its samples.

    untouched  modes, hooks and training flags, after an error too; data is not written to; no seed
               is set
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

    loss: Tensor  # the mean over the window's samples: float32 scalar, not scaled, without a graph
    grad_norm: Tensor  # 2-norm of all its gradients, unscaled, not clipped: float32 scalar
    skipped: bool  # whether an overflow kept the weights as they were


# Part 1


def accumulate(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn, optimizer: Optimizer
) -> Tensor:
    """One optimizer step on the mean loss over a window's samples.

        gradients  those of the window in one batch, up to rounding; older ones do not count
        step       one, with the whole window's gradients, which stay
        passes     one forward pass a micro-batch, in order
        memory     one micro-batch's activations, one set of gradients; your code holds no output
                   during backward

        >>> accumulate(model, [(x, y), (more_x, more_y)], F.mse_loss, optimizer)
        tensor(0.6931)

    Args:
        model: from inputs to one output, each sample by itself.
        micro_batches: pairs of tensors of one length, in tuples or lists.
        loss_fn: from output and targets to the mean over samples.
        optimizer: holds what is trained, the loss's parameters too.

    Returns:
        That loss, a scalar without a graph.

    Raises:
        no micro-batch (0); one that is no pair, has no samples, or has two lengths.

    Details:
        1. A parameter without a gradient in this window is not stepped, whatever it had before.
        2. A frozen parameter keeps its value. So does one that `optimizer` does not hold; its
           `grad` is not cleared, and may grow.
        3. An error in model, loss or optimizer comes through, and no step follows.
        4. The cache of the caller's autocast has no weights from before the step.
    """
    samples = _count_samples(micro_batches)
    optimizer.zero_grad()
    shares = []
    for inputs, targets in micro_batches:
        # The share of the samples, not 1 / number of micro-batches: they differ in size. No name
        # for the output: it would live through the backward pass.
        loss = loss_fn(model(inputs), targets) * (len(inputs) / samples)
        # Backward at once, so that this graph is gone before the next one is built.
        loss.backward()
        shares.append(loss.detach())
    optimizer.step()
    torch.clear_autocast_cache()  # the caller's: it has copies of the weights before the step
    return torch.stack(shares).sum()


def _count_samples(micro_batches: Sequence[Batch]) -> int:
    """The samples of a window that is worth a step; all of it is checked before the first pass."""
    for batch in micro_batches:
        inputs, targets = _pair(batch)
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise ValueError(f"as many inputs as targets, above 0: {len(inputs)}, {len(targets)}")
    if len(micro_batches) == 0:
        raise ValueError(f"a window needs a micro-batch, and has {len(micro_batches)}")
    return sum(len(inputs) for inputs, _ in micro_batches)


def _pair(batch: Batch) -> Batch:
    # A tensor of two rows can be unpacked too.
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"a micro-batch is a pair, inputs and targets, not {batch!r:.60}")
    return batch


# Part 2


def accumulate_tokens(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """One optimizer step on the mean cross entropy over all labelled tokens of a window.

        divisor  the window's labelled tokens: each counts once
        window   otherwise as in `accumulate`, with `F.cross_entropy`'s memory

        >>> accumulate_tokens(model, [(ids, labels)], optimizer, ignore_index=0)
        tensor(4.1589)

    Args:
        model: from inputs to logits (samples, length, classes).
        micro_batches: inputs and shifted targets, both (samples, length), int64.
        ignore_index: the target of a token without a label.

    Raises:
        as in `accumulate`; also two shapes, length 0, or no labelled token (0).

    Details:
        1. A micro-batch without a labelled token adds zeros, and need not run.
        2. Neither targets nor logits need be contiguous.
        3. 16-bit logits become float32 before the loss.
        4. Parameters without a gradient, those of others, errors, and autocast are as in
           `accumulate`.
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
    torch.clear_autocast_cache()
    return torch.stack(shares).sum()


def _count_tokens(micro_batches: Sequence[Batch], ignore_index: int) -> int:
    for batch in micro_batches:
        inputs, targets = _pair(batch)
        if inputs.shape != targets.shape or inputs.numel() == 0:
            shapes = f"{tuple(inputs.shape)}, {tuple(targets.shape)}"
            raise ValueError(f"inputs and targets of one shape, (samples, length), not {shapes}")
    if len(micro_batches) == 0:
        raise ValueError(f"a window needs a micro-batch, and has {len(micro_batches)}")
    return sum(int((targets != ignore_index).sum()) for _, targets in micro_batches)


def _sum_over_tokens(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # a sum over thousands of tokens does not fit into 16 bits
    # reduction="mean" would divide by this micro-batch's tokens, and by 0 where it has none.
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
    """Train on all micro-batches, `window` to a step.

        windows    as in `accumulate`; the last may be shorter, divided by what it has
        data       no micro-batch is taken before the previous window has stepped
        clipping   once a window, by the norm over all that `optimizer` holds
        scheduler  advances after each step taken
        end        once a window has begun, every held `grad` is None, errors or not

        >>> results = train_epoch(model, loader, F.mse_loss, optimizer, window=4)

    Args:
        micro_batches: iterable of pairs.
        window: at least 1.
        dtype: torch.float32; others, and `scaler`, in details.
        max_norm: above 0.

    Returns:
        One result a window.

    Raises:
        another window, dtype, scaler or max_norm; no micro-batch (0).

    Details:
        1. Parameters without a gradient, those of others, and autocast are as in `accumulate`.
           Each window has gradients: dense, and not 16-bit.
        2. An error, or a bad micro-batch, ends the epoch before its window's step: finished
           windows count. If the first window is bad, older gradients may stay.
        3. torch.bfloat16 and torch.float16: forward and loss run under autocast, backward after
           it; the loss is computed from the output as float32.
        4. torch.float16, and no other dtype, has an enabled `scaler`: a window is unscaled once,
           before norm and clipping, and updated once.
        5. An overflow in any micro-batch skips the window: weights, optimizer state and schedule
           stay. The scaler knows: norm, loss, weights and calls of step() do not tell.
        6. The peak of a window is that of `accumulate`, plus the data of two windows.
    """
    _check_epoch(window, dtype, scaler, max_norm)
    iterator, results = iter(micro_batches), list[WindowResult]()
    # islice takes no more than a window; what it finds is also the size of the last one.
    while batches := list(itertools.islice(iterator, window)):
        result = _window_step(model, batches, loss_fn, optimizer, dtype, scaler, max_norm)
        if scheduler is not None and not result.skipped:
            scheduler.step()
        results.append(result)
    if not results:
        raise ValueError("0 micro-batches: the iterator is empty, or was read to its end before")
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
            # Outside autocast. Every micro-batch under the same scale: it may not change before
            # the window's end.
            (loss if scaler is None else scaler.scale(loss)).backward()
            shares.append(loss.detach().float())

        if scaler is not None:
            scaler.unscale_(optimizer)  # once: the gradients are whole now
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grad_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if max_norm is not None:
            clip_grads_with_norm_(parameters, max_norm, grad_norm)
        skipped = _step(optimizer, scaler)
    finally:
        optimizer.zero_grad()
    torch.clear_autocast_cache()  # or the caller goes on with old weights
    return WindowResult(torch.stack(shares).sum(), grad_norm.float(), skipped)


def _output(model: nn.Module, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    output: Tensor = model(inputs)
    # As it is without autocast: a model in float64 has its loss in float64.
    return output if dtype == torch.float32 else output.float()


def _step(optimizer: Optimizer, scaler: GradScaler | None) -> bool:
    """Step, and say whether the step was skipped."""
    if scaler is None or not scaler.is_enabled():
        optimizer.step()
        return False
    # Not scaler.step(): after an overflow it calls a fused optimizer all the same, and fused SGD
    # makes its momentum of whatever is in memory. unscale_() has looked for infinities already.
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:  # it falls after an overflow and at no other time
        return True
    optimizer.step()
    return False


def _check_epoch(
    window: int, dtype: torch.dtype, scaler: GradScaler | None, max_norm: float | None
) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1 micro-batch, not {window}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
    if (scaler is not None and scaler.is_enabled()) != (dtype == torch.float16):
        raise ValueError(f"a scaler is for float16, and only for it: {scaler} with {dtype}")
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

        divisor  labelled tokens of all ranks; DDP averages
        window   as in `accumulate_tokens`, and equal everywhere
        sends    one all-reduce of at most 8 numbers before any forward; gradients only in
                 the last backward, by DDP

        >>> share = accumulate_on_ranks(DistributedDataParallel(model), my_window, optimizer)

    Args:
        model: in DDP without `find_unused_parameters`, `static_graph`, buffers or a pending
            backward pass; outside `no_sync()`.

    Returns:
        This rank's share of the mean loss; all add up to it.

    Raises:
        on all ranks, if one has a bad window (and names it) or none a labelled token.

    Details:
        1. Any micro-batch, or a whole rank, may be without a labelled token.
        2. Ranks are those of `model.process_group`; no other group is involved.
        3. Afterwards, after an error too, DDP synchronises as before.
        4. As in `accumulate_tokens`: parameters without a gradient, 16-bit logits, autocast, and
           an error that all ranks raise before their last loss.
    """
    tokens, problem = 0, None
    try:
        tokens = _count_tokens(micro_batches, ignore_index)
    except Exception as error:  # whatever it is: the others wait in the all-reduce below
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
        # Forward inside no_sync() too: DDP decides there whether this backward will communicate.
        with model.no_sync() if number < len(micro_batches) else nullcontext():
            loss = _sum_over_tokens(model(inputs), targets, ignore_index) / all_tokens
            # DDP divides the sum over ranks by their number. That is not ours: multiply it away.
            (loss * ranks).backward()
        shares.append(loss.detach())
    optimizer.step()
    torch.clear_autocast_cache()
    return torch.stack(shares).sum()


# Part 5, the stretch


def scaled_lr(lr: float, batch_size: int, new_batch_size: int, *, rule: str) -> float:
    """The learning rate for another number of samples to a step, from one that works.

        linear  it grows as the batch (SGD; Goyal et al., arXiv 1706.02677)
        sqrt    it grows as the square root of the batch (Adam)

        >>> scaled_lr(0.1, 256, 8192, rule="linear")
        3.2

    Args:
        lr: above 0, tuned for `batch_size`.
        batch_size: samples to a step, of all micro-batches and ranks; at least 1.
        new_batch_size: the same, now.
        rule: a name from the table.

    Raises:
        another rule, lr or batch size.
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
