"""Fully sharded data parallel: a rank holds a part of the model, and gathers a block to use it.

A *unit* is gathered and freed together: a block without the blocks inside it, or the root, which is
the rest of the model. A rank keeps a *shard* of each parameter: on N ranks 1/N of its rows,
rounded up.

    ranks   all ranks of the mesh call together, alike except for data; a job may have more ranks
    errors  ValueError, before any change; for what is under Raises it names the offending value

Source: Zhao et al., PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (samples, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to the mean over their samples
BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


# Part 1; `dtype` is part 2, and `checkpoint` part 3


def wrap(
    model: nn.Module,
    mesh: DeviceMesh,
    block_types: BlockTypes,
    make_optimizer: MakeOptimizer,
    *,
    reshard_after_forward: bool = True,
    dtype: torch.dtype = torch.float32,
    checkpoint: bool = False,
) -> Optimizer:
    """Shard `model` in place with fully_shard, and make the optimizer of its shards.

        values      training matches one process that has the data of all ranks
        units       each block is a unit, blocks inside blocks too, and so is the root
        state       a rank holds its shards, their gradients and optimizer state, nothing whole
        calls       a step gathers each block for forward and again for backward, the root once,
                    and reduces each unit's gradients once
        gathered    in a chain of blocks at most the running block, the next one and the root
        kept        reshard_after_forward=False gathers each unit once, until after backward
        bfloat16    units cast their inputs to it, gather and compute in it; gradients are reduced
                    in float32, and shards and the model's output are float32
        checkpoint  an outermost block keeps only its inputs, and backward runs it again; gathers
                    and reductions stay the same

        >>> optimizer = wrap(model, mesh, Block, torch.optim.AdamW, dtype=torch.bfloat16)

    Args:
        model: float32, on the mesh's device, the same on every rank.
        mesh: one-dimensional.
        block_types: one class or a tuple; subclasses count. A block runs once in a forward.
        make_optimizer: takes the model's parameters and returns their optimizer.
        dtype: torch.float32 or torch.bfloat16.

    Raises:
        any other mesh or dtype; a class without a block; a model that is sharded already; a
        parameter shared by two units.

    Details:
        1. A forward under no_grad leaves nothing gathered.
        2. `wrap` leaves values, buffers, state dict names, requires_grad and train mode alone.
        3. Checkpointed blocks may have dropout, take keywords, and get inputs without gradients.
    """
    raise NotImplementedError


# Part 3; sync="last" is part 4, the stretch


class StepResult(NamedTuple):
    """The same on every rank: float32 scalars, no DTensors, no graph."""

    loss: Tensor
    grad_norm: Tensor


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    sync: Literal["each", "last"] = "each",
    max_norm: float | None = None,
) -> StepResult:
    """One optimizer step on the mean loss over the samples of all ranks' micro-batches.

        loss       every sample counts once; ranks and micro-batches may have different numbers
        gradients  of this step alone, clipped; they stay after the step
        grad_norm  2-norm over all shards of all ranks, before clipping
        max_norm   gradients with a larger norm are clipped to it, as clip_grad_norm_ does
        memory     a rank holds shards of gradients, and activations of one micro-batch at a time

        >>> result = train_step(model, [(x, y), (u, v)], mse, optimizer, max_norm=1.0)

    Args:
        model: wrapped by `wrap`; it returns one tensor.
        micro_batches: this rank's.
        optimizer: what `wrap` returned.

    Raises:
        any other sync; a max_norm that is not positive.

    Details:
        1. With sync="last" only the last micro-batch reduces; until then a rank holds one set of
           whole gradients.
        2. With bfloat16, too, micro-batches accumulate in float32.
        3. Each micro-batch gathers and reduces as a step of `wrap` does. Any other call sends at
           most 64 bytes plus 4 for each parameter tensor.
        4. If a rank has no micro-batch, or ranks have different numbers of them, every rank raises.
    """
    raise NotImplementedError


# untouched stub 5dd996d1f566
