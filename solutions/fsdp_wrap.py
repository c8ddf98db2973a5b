"""Fully sharded data parallel: a rank holds a part of the model, and gathers a block to use it.

A *unit* is gathered and freed together: a block without the blocks inside it, or the root, which is
the rest of the model. A rank keeps a *shard* of each parameter: on N ranks 1/N of its rows,
rounded up.

    ranks   all ranks of the mesh call together, alike except for data; a job may have more ranks
    errors  ValueError, before any change; for what is under Raises it names the offending value

Source: Zhao et al., PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as recompute

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
    _check_wrap(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
    # Only now: sharding has replaced the parameters.
    return make_optimizer(model.parameters())


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    block_types: BlockTypes,
    reshard_after_forward: bool,
    dtype: torch.dtype,
    checkpoint: bool,
) -> None:
    policy, root_policy = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Between blocks activations stay in 16 bits; only the model's output is float32.
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        root_policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    blocks = _blocks(model, block_types)
    inner = {module for block in blocks for module in _blocks(block, block_types)}
    for block in blocks:
        # An inner block runs again with the outer one. No closure: checkpoint saves the random
        # state of those GPUs on which it sees a tensor.
        if checkpoint and block not in inner:
            block.forward = partial(recompute, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    # Last: it takes what no block has taken. Backward starts with it, so it stays gathered.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    model.register_forward_hook(_free)


def _free(model: nn.Module, args: object, output: object) -> None:
    """No backward will, and the next forward would use old weights."""
    if not torch.is_grad_enabled():
        for unit in model.modules():  # model.reshard() frees the root alone
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _blocks(model: nn.Module, block_types: BlockTypes) -> list[nn.Module]:
    """The blocks below the root in reverse: inner ones come before outer ones."""
    _, *below = model.modules()
    blocks = [module for module in below if isinstance(module, block_types)]
    return blocks[::-1]


def _check_wrap(
    model: nn.Module, mesh: DeviceMesh, block_types: BlockTypes, dtype: torch.dtype
) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have 1 dimension, not {mesh.ndim}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype}")
    for kind in block_types if isinstance(block_types, tuple) else (block_types,):
        if not _blocks(model, kind):
            raise ValueError(f"{type(model).__name__} has no block of class {kind.__name__}")
    if isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is sharded already")
    owner: dict[nn.Parameter, nn.Module] = {}
    for unit in [*_blocks(model, block_types), model]:
        for p in _own_parameters(unit, block_types):
            if owner.setdefault(p, unit) is not unit:
                name = next(n for n, each in model.named_parameters() if each is p)
                raise ValueError(f"a parameter belongs to one unit, and two share {name}")


def _own_parameters(module: nn.Module, block_types: BlockTypes) -> Iterator[nn.Parameter]:
    """The parameters that are in no block inside this module."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, block_types):
            yield from _own_parameters(child, block_types)


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
    if sync not in ("each", "last"):
        raise ValueError(f"sync must be 'each' or 'last', not {sync!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    assert isinstance(model, FSDPModule)
    # The ranks that share the model may be fewer than all. The optimizer always has DTensors;
    # what the model has may be gathered.
    mesh = next(p.device_mesh for group in optimizer.param_groups for p in group["params"])
    samples = _samples_of_all(mesh, micro_batches)

    optimizer.zero_grad()
    shares = []
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(sync == "each" or number == len(micro_batches))
        share = loss_fn(model(inputs), targets).float() * (len(inputs) / samples)
        # Reductions divide by the number of ranks; undo that.
        (share * mesh.size()).backward()
        shares.append(share.detach())

    grad_norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if max_norm is not None:
        clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
    optimizer.step()
    loss = torch.stack(shares).sum()
    dist.all_reduce(loss, group=mesh.get_group())
    if isinstance(grad_norm, DTensor):
        # Reading a DTensor is a collective call, and the caller may read on one rank only.
        grad_norm = grad_norm.full_tensor()
    return StepResult(loss, grad_norm)


def _samples_of_all(mesh: DeviceMesh, micro_batches: Sequence[Batch]) -> int:
    """The samples of all ranks. If their numbers of micro-batches differ, all raise."""
    samples = sum(len(inputs) for inputs, _ in micro_batches)
    mine = torch.tensor([len(micro_batches), samples], device=mesh.device_type)
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine, group=mesh.get_group())
    counts, samples_of_each = torch.stack(every).T
    if (counts != counts[0]).any() or counts[0] == 0:
        raise ValueError(
            f"every rank needs the same number of micro-batches, not {counts.tolist()}"
        )
    return int(samples_of_each.sum())
