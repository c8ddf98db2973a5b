"""Memory measurement: count the bytes before you cut them.

All figures are bytes (int). Memory belongs to storages: all views of a tensor share one, which
counts once and in full. Tensors are dense.

    errors  ValueError, before any change; the message names the bad value
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class StateBytes(NamedTuple):
    """Bytes by kind."""

    parameters: int
    gradients: int
    buffers: int
    optimizer: int


class PeakMemory(NamedTuple):
    """Bytes of one step."""

    baseline: int  # alive before the step
    peak: int  # the most that was alive at any moment of the step, baseline included
    retained: int  # alive after the step, less the baseline; negative if the step freed some


# Part 1


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """Bytes of a model's parameters, gradients and buffers, and of an optimizer's state.

        parameters  frozen ones too
        gradients   of frozen parameters too; None is 0 bytes
        buffers     of every module, non-persistent ones too
        optimizer   tensors in `optimizer.state`; Adam has none before its first step
        sharing     a storage counts once and in full, under the first of these kinds that has it

        >>> state_bytes(nn.Linear(7, 3))
        StateBytes(parameters=96, gradients=0, buffers=0, optimizer=0)

    Details:
        1. Optimizer state may lie deep in lists, tuples and dicts.
        2. Hyperparameters in `optimizer.param_groups` are not state, even tensors.
        3. Tensors on the meta device count as on a real one.
        4. The model, its gradients and the optimizer stay as they are.
    """
    raise NotImplementedError


# Part 2


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd still holds for backward when `forward` has returned.

        held      tensors saved during `forward`, saved inputs too, if a graph still holds them:
                  the result's, or another that is kept, such as an auxiliary loss's
        sharing   a storage counts once and in full, however small the saved part
        left out  parameters and buffers that the model has after `forward`, and views of them
        after     backward works; the caller's saved-tensor hooks are as before; errors in
                  `forward` come through, and gc.collect() can free them

        >>> saved_bytes(lambda: model(x), model)

    Args:
        forward: called once.

    Details:
        1. A graph that is gone does not count, even if its tensors live on.
        2. Once the caller drops the result, its graph is freed without the garbage collector.
        3. If the caller has no hooks, gradients and memory are as after `forward` alone.
    """
    raise NotImplementedError


# Part 3, the stretch: part 4 comes before it


def peak_memory(
    step: Callable[[], object],
    device: torch.device | str,
    existing: Iterable[Tensor] = (),
) -> PeakMemory:
    """Run `step` once and say how many bytes were alive before, at the peak, and after.

        peak      temporaries count while they live: in forward, backward and optimizer step
        sharing   a view or an in-place result takes no memory; a slice keeps its whole storage
        retained  what the step frees is subtracted, so keep no tensor of `existing` alive
        after     errors in `step` come through, and gc.collect() can free them; no mode is left on

        >>> peak_memory(lambda: train_step(x), "cpu", [x, *model.parameters()])

    Args:
        step: called once; its result is dropped before `retained` is read.
        device: "cpu", "cuda" or "cuda:N", or a torch.device; only its memory counts.
        existing: every older tensor that the step uses or frees, gradients and optimizer state
            too; on the cpu they are the baseline.

    Raises:
        any other device type, such as mps.

    Details:
        1. Every dtype and every operation counts, under no_grad too, also Tensor.resize_() and
           `out=`, which enlarge a tensor. Temporaries inside one operation need not count.
        2. The peak is at least the baseline. Earlier measurements do not count.
        3. On cuda the allocator's bytes count, on the cpu the storages'.
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
    """Bytes of weights, gradients and optimizer state on one rank, by arithmetic.

    Bytes of a parameter, its gradient and its optimizer state:

        sgd           4+4+0
        sgd_momentum  4+4+4
        adam          4+4+8
        amp_adam      4+4+8: under autocast weights and gradients stay float32
        master_adam   2+2+12: fp32 master weights and two moments
        lora_16bit    2 for frozen weights; `trainable` adapter parameters as adam
        lora_4bit     1/2 for frozen weights; adapters likewise

        zero          stage 1 divides optimizer state by ranks, 2 also gradients, 3 also weights

        >>> training_bytes(7_500_000_000, "master_adam", zero_stage=3, ranks=64)
        1875000000

    Args:
        n_params: parameters; for LoRA the frozen ones.
        trainable: parameters of the adapters, for LoRA only.

    Raises:
        an unknown recipe; a stage that is not 0 to 3; ranks below 1; a negative count;
        `trainable` missing for LoRA, or given without it.

    Details:
        1. Shards are padded: every rank has ceil(parameters / ranks) of a divided part.
    """
    raise NotImplementedError


# untouched stub 5a10bdef0ce2
