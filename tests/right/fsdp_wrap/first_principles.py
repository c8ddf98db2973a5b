"""A right answer of another shape: units by path, the norm by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (samples, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to the mean over their samples
BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

# The mesh of every model that `wrap` has sharded.
_MESHES: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()


def _device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _reduced(values: Sequence[int], op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> list[int]:
    """A few whole numbers, each reduced over the ranks."""
    numbers = torch.tensor(values, dtype=torch.int64, device=_device(mesh))
    dist.all_reduce(numbers, op, group=mesh.get_group())
    return numbers.tolist()


def _free(model: nn.Module) -> None:
    """Free every unit: the model's parameters are its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Part 1; `dtype` is part 2, `checkpoint` is part 3


class _Plan(NamedTuple):
    """What `_shard` needs to know of a model."""

    blocks: list[nn.Module]  # inner ones come before outer ones
    inner: set[nn.Module]  # those that are inside another block


def _plan(model: nn.Module, mesh: DeviceMesh, block_types: BlockTypes, dtype: torch.dtype) -> _Plan:
    """Find the blocks, and raise a ValueError for all that `wrap` refuses; change nothing."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions, not one")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}, neither torch.float32 nor torch.bfloat16")
    if isinstance(model, FSDPModule):
        raise ValueError(f"the {type(model).__name__} is sharded already")
    classes = block_types if isinstance(block_types, tuple) else (block_types,)
    for cls in classes:
        if not any(isinstance(module, cls) for module in [*model.modules()][1:]):
            raise ValueError(f"the {type(model).__name__} has no block of class {cls.__name__}")

    # Every path to a module counts here: one that is reached from two units belongs to both.
    unit: dict[str, nn.Module] = {}  # for each path, the block that its module is in, or the model
    owner: dict[nn.Parameter, nn.Module] = {}
    blocks: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        above = unit[path.rpartition(".")[0]] if path else model
        unit[path] = above
        if isinstance(module, classes) and path:
            unit[path] = module
            blocks.append(module)
            if above is not model:
                inner.add(module)
        for name, parameter in module.named_parameters(path, False, False):
            if owner.setdefault(parameter, unit[path]) is not unit[path]:
                raise ValueError(f"two units share the parameter {name}")
    return _Plan(blocks[::-1], inner)  # a block's path comes before those in it


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: _Plan,
    *,
    reshard_after_forward: bool,
    dtype: torch.dtype,
    checkpoint: bool,
) -> None:
    """Shard the model; the optimizer comes later."""
    policy = outermost = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        outermost = dataclasses.replace(policy, output_dtype=torch.float32)

    for block in [*plan.blocks, model]:
        is_block = block is not model
        # A block inside another runs again with the other, once.
        if checkpoint and is_block and block not in plan.inner:
            _recompute_in_backward(block)
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward and is_block,
            mp_policy=outermost if block is model else policy,
        )
    model.register_forward_hook(_after_forward)
    _MESHES[model] = mesh


def _after_forward(model: nn.Module, args: Any, output: Any) -> None:
    """A forward without backward leaves nothing gathered, not even the root."""
    if not torch.is_grad_enabled():
        _free(model)


def _recompute_in_backward(block: nn.Module) -> None:
    """Let the block keep its inputs only. Its hooks (gathering) are outside, and do not run again.

    The method is replaced, not the module, so that all names stay.
    """
    forward = block.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = run


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
    plan = _plan(model, mesh, block_types, dtype)
    _shard(
        model,
        mesh,
        plan,
        reshard_after_forward=reshard_after_forward,
        dtype=dtype,
        checkpoint=checkpoint,
    )
    return make_optimizer(model.parameters())


# Part 3


class StepResult(NamedTuple):
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
    if sync not in ("each", "last"):
        raise ValueError(f"sync is {sync!r}, neither 'each' nor 'last'")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, not positive")
    mesh = _MESHES[model]
    samples = [len(inputs) for inputs, _ in micro_batches]
    count = len(samples)
    most, minus_least = _reduced([count, -count], dist.ReduceOp.MAX, mesh)
    if count == 0 or most != -minus_least:
        raise ValueError(f"this rank has {count} micro-batches, another more or fewer, or none")
    (total,) = _reduced([sum(samples)], dist.ReduceOp.SUM, mesh)

    _free(model)
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64, device=_device(mesh))
    for index, batch in enumerate(micro_batches):
        model.set_requires_gradient_sync(sync == "each" or index == count - 1)
        share = samples[index] / total
        # The reduction takes the mean over the ranks, hence the factor.
        loss += share * _forward_backward(model, batch, loss_fn, share * mesh.size())

    with torch.no_grad():
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        squares = torch.zeros_like(loss)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        sums = torch.stack([loss, squares])
        dist.all_reduce(sums, group=mesh.get_group())
        mean_loss, norm = sums[0].float(), sums[1].sqrt().float()
        if max_norm is not None:
            factor = (max_norm / norm).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
    optimizer.step()
    return StepResult(mean_loss, norm)


def _forward_backward(model: nn.Module, batch: Batch, loss_fn: LossFn, factor: float) -> Tensor:
    """Add the gradients of `factor` times the loss; the loss, and nothing of its graph, is left."""
    inputs, targets = batch
    loss = loss_fn(model(inputs), targets)
    (loss * factor).backward()
    return loss.detach()
