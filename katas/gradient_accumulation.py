"""Gradient accumulation: the gradients of a large batch in the memory of a small one.

A window is the micro-batches whose gradients make one optimizer step. Its loss is the mean over
all its samples.

    untouched  modes, hooks and training flags, after an error too; data is not written to; no seed
               is set
    errors     ValueError, before any change; the message names the offending value, or the
               number in parentheses
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


# untouched stub 858e1a3c4e45
