"""A right answer from the stub alone, in torch's own idioms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
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
    _check(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
    return make_optimizer(model.parameters())


def _check(model: nn.Module, mesh: DeviceMesh, block_types: BlockTypes, dtype: torch.dtype) -> None:
    """Raise the errors of `wrap`."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh must have one dimension, not {mesh.ndim}: {mesh}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, not {dtype}")
    if isinstance(model, FSDPModule):
        raise ValueError(f"the model is sharded already: {type(model).__name__}")
    blocks = [module for module in model.modules() if module is not model]
    for cls in block_types if isinstance(block_types, tuple) else (block_types,):
        if not any(isinstance(module, cls) for module in blocks):
            raise ValueError(f"the model has no block of class {cls.__name__}")
    # All paths, for a module may be at several. A parent comes before its children.
    units: dict[str, nn.Module] = {}
    unit_of: dict[nn.Parameter, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own_unit = not path or isinstance(module, block_types)
        units[path] = module if own_unit else units[path.rpartition(".")[0]]
        for name, param in module.named_parameters(path, recurse=False, remove_duplicate=False):
            if unit_of.setdefault(param, units[path]) is not units[path]:
                raise ValueError(f"two units share the parameter {name}")


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    block_types: BlockTypes,
    reshard_after_forward: bool,
    dtype: torch.dtype,
    checkpoint: bool,
) -> None:
    """Shard the model, which has passed `_check`, block by block."""
    policy = root_policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        root_policy = replace(policy, output_dtype=torch.float32)
    blocks = {p: m for p, m in model.named_modules() if p and isinstance(m, block_types)}
    nested = {m for p, m in blocks.items() if any(p.startswith(outer + ".") for outer in blocks)}
    for path, block in reversed(blocks.items()):  # inner ones first
        unit = block
        if checkpoint and block not in nested:
            # Inside of FSDP's hooks: the block runs again on what backward has gathered.
            unit = checkpoint_wrapper(block)  # passes keywords on
            unit.training = block.training
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, unit)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    model.register_forward_hook(_after_forward)


def _after_forward(model: nn.Module, *_: object) -> None:
    """Free what a forward without a backward has gathered."""
    if not torch.is_grad_enabled():
        _shards(model)


def _shards(model: nn.Module) -> dict[str, DTensor]:
    """The sharded parameters by name. Frees what a forward without backward has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


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
        raise ValueError(f'sync must be "each" or "last", not {sync!r}')
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    shards = _shards(model).values()
    mesh = next(iter(shards)).device_mesh
    group, ranks, device = mesh.get_group(), mesh.size(), mesh.device_type

    sizes = [len(inputs) for inputs, _ in micro_batches]
    mine = torch.tensor([len(sizes), sum(sizes)], device=device)
    everyone = mine.new_empty(ranks * 2)
    dist.all_gather_into_tensor(everyone, mine, group)
    counts, samples = everyone.view(ranks, 2).unbind(1)
    if counts.min() < 1 or counts.min() != counts.max():
        raise ValueError(f"every rank needs as many micro-batches, and not none: {counts.tolist()}")
    total_samples = samples.sum().item()

    for param in shards:
        param.grad = None
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for i, (inputs, targets) in enumerate(micro_batches):
        model.set_requires_gradient_sync(sync == "each" or i == len(sizes) - 1)
        loss = loss_fn(model(inputs), targets)
        # FSDP takes the mean over the ranks.
        (loss * (sizes[i] * ranks / total_samples)).backward()
        loss_sum += loss.detach() * sizes[i]
        del loss  # and its graph

    grads = [param.grad.to_local() for param in shards if param.grad is not None]
    square = nn.utils.get_total_norm(grads).to(loss_sum).square()
    sums = torch.stack([loss_sum, square])
    dist.all_reduce(sums, group=group)
    grad_norm = sums[1].sqrt()
    if max_norm is not None:
        scale = (max_norm / grad_norm).clamp(max=1).float()
        for grad in grads:
            grad.mul_(scale)
    optimizer.step()
    return StepResult((sums[0] / total_samples).float(), grad_norm.float())
