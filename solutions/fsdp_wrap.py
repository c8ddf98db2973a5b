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

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
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
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        root_policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    for block in _blocks(model, block_types):
        if checkpoint:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    # Last: it takes what no block has taken. Backward begins with it, so it is not given back.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    model.register_forward_hook(_give_back)


def _give_back(model: nn.Module, args: object, output: object) -> None:
    """No backward will do it, and the next forward would see the weights of before a step."""
    if not torch.is_grad_enabled():
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _blocks(model: nn.Module, block_types: BlockTypes) -> list[nn.Module]:
    """The blocks below the root, a block inside another before it."""
    return [
        module
        for module in reversed(list(model.modules()))
        if isinstance(module, block_types) and module is not model
    ]


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
    owned = set[nn.Parameter]()
    for unit in [*_blocks(model, block_types), model]:
        own = set(_own_parameters(unit, block_types))
        if shared := [name for name, p in model.named_parameters() if p in own & owned]:
            raise ValueError(f"a parameter belongs to one unit, and two share {shared[0]}")
        owned |= own


def _own_parameters(module: nn.Module, block_types: BlockTypes) -> Iterator[nn.Parameter]:
    """Those that are in no block inside, by every path: a module may stand at two places."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, block_types):
            yield from _own_parameters(child, block_types)


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
    if sync not in ("each", "last"):
        raise ValueError(f"sync must be 'each' or 'last', not {sync!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not wrapped")
    # The optimizer has the shards, also where an evaluation has left the model gathered.
    mesh = next(p.device_mesh for group in optimizer.param_groups for p in group["params"])
    samples = _samples_of_all(mesh, micro_batches)

    optimizer.zero_grad()
    shares = []
    try:
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            model.set_requires_gradient_sync(sync == "each" or number == len(micro_batches))
            share = loss_fn(model(inputs), targets) * (len(inputs) / samples)
            # Reductions divide by the ranks, but what counts is the mean over samples.
            (share * mesh.size()).backward()
            shares.append(share.detach())
    finally:
        model.set_requires_gradient_sync(True)

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
    """The samples of all ranks; where one of them has what is not right, every rank raises."""
    sizes = [len(inputs) for inputs, _ in micro_batches]
    good = bool(sizes) and all(len(inputs) == len(targets) > 0 for inputs, targets in micro_batches)
    mine = torch.tensor([len(sizes) if good else 0, sum(sizes)], device=mesh.device_type)
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine, group=mesh.get_group())
    counts = torch.stack(every)[:, 0]
    if (counts != counts[0]).any() or counts[0] == 0:
        raise ValueError(
            "every rank needs as many micro-batches as the others, and as many inputs as targets "
            f"in each; this one has {len(sizes)} with {sizes} samples"
        )
    return int(torch.stack(every)[:, 1].sum())


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
    with torch.device("meta"):
        model = make_model()
    _check_wrap(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
    model.to_empty(device=mesh.device_type)
    for module in model.modules():
        _initialise(module, init)
    # As in `wrap`: the parameters that make_model has made are not the ones that train.
    return model, make_optimizer(model.parameters())


def _initialise(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
    # Under every name: a module may have one parameter under two.
    shards = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    wholes = {}
    for name, shard in shards.items():
        # Whole for as long as `init` runs. Drawing straight into the shards would give every rank
        # the same numbers, and other ones than one process draws.
        if shard not in wholes:
            whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
            wholes[shard] = nn.Parameter(whole, shard.requires_grad)
        setattr(module, name, wholes[shard])
    init(module)
    for name, shard in shards.items():
        assert isinstance(shard, DTensor)
        mine, whole = shard.to_local(), wholes[shard]
        rows = -(-len(whole) // shard.device_mesh.size())  # rounded up: the last ranks have fewer
        first = rows * shard.device_mesh.get_local_rank()
        with torch.no_grad():
            mine.copy_(whole[first : first + len(mine)])
        setattr(module, name, shard)


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
    newest = _newest(folder)
    if step < 1 or (newest is not None and step <= int(newest.name)):
        raise ValueError(f"step {step} is below 1, or not above {newest}, the newest checkpoint")
    weights, state = get_state_dict(model, optimizer)
    # A folder of its own, in which .metadata is written last: without it, it does not count.
    dcp.save(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=Path(folder) / str(step)
    )


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
    newest = _newest(folder)
    if newest is None:
        raise ValueError(f"no checkpoint in {folder}")
    saved = FileSystemReader(newest).read_metadata().state_dict_metadata
    there = {
        n: getattr(entry, "size", None) for n, entry in saved.items() if n.startswith("model.")
    }
    _check_same_shapes(
        newest, there, {f"model.{n}": w.shape for n, w in model.state_dict().items()}
    )
    # With gradients around, the optimizer's state would not be made, and so not be loaded either.
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.load(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=newest
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(newest.name)


def _newest(folder: str | os.PathLike[str]) -> Path | None:
    """The last checkpoint that was saved to its end."""
    done = [path.parent for path in Path(folder).glob("*/.metadata")]
    return max(done, key=lambda path: int(path.name), default=None)


def _check_same_shapes(path: object, there: dict[str, Any], here: dict[str, Any]) -> None:
    if other := sorted(n for n in {*there, *here} if there.get(n) != here.get(n)):
        raise ValueError(f"{path} is of another model: {other[0]} and {len(other) - 1} more differ")


def save_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Save the weights as one file, for `torch.load` and the model as it is without `wrap`.

    All ranks of the job call it, and return when the file is there; rank 0 writes it. Another rank
    never holds more than its shards, one whole parameter, and what it is gathered in. The file is
    complete or is not there: one from before is replaced at the end.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # It gathers one parameter after another, so every rank takes part; only rank 0 gets the result.
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        partial = Path(f"{os.fspath(path)}.partial")
        torch.save(weights, partial)
        os.replace(partial, path)
    dist.barrier()


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Load weights from the file of `save_whole`, or of one process, into a model that is sharded.

    Raises:
        ValueError: names or shapes in the file that are not those of the model, or the other way
            round; names one of them and the path. Nothing has been changed.
    """
    weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    there = {name: weight.shape for name, weight in weights.items()}
    _check_same_shapes(path, there, {n: w.shape for n, w in model.state_dict().items()})
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
