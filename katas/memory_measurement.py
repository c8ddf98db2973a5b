"""Memory measurement: count the bytes before you cut them.

Four parts: the bytes of training state, the bytes that autograd saves for the backward pass, the
peak of a step on any device, and the closed form that predicts the state before anything is built.

All figures are bytes (int). Memory belongs to storages, not to tensors: a view shares its storage
with its base, so every storage is counted once and in full, however many tensors look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class StateBytes(NamedTuple):
    """Bytes of training state by kind."""

    parameters: int
    gradients: int
    buffers: int
    optimizer: int


class PeakMemory(NamedTuple):
    """Bytes of one measured step."""

    baseline: int  # alive before the step
    peak: int  # the most that was alive at any moment of the step, baseline included
    retained: int  # alive after the step, less the baseline; negative if the step freed some


# Part 1


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """Bytes of a model's parameters, gradients and buffers, and of an optimizer's state.

    Each storage counts once, in full, under the first kind that holds it (parameters, gradients,
    buffers, optimizer): tied parameters count once, a view or an expanded tensor counts as the
    storage behind it. Frozen parameters and non-persistent buffers count; a gradient that is None
    does not. Optimizer state is every tensor in `optimizer.state`, however deep in lists, tuples
    and dicts; before the first step Adam has none.

    Args:
        model: any module with dense tensors, on any device, the meta device included.
        optimizer: None counts as no state.

    Raises:
        TypeError: `model` is not a Module or `optimizer` is not an Optimizer; names the type.
    """
    raise NotImplementedError


# Part 2


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd holds between the forward and the backward pass.

    Counts the tensors that were saved for a backward pass while `forward` ran and that are still
    held when it returns, each storage once and in full. What was saved for a graph that is gone by
    then does not count. Storages of `model`'s parameters and buffers never count, in whatever shape
    they are saved (Linear saves its weight as a transposed view): they are there anyway. The input
    counts, if it is saved. Afterwards the graph is as free to go as without the count.

    Args:
        forward: runs the forward pass; its result is kept alive until the count is taken.
        model: whose parameters and buffers to leave out.

    Raises:
        TypeError: `forward` is not callable or `model` is not a Module; names the type.
        Any error of `forward`, unchanged; no hook is left behind.
    """
    raise NotImplementedError


# Part 3


def peak_memory(
    step: Callable[[], object],
    device: torch.device | str,
    existing: Iterable[Tensor] = (),
) -> PeakMemory:
    """Run `step` once and say how many bytes were alive before, at the peak, and after.

    On cuda the allocator counts. On the cpu nothing counts for us: a TorchDispatchMode watches
    every operation, forward and backward, and keeps the sum of live storages. A temporary counts
    while it lives; a view or an in-place result takes no memory; what is freed is given back. Two
    measurements are independent: neither reports the peak of the other. Memory of other devices
    does not count.

    Args:
        step: runs the work; what it returns is dropped before `retained` is read.
        device: "cpu", "cuda" or "cuda:N", as a string or a torch.device.
        existing: every tensor alive before the step that it may use or free (parameters,
            gradients, optimizer state, inputs). On the cpu they are the baseline, each storage
            once; on cuda the allocator knows them already. An iterator is emptied in either case,
            and nothing of it is kept: what the step frees must be free to go.

    Raises:
        ValueError: `device` names another kind of device, or none, or a cuda device that is not
            there; names it. The step has not run then.
        Any error of `step`, unchanged; no mode is left behind.
    """
    raise NotImplementedError


# Part 4


def training_bytes(
    n_params: int,
    recipe: str,
    *,
    trainable: int | None = None,
    zero_stage: int = 0,
    ranks: int = 1,
) -> int:
    """Bytes of training state on one rank, from arithmetic alone; activations are not in it.

    The convention, in bytes a parameter (weights + gradients + optimizer):

    - "sgd": 4 + 4 + 0, all fp32
    - "sgd_momentum": 4 + 4 + 4
    - "adam": 4 + 4 + 8, two fp32 moments
    - "amp_adam": the same as "adam". Autocast keeps fp32 weights and gradients; its 16-bit copies
      of the weights live for one forward and backward and are counted with the activations.
    - "master_adam": 2 + 2 + 12, 16-bit weights and gradients; the optimizer holds an fp32 master
      copy and two fp32 moments. This is the 16 of the ZeRO paper (arXiv 1910.02054, section 3.1);
      with fp32 gradients in place of the 16-bit ones people count 18, with both kinds 20.
    - "lora_16bit": `n_params` frozen weights of 2, and `trainable` adapter parameters as "adam"
    - "lora_4bit": `n_params` frozen weights of half a byte (quantisation constants not counted),
      and `trainable` adapter parameters as "adam"

    ZeRO stage 1 divides the optimizer's part among the ranks, stage 2 the gradients too, stage 3
    the weights too, frozen ones included. A divided part is ceil(parameters / ranks) parameters
    long on every rank, since shards are padded to one size. An odd half byte is rounded up.

    Args:
        n_params: parameters of the model; for LoRA of the frozen model, adapters not included.
        recipe: one of the names above.
        trainable: parameters of the adapters; for the LoRA recipes, and only for them.
        zero_stage: 0 (nothing divided) to 3.
        ranks: data-parallel ranks, at least 1.

    Raises:
        TypeError: a count is not an int (a float such as 7e9, or a bool); names the value.
        ValueError: an unknown recipe, a negative count, `trainable` given for a recipe without
            adapters or missing for one with them, a stage outside 0 to 3, fewer than 1 ranks; names
            the value.
    """
    raise NotImplementedError


# untouched stub 72fb840f6d6b
