"""Gradient accumulation: the gradients of a large batch in the memory of a small one.

Four parts: one window of unequal micro-batches, a window of tokens, a whole epoch (partial windows,
mixed precision, a schedule), and the same window on several ranks with one all-reduce.

A *window* is the group of micro-batches whose gradients make one optimizer step. Whatever a loss
averages over, the window's loss averages over all of it: an average of averages is another number
as soon as the micro-batches differ in size.

Sources: Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), for the learning rate;
torch.nn.parallel.DistributedDataParallel.no_sync.
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
    grad_norm: Tensor  # 2-norm of the window's true gradients before clipping: float32 scalar
    skipped: bool  # whether an overflow kept the weights as they were


# Part 1


def accumulate(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn, optimizer: Optimizer
) -> Tensor:
    """One optimizer step on the mean loss over all samples of a window.

    The gradients are those of the window in one batch, up to float32 rounding, however the samples
    are spread over the micro-batches (if the model treats each sample by itself). Gradients from
    before do not count, and a parameter that gets none in this window is not stepped. The window's
    gradients are still in place after the step.

    The model runs once on each micro-batch, in the mode (train or eval) that it is in; the data are
    only read. At any moment there are the activations of one micro-batch and one set of gradients:
    the peak does not depend on the number of micro-batches.

    Args:
        model: from inputs to one output tensor (samples, ...).
        micro_batches: pairs (tuples or lists) of inputs and targets; both parts of a pair have the
            same number of samples, other pairs may have another.
        loss_fn: from an output and its targets to the mean over their samples, a scalar.
        optimizer: holds the parameters to be trained; it steps once.

    Returns:
        The mean loss over the window's samples, a scalar without a graph.

    Raises:
        ValueError: no micro-batch; one that is no pair, is empty, or whose parts differ in length.
            Names the lengths (0 where there is no micro-batch), and nothing has been changed.
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

    A token counts once wherever it stands: the loss is the sum over the window's labelled tokens,
    divided by their number. Micro-batches, and the sequences in them, have different numbers of
    labelled tokens; a micro-batch may have none (and may then be left out). Otherwise as
    `accumulate`.

    Args:
        model: from inputs (samples, length), int64, to logits (samples, length, classes).
        micro_batches: pairs of inputs and targets, both (samples, length), int64. A target is the
            label of the token at its place (nothing is to be shifted), or `ignore_index`.
        optimizer: holds the parameters to be trained; it steps once.
        ignore_index: the target of a token that has no label.

    Returns:
        The mean loss over the window's labelled tokens, a scalar without a graph.

    Raises:
        ValueError: no micro-batch, or none with a labelled token; one that is no pair, is empty, or
            whose parts differ in shape. Names the numbers or shapes, and nothing has been changed.
    """
    raise NotImplementedError


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
    """Train on all micro-batches, `window` of them to an optimizer step.

    The last window may be smaller: its loss is the mean over the samples that it has. Forward and
    loss run under autocast in `dtype`, backward outside; the loss is computed from the output in
    float32. Each window is unscaled, clipped, stepped and (the scaler) updated once. An overflow in
    any of its micro-batches skips the whole window: weights, optimizer state and schedule stay.
    Without a scaler no window is skipped.

    Micro-batches are taken from the iterator as they are needed: none of the next window before
    this one has stepped. When the epoch ends, by an error too, none of its gradients is left:
    `grad` is None in the optimizer's parameters (if no window was finished, it may be what it was
    before). Windows that were finished count, and an unfinished one has not stepped. The model runs
    once on each micro-batch. At any moment there are the activations of one micro-batch and one set
    of gradients, whatever the window and the number of windows.

    Args:
        model: from inputs to one output tensor (samples, ...).
        micro_batches: pairs as in `accumulate`; may be an iterator, which can be read once.
        loss_fn: from an output and its targets to the mean over their samples, a scalar.
        optimizer: holds the parameters to be trained; it steps once a window.
        window: micro-batches to a step.
        dtype: torch.float32 (no autocast), torch.bfloat16 or torch.float16.
        scaler: needed for float16, and None for any other dtype.
        scheduler: advances once for each step that was taken.
        max_norm: clip the window's gradients to this norm; None leaves them.

    Returns:
        One result for each window, in order.

    Raises:
        ValueError: a window below 1, another dtype, float16 without a scaler or a scaler without
            float16, a max_norm that is not positive, no micro-batch at all; names the value
            (0 micro-batches), and nothing has been changed. A bad micro-batch (as in `accumulate`)
            ends the epoch, and its window does not step.
    """
    raise NotImplementedError


def scaled_lr(lr: float, batch_size: int, new_batch_size: int, *, rule: str) -> float:
    """The learning rate for another number of samples to a step, from one that works.

    Args:
        lr: the learning rate that was tuned for `batch_size`.
        batch_size: samples to a step (all micro-batches of a window, all ranks).
        new_batch_size: samples to a step now.
        rule: "linear", the rate grows as the batch (SGD: k steps become one k times as long), or
            "sqrt", as its square root (the noise of a mean falls as 1 / sqrt(samples); Adam).

    Raises:
        ValueError: another rule; lr not positive, a batch size below 1. Names the value.
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
    """`accumulate_tokens` over the windows of all ranks together: one step, equal everywhere.

    Every rank of the model's process group calls this with its own micro-batches. Ranks have
    different numbers of labelled tokens (a rank may have none) and may have different numbers of
    micro-batches. The gradients are those of one process that has all ranks' micro-batches in its
    window: DDP averages over ranks, and what counts is the mean over tokens.

    Communication in a window, for a model without buffers: one small all-reduce before the first
    forward pass (what each rank has, at most 8 numbers), and DDP's own all-reduce of the gradients
    once, in the backward pass of the rank's last micro-batch.

    Args:
        model: the model in DDP, from inputs (samples, length) to logits (samples, length, classes).
        micro_batches: this rank's pairs, as in `accumulate_tokens`.
        optimizer: holds the model's parameters.
        ignore_index: the target of a token that has no label.

    Returns:
        This rank's share of the mean loss over all ranks' labelled tokens, a scalar without a
        graph: the shares of all ranks add up to the loss.

    Raises:
        ValueError: on every rank, so that none is left waiting: a rank with no micro-batch or with
            a bad one (as in `accumulate_tokens`), or no labelled token on any rank. Nothing has
            been changed. The rank with the bad window names what is bad, as in `accumulate_tokens`.
    """
    raise NotImplementedError


# untouched stub 896752618670
