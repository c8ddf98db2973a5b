"""Fully sharded data parallel: a rank holds a part of the model, and gathers a block to use it.

Four parts: sharding block by block, mixed precision, the composition (activation checkpointing,
the true norm, accumulation), and a model that is too large for any one rank, with its checkpoints.

A *unit* is what is gathered and freed together. Every block is a unit: its parameters without those
of a block inside it. What is in no block (embedding, head) is the root's unit; the model itself is
the root and no block, whatever its class. A rank keeps a
*shard* of every parameter, about 1/N of its rows on N ranks, and gathers a unit's whole parameters
only while the unit runs.

All ranks of the mesh call these functions together, with the same arguments except for the data.

Sources: Rajbhandari et al., ZeRO (arXiv 1910.02054); Zhao et al., PyTorch FSDP (arXiv 2304.11277);
torch.distributed.fsdp.fully_shard; torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
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


# Part 1; `dtype` is part 2, `checkpoint` is part 3


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

    Training computes what one process computes on the data of all ranks (each rank's loss being the
    mean over as many samples). The names in the state dict stay as they are. On N ranks a rank
    holds 1/N of the parameters, of their gradients and of the optimizer's state, but for padding:
    the rows of each parameter (its first dimension) are dealt out in equal runs, rounded up.

    A step (one forward, in which every block runs once, and one backward) gathers every block
    twice, once for each, and gives it back after each; at any moment no more than two blocks are
    whole or on their way (and those that they are inside of), and the root's unit. The root's unit
    is gathered once, and stays until its backward is done. The gradients of each unit are reduced
    once. With `reshard_after_forward=False` every unit is gathered once, and the whole model stays
    gathered from forward to backward. A forward under no_grad gathers every unit once, and leaves
    none gathered, with either.

    With `dtype=torch.bfloat16` (part 2) parameters are gathered, and all units compute, in
    bfloat16, which is also what they pass on to each other; gradients are reduced in float32;
    shards, their gradients and the optimizer's state are float32. Every unit casts the floating
    tensors among its inputs itself, and those that the model returns are float32. Buffers stay as
    they are.

    With `checkpoint=True` (part 3) each block keeps only its inputs for backward and runs its
    forward once more there. Gathers and reductions are no more than without. (For a model in which
    no block is inside another.)

    Args:
        model: whole and float32, on the mesh's device, the same values on every rank.
        mesh: one-dimensional, over the ranks that share the model.
        block_types: the classes of the blocks, a subclass being one too; inside the model there is
            at least one of each.
        make_optimizer: from parameters to an optimizer that holds them.
        reshard_after_forward: whether a block is given back between forward and backward.
        dtype: torch.float32 or torch.bfloat16.
        checkpoint: whether blocks recompute what is inside them.

    Raises:
        ValueError: a mesh of another dimension, a class of which there is no block inside the
            model, another dtype, a model that is sharded already or in part, a parameter that two
            units share; names the value (of a parameter one of its names), and nothing has been
            changed.
    """
    raise NotImplementedError


# Part 3


class StepResult(NamedTuple):
    """What one step did; the same on every rank."""

    loss: Tensor  # the mean over the samples of all ranks: float32 scalar, without a graph
    grad_norm: Tensor  # 2-norm of the whole model's gradients before clipping: float32 scalar


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    sync: Literal["each", "last"] = "each",
    max_norm: float | None = None,
) -> StepResult:
    """One optimizer step on the mean loss over all samples of all ranks' micro-batches.

    Ranks, and micro-batches, may have different numbers of samples; a sample counts once, wherever
    it is and however large. Gradients from before do not count, and the step's (clipped) gradients
    are still in place afterwards. After it the model can be trained in any other way, every
    backward synchronised, also where `loss_fn` has raised on every rank. (With sync="last" FSDP may
    then still hold what earlier micro-batches have summed up, and nothing public can drop that.)

    Gradients are summed over micro-batches, and at any moment there are the activations of one.
    With sync="each" every backward reduces them, and a rank holds its shards of them only. With
    sync="last" only the last one does: a rank holds the whole gradients until then, and the number
    of reductions does not grow with the number of micro-batches.

    Both results are plain tensors (no DTensor). Apart from gathers and reductions of units, a rank
    puts at most 64 bytes into a collective, and 4 more for each parameter of the model.

    Args:
        model: wrapped by `wrap`; from inputs to one output tensor (samples, ...).
        micro_batches: this rank's pairs; every rank has the same number of them.
        loss_fn: from an output and its targets to the mean over their samples, a scalar.
        optimizer: what `wrap` has returned.
        sync: when gradients are reduced.
        max_norm: clip the gradients to this norm, of the whole model; None leaves them.

    Raises:
        ValueError: another sync, a max_norm that is not positive (names it), a model that is not
            wrapped. On every rank, if any rank has no micro-batch, another number of them than the
            others, or one whose parts differ in length or are empty: no rank waits for one that has
            raised. Names this rank's number of micro-batches. Nothing has been changed.
    """
    raise NotImplementedError


# Part 4


def build(
    make_model: Callable[[], nn.Module],
    mesh: DeviceMesh,
    block_types: BlockTypes,
    init: Callable[[nn.Module], None],
    make_optimizer: MakeOptimizer,
    *,
    reshard_after_forward: bool = True,
    dtype: torch.dtype = torch.float32,
    checkpoint: bool = False,
) -> tuple[nn.Module, Optimizer]:
    """A model that no rank could hold: made without memory, sharded, and given its first values.

    The values are those of one process that calls `init` on every module of the model, in the order
    of `model.modules()`, on any number of ranks. Random numbers are drawn from the default
    generator as it stands, which is the same on every rank.

    At no moment does a rank hold more than its shards, the buffers, and what two units have.

    Args:
        make_model: builds the model; called once, under the meta device.
        init: sets every parameter and buffer of a module itself, in place, not those of its
            children; what it leaves unset is undefined. A parameter that is tied is set by each of
            its modules, and the last one counts.
        mesh, block_types, make_optimizer, reshard_after_forward, dtype, checkpoint: as in `wrap`.

    Returns:
        The model on the mesh's device, as `wrap` leaves it, and its optimizer.

    Raises:
        ValueError: as `wrap`.
    """
    raise NotImplementedError


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save weights and optimizer state sharded: every rank writes its own part.

    All ranks of the job call it, and return when all parts are written. A save that is interrupted,
    or that fails on any rank, leaves every checkpoint from before as it was; a later one may be
    given the same step. If a rank cannot write, every rank raises.

    Args:
        folder: of all checkpoints of a run; it is made where it is not there. Older ones stay.
        model, optimizer: of `wrap` or `build`, on a mesh over all ranks.
        step: how many steps the training has made; in these, every parameter that requires a
            gradient has had one.

    Raises:
        ValueError: a step below 1, or not above that of the newest checkpoint in `folder`; names
            it, and nothing has been changed.
    """
    raise NotImplementedError


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> int:
    """Load the newest checkpoint that was saved to its end, on any number of ranks.

    Training goes on as if it had not been interrupted, whatever number of ranks has saved; each
    rank reads its own part only. Gradients are dropped.

    Args:
        folder: as in `save`.
        model, optimizer: of `wrap` or `build`, with the same classes as when they were saved; the
            values that they have do not matter.

    Returns:
        The step that was given to `save`.

    Raises:
        ValueError: no checkpoint in `folder`; one of a model with other names or other shapes;
            names the folder. The weights have not been changed.
    """
    raise NotImplementedError


def save_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Save the weights as one file, for `torch.load` and the model as it is without `wrap`.

    All ranks of the job call it, and return when the file is there; rank 0 writes it. Another rank
    never holds more than its shards, one whole parameter, and what it is gathered in. The file is
    complete or is not there: one from before is replaced at the end.
    """
    raise NotImplementedError


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Load weights from the file of `save_whole`, or of one process, into a model that is sharded.

    Raises:
        ValueError: names or shapes in the file that are not those of the model, or the other way
            round; names one of them and the path. Nothing has been changed.
    """
    raise NotImplementedError


# untouched stub a1308ad0401b
