"""Gradient accumulation: the gradients of a large batch in the memory of a small one.

A window is the micro-batches whose gradients make one optimizer step. Its loss is the mean over
all its samples.

    untouched  modes, hooks and requires_grad, after an error too; data; the random seed
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
    raise NotImplementedError


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
    raise NotImplementedError


# untouched stub 819a98cc1cc9
