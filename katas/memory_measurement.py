"""Memory measurement: count the bytes before you cut them.

All figures are bytes (int). Memory belongs to storages: all views of a tensor share one, which
counts once and in full. Tensors are dense.

    errors  ValueError unless it says otherwise; each names the offending value (a TypeError may
            name its type), and comes before any change
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
        gradients   of its parameters, frozen ones too; None is 0 bytes
        buffers     of every module, non-persistent ones too
        optimizer   tensors in `optimizer.state`; Adam has none before its first step
        sharing     a storage counts once, under the first of these kinds that has it

        >>> state_bytes(nn.Linear(7, 3))
        StateBytes(parameters=96, gradients=0, buffers=0, optimizer=0)

    Args:
        model: its tensors may have any dtype.
        optimizer: None counts as no state.

    Raises:
        TypeError: not a Module, or not an Optimizer; names the type.

    Details:
        1. A slice, an expanded or a strided tensor counts as the whole storage behind it.
        2. Optimizer state may lie deep in lists, (named) tuples and (ordered) dicts.
        3. Hyperparameters in `optimizer.param_groups` are not state, even tensors.
        4. A tensor on the meta device counts the bytes that it would take elsewhere.
        5. Model, gradients and optimizer stay as they are.
    """
    raise NotImplementedError


# Part 2


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd holds for backward passes when `forward` has returned.

        held      what was saved while `forward` ran, if a graph still holds it: its result's, or
                  one that somebody keeps, such as an auxiliary loss's
        sharing   a storage counts once and in full, however small the saved part
        left out  parameters and buffers that the model has after `forward`, and views of them
        after     what it raises comes through, and `gc.collect()` frees it; the hooks on saved
                  tensors are those from before; backward works, but need not notice changes in
                  place

        >>> saved_bytes(lambda: model(x), model)

    Args:
        forward: called once; it may return tensors in lists, tuples and dicts.
        model: its parameters and buffers are left out.

    Raises:
        TypeError: not a Module; names the type.

    Details:
        1. Sizes are those at the end. A graph that is gone does not count, even if its tensors live
           on.
        2. A saved input counts. What `forward` packs with hooks of its own need not count.
        3. Once the caller drops the result, its graph is freed without the garbage collector.
        4. Gradients, modes, random stream and memory are as with `forward` alone.
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
        retained  what the step frees is subtracted; a cycle not yet collected is alive
        after     what it raises comes through, and `gc.collect()` frees it; no mode is left

        >>> peak_memory(lambda: train_step(x), "cpu", [x, *model.parameters()])

    Args:
        step: called once; its result is dropped before `retained` is read.
        device: "cpu", "cuda" or "cuda:N", or a torch.device; only its memory counts.
        existing: older tensors that the step uses or frees, gradients and optimizer state too; on
            the cpu, the baseline. Those not listed may count as new.

    Raises:
        another of torch's devices (mps, meta), or a cuda device that is not there.

    Details:
        1. Every dtype counts, and every operation, under the caller's no_grad too. Temporaries
           inside one operation, or between two, need not count.
        2. `existing` may be an iterator: empty it, and keep no tensor that the step may free.
        3. The peak is at least the baseline; what an earlier measurement has seen does not count.
        4. Sizes are read after each operation and at the end. `resize_` and `out=` make tensors
           larger; FSDP frees and gathers parameters by `untyped_storage().resize_(n)`, which is no
           operation.
        5. On cuda the allocator's bytes count, on the cpu tensors'.
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
        lora_16bit    frozen weights of 2, and `trainable` adapter parameters as adam
        lora_4bit     frozen weights of 1/2, and adapters likewise

        zero          stage 1 divides optimizer state by ranks, 2 also gradients, 3 also weights

        >>> training_bytes(7_500_000_000, "master_adam", zero_stage=3, ranks=64)
        1875000000

    Args:
        n_params: parameters; for LoRA the frozen ones.
        recipe: a name from the table.
        trainable: parameters of the adapters, for LoRA only.
        zero_stage: 0 (divides nothing) to 3.
        ranks: at least 1.

    Raises:
        other recipes, stages and ranks; a negative count; `trainable` missing or out of place.

    Details:
        1. Shards are padded: every rank has ceil(parameters / ranks) of a divided part, frozen
           weights (stage 3) and adapters apart.
        2. Results are exact for every count; half a byte is rounded up.
        3. 0 parameters or adapters are fine.
        4. A float for any number raises TypeError, even a whole one (7e9).
    """
    raise NotImplementedError


# untouched stub 31c12f04a5fd
