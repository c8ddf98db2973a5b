"""A right answer of another shape: rows kept by hand, own files for every rank, one small sum."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (samples, ...)
LossFn = Callable[[Tensor, Tensor], Tensor]  # (output, targets) to the mean over their samples
BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_T = TypeVar("_T")

# The mesh of every model that `wrap` or `build` has sharded.
_MESHES: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()


def _mesh(model: nn.Module) -> DeviceMesh:
    """The mesh that `model` is sharded over."""
    if model not in _MESHES:
        raise ValueError(f"the model, a {type(model).__name__}, is not wrapped")
    return _MESHES[model]


def _device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _rows(total: int, parts: int, part: int) -> tuple[int, int]:
    """The run of rows, from start to stop, that the part gets: equal runs, rounded up."""
    run = -(-total // parts)
    return min(part * run, total), min((part + 1) * run, total)


def _own_rows(total: int, mesh: DeviceMesh) -> tuple[int, int]:
    """The run of rows that this rank holds."""
    group = mesh.get_group()
    return _rows(total, group.size(), group.rank())


def _reduced(values: Sequence[int], op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> list[int]:
    """A few whole numbers, each reduced over the ranks."""
    numbers = torch.tensor(values, dtype=torch.int64, device=_device(mesh))
    dist.all_reduce(numbers, op, group=mesh.get_group())
    return numbers.tolist()


def _together(mesh: DeviceMesh, what: str, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank; where it fails on any rank, every rank raises."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    (failed,) = _reduced([error is not None], dist.ReduceOp.MAX, mesh)
    if error is not None:
        raise error
    if failed:
        raise OSError(f"{what}: another rank has failed")
    return result


def _sharded(tensor: Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """The tensor of `shape` of which this rank holds the rows `tensor`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, mesh, (Shard(0),), run_check=False, shape=torch.Size(shape), stride=stride
    )


def _give_back(model: nn.Module) -> None:
    """Every unit gives back what it has gathered: the model's parameters are its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _drop_gradients(model: nn.Module) -> None:
    """No unit is gathered, and no shard has a gradient."""
    _give_back(model)
    for parameter in model.parameters():
        parameter.grad = None


# Part 1; `dtype` is part 2, `checkpoint` is part 3


class _Plan(NamedTuple):
    """What `_shard` needs to know of a model."""

    blocks: list[nn.Module]  # but for the model itself, inner ones before those they are in
    inner: set[nn.Module]  # those that are inside another block


def _plan(model: nn.Module, mesh: DeviceMesh, block_types: BlockTypes, dtype: torch.dtype) -> _Plan:
    """Find the blocks, and raise a ValueError for all that `wrap` refuses; change nothing."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions, not one")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}, neither torch.float32 nor torch.bfloat16")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"the {type(model).__name__} is sharded already: its {name} is")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"the {type(model).__name__} is sharded already: its {name!r} is")
    classes = block_types if isinstance(block_types, tuple) else (block_types,)
    for cls in classes:
        if not any(isinstance(module, cls) for module in [*model.modules()][1:]):
            raise ValueError(f"the {type(model).__name__} has no block of class {cls.__name__}")

    # Every path to a module counts here: one that is reached from two units belongs to both.
    unit: dict[str, nn.Module] = {}  # of a path, the block that its module is in, or the model
    owner: dict[nn.Parameter, nn.Module] = {}
    depth: dict[nn.Module, int] = {}
    inner: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        above = unit[path.rpartition(".")[0]] if path else model
        unit[path] = above
        if isinstance(module, classes) and path:
            unit[path] = module
            # The longest path to an inner block is longer than that to any block it is in.
            depth[module] = max(depth.get(module, 0), path.count("."))
            if above is not model:
                inner.add(module)
        for name, parameter in module.named_parameters(path, False, False):
            if parameter.ndim == 0:
                raise ValueError(f"the parameter {name} has no rows to deal out")
            if owner.setdefault(parameter, unit[path]) is not unit[path]:
                raise ValueError(f"two units share the parameter {name}")
    blocks = sorted(depth, key=lambda block: depth[block], reverse=True)
    return _Plan(blocks, inner)


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: _Plan,
    *,
    reshard_after_forward: bool,
    dtype: torch.dtype,
    checkpoint: bool,
) -> None:
    """Shard the model as `wrap` says, but for the optimizer."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # fully_shard wants rows that lie one after another
            parameter.data = parameter.data.contiguous()
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
    if plan.inner:
        # Where a block is whole around another, a third one must not be gathered ahead: to
        # prefetch what is there already takes the place of fully_shard's own prefetching.
        for block in plan.blocks:
            block.set_modules_to_backward_prefetch([block])
    model.register_forward_hook(_after_forward)
    _MESHES[model] = mesh


def _after_forward(model: nn.Module, args: Any, output: Any) -> None:
    """A forward without backward leaves nothing gathered, the root's unit neither."""
    if not torch.is_grad_enabled():
        _give_back(model)


def _recompute_in_backward(block: nn.Module) -> None:
    """Let the block keep its inputs only. Its hooks (gathering) are outside, and do not run again.

    The method is replaced, not the module, so that all names stay.
    """
    forward = block.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(
            lambda positional, named: forward(*positional, **named),
            args,
            kwargs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), _spare_buffers(block)),
        )

    block.forward = run


@contextlib.contextmanager
def _spare_buffers(block: nn.Module) -> Iterator[None]:
    """The block works on copies of its buffers: what it counts in them, it has counted before."""
    buffers = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in buffers}
    for module, name, buffer in buffers:
        module._buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


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
    mesh = _mesh(model)
    samples = [_samples(batch) for batch in micro_batches]
    count = len(samples)
    flawed = count == 0 or 0 in samples
    any_flawed, most, minus_least = _reduced([flawed, count, -count], dist.ReduceOp.MAX, mesh)
    if any_flawed or most != -minus_least:
        raise ValueError(
            f"this rank has {count} micro-batches: every rank must have the same number of them, "
            "one at least, each with as many targets as inputs, and some"
        )
    (total,) = _reduced([sum(samples)], dist.ReduceOp.SUM, mesh)

    _drop_gradients(model)
    loss = torch.zeros((), dtype=torch.float64, device=_device(mesh))
    try:
        for index, batch in enumerate(micro_batches):
            model.set_requires_gradient_sync(sync == "each" or index == count - 1)
            share = samples[index] / total
            # The reduction takes the mean over the ranks, hence the factor.
            loss += share * _forward_backward(model, batch, loss_fn, share * mesh.size())
    except BaseException:
        _drop_gradients(model)
        raise
    finally:
        model.set_requires_gradient_sync(True)

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


def _samples(batch: Batch) -> int:
    """How many samples the micro-batch has; 0 if it is flawed."""
    inputs, targets = batch
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        return 0
    return len(inputs)


def _forward_backward(model: nn.Module, batch: Batch, loss_fn: LossFn, factor: float) -> Tensor:
    """Add the gradients of `factor` times the loss; the loss, and nothing of its graph, is left."""
    inputs, targets = batch
    loss = loss_fn(model(inputs), targets)
    (loss * factor).backward()
    return loss.detach()
