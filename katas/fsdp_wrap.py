"""Fully sharded data parallel: a rank holds a part of the model, and gathers a block to use it.

A *unit* is gathered and freed together: a block without the blocks inside it, or the root, the
model, for what is in no block. A rank keeps a *shard* of each parameter: on N ranks 1/N of its
rows, rounded up.

All ranks of the mesh call together, with the same arguments except for the data.

    errors  ValueError before any change; what is under Raises names the offending value

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

        values      training computes what one process does with all ranks' data
        units       each block is a unit, blocks inside blocks too, then the root
        state       a rank holds its shards, their gradients and optimizer state, nothing whole
        calls       a step gathers each block for forward and again for backward, the root once,
                    and reduces each unit's gradients once
        gathered    in a chain at most the block that runs, those around, one ahead, the root's
        kept        reshard_after_forward=False gathers each unit once, until after backward
        bfloat16    is what units gather and compute in, and what a block returns; gradients are
                    reduced in float32, shards and the model's output are float32
        checkpoint  an outermost block keeps its inputs only; backward runs it again, as far as
                    needed; gathers and reductions stay

        >>> optimizer = wrap(model, mesh, Block, torch.optim.AdamW, dtype=torch.bfloat16)

    Args:
        model: whole, contiguous float32 without scalars, on the mesh's device, the same everywhere.
        mesh: one-dimensional.
        block_types: one class or more; subclasses count, the model itself does not. A block is at
            one place in the model, and runs once.
        make_optimizer: from all parameters, frozen too, to their optimizer.
        dtype: torch.float32 or torch.bfloat16.

    Raises:
        another mesh or dtype; a class without a block inside the model; a model that is sharded,
        even in part; a parameter of two units, not one with two names in a unit.

    Details:
        1. A forward under no_grad gathers each unit once and leaves none gathered, with any option.
           The next step gathers as before if the root has parameters. After a forward with
           gradients comes its backward, before the next step.
        2. `wrap` leaves values, buffers, state dict names, requires_grad and train mode alone.
        3. Frozen parameters are sharded too; a unit without gradients is not reduced.
        4. Only the ranks of the mesh take part.
        5. In bfloat16 each unit casts the floating inputs it gets, in keywords and dicts too.
        6. Checkpointed blocks may have dropout, take keywords of any name, return tuples, and get
           inputs without gradients. While one runs again, all blocks inside it may be gathered.
    """
    raise NotImplementedError


# Part 3; sync="last" is part 4, the stretch


class StepResult(NamedTuple):
    """The same on every rank: plain float32 scalars, no DTensors, without a graph."""

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

        loss       every sample counts once: ranks and micro-batches may have different numbers
        gradients  of this step alone, clipped; they stay afterwards
        grad_norm  2-norm over all shards of all ranks, before clipping
        max_norm   above it, scales gradients by max_norm / grad_norm, or torch's factor
        memory     a rank holds shards of gradients, and activations of one micro-batch at a time

        >>> result = train_step(model, [(x, y), (u, v)], mse, optimizer, max_norm=1.0)

    Args:
        model: wrapped by `wrap`; from inputs to one output tensor.
        micro_batches: this rank's pairs, as many as others have.
        optimizer: what `wrap` has returned.

    Raises:
        another sync; a max_norm that is not positive; a model whose root is not sharded.

    Details:
        1. With sync="last" only the last micro-batch reduces: a rank holds one set of whole
           gradients until then. Every unit runs in each micro-batch.
        2. A sample counts once, however many tokens it has. No micro-batch is empty.
        3. Micro-batches are accumulated in float32 in bfloat16 training too.
        4. Only the ranks of the model's mesh count.
        5. Each micro-batch gathers and reduces as a step of `wrap` does. With P parameter tensors
           a rank sends at most 64 + 4 P bytes in any other call.
        6. If a rank has no micro-batch, or ranks have different numbers of them, every rank raises.
    """
    raise NotImplementedError


# untouched stub 5b555392f881
