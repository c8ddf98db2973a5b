"""Fully sharded data parallel: a rank holds a part of the model, and gathers a block to use it.

A *unit* is gathered and freed together: a block without the blocks inside it, or the root, the
model, for what is in no block. A rank keeps a *shard* of each parameter: on N ranks 1/N of its
rows, rounded up.

All ranks of the mesh call together, with the same arguments except for the data.

    errors  ValueError before any change; what is under Raises names the offending value

Source: Zhao et al., PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

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
    _check_wrap(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
    # Only now: the parameters of before are not the ones that train.
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
        # Between blocks activations stay in 16 bits; only what the model returns is float32.
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        root_policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    blocks = _blocks(model, block_types)
    inner = {module for block in blocks for module in _blocks(block, block_types)}
    for block in blocks:
        # What is inside another runs again with it, once.
        if checkpoint and block not in inner:
            block.forward = _checkpointed(block.forward)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    # Last: it takes what no block has taken. Backward begins with it, so it is not given back.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    model.register_forward_hook(_give_back)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # As a dict: checkpoint would take some keywords for its own. Not in a closure: checkpoint
        # keeps the random streams of those GPUs on which it sees a tensor.
        return recompute(lambda a, k: forward(*a, **k), args, kwargs, use_reentrant=False)

    return run


def _give_back(model: nn.Module, args: object, output: object) -> None:
    """No backward will do it, and the next forward would see the weights of before a step."""
    if not torch.is_grad_enabled():
        _reshard(model)


def _reshard(model: nn.Module) -> None:
    """Give back every unit: reshard() of the model is that of the root's unit alone."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _blocks(model: nn.Module, block_types: BlockTypes) -> list[nn.Module]:
    """The blocks below the root, from behind: one inside another comes before it."""
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
    # What is gathered is no DTensor, and a module may have been sharded in another way.
    if any(isinstance(x, (FSDPModule, DTensor)) for x in [*model.modules(), *model.parameters()]):
        raise ValueError(f"{type(model).__name__} is sharded already")
    owner: dict[nn.Parameter, nn.Module] = {}
    for unit in [*_blocks(model, block_types), model]:
        for p in _own_parameters(unit, block_types):
            if owner.setdefault(p, unit) is not unit:
                name = next(n for n, each in model.named_parameters() if each is p)
                raise ValueError(f"a parameter belongs to one unit, and two share {name}")


def _own_parameters(module: nn.Module, block_types: BlockTypes) -> Iterator[nn.Parameter]:
    """Those that are in no block inside, by every path: a module may stand at two places."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, block_types):
            yield from _own_parameters(child, block_types)


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
    if sync not in ("each", "last"):
        raise ValueError(f"sync must be 'each' or 'last', not {sync!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not sharded")
    # The ranks that share the model, which need not be all. The optimizer always has DTensors;
    # what the model has may be gathered.
    mesh = next(p.device_mesh for group in optimizer.param_groups for p in group["params"])
    samples = _samples_of_all(mesh, micro_batches)

    optimizer.zero_grad()
    shares = []
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(sync == "each" or number == len(micro_batches))
        share = loss_fn(model(inputs), targets).float() * (len(inputs) / samples)
        # Reductions divide by the ranks, but what counts is the mean over samples.
        (share * mesh.size()).backward()
        shares.append(share.detach())

    grad_norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if max_norm is not None:
        clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
    optimizer.step()
    loss = torch.stack(shares).sum()
    dist.all_reduce(loss, group=mesh.get_group())
    if isinstance(grad_norm, DTensor):
        # Plain, because a DTensor may be a collective to look at, on every rank or on none.
        grad_norm = grad_norm.full_tensor()
    return StepResult(loss, grad_norm)


def _samples_of_all(mesh: DeviceMesh, micro_batches: Sequence[Batch]) -> int:
    """The samples of all ranks; where they have not equally many micro-batches, all raise."""
    samples = sum(len(inputs) for inputs, _ in micro_batches)
    mine = torch.tensor([len(micro_batches), samples], device=mesh.device_type)
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine, group=mesh.get_group())
    counts, samples_of_each = torch.stack(every).T
    if (counts != counts[0]).any() or counts[0] == 0:
        raise ValueError(
            f"ranks need equally many micro-batches, one at least, not {counts.tolist()}"
        )
    return int(samples_of_each.sum())
