"""Sharded checkpoints: build a model that no rank could hold, save it, and go on elsewhere.

A sharded model is one of fully_shard: on N ranks a rank holds 1/N of each parameter's rows,
rounded up. A rank's part is its rows of weights and optimizer state. All ranks call these functions
together, with the same arguments.

    evaluated  a model may just have been, its parameters still whole
    together   where one rank raises an Exception, every rank raises; none is left waiting
    untouched  gradients, modes and the random state, unless a line says otherwise
    errors     what Raises lists is a ValueError on every rank that names the offending value,
               before any change

Sources: Zhao et al., PyTorch FSDP (arXiv 2304.11277); torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
_T = TypeVar("_T")


# Part 1


def build(
    make_model: Callable[[], nn.Module],
    mesh: DeviceMesh,
    block_types: BlockTypes,
    init: Callable[[nn.Module], None],
    make_optimizer: MakeOptimizer,
) -> tuple[nn.Module, Optimizer]:
    """A model that no rank could hold: made without memory, sharded, and given its first values.

        values     those of one process that calls `init` on each module, in the order of
                   `model.modules()`: the same bits on any number of ranks
        units      fully_shard has each block, without the blocks inside it, and the model for
                   the rest
        optimizer  made of the shards
        memory     a rank holds at most its shards, the buffers, and two units whole

        >>> model, optimizer = build(GPT, mesh, Block, init, torch.optim.AdamW)

    Args:
        make_model: called once, under the meta device.
        mesh: one-dimensional, all ranks in order.
        block_types: classes of the blocks; subclasses count.
        init: sets all parameters and buffers of one module in place, not those of its children.
        make_optimizer: called once, with all parameters.

    Details:
        1. `init` draws from the default generator, which has the same state on every rank; what
           it draws in one process is all that moves the generator: make_model and make_optimizer
           draw nothing. `init` knows a module by isinstance(), for fully_shard changes its type().
        2. A parameter of two modules in one unit stays tied; each of them sets it anew, and the
           last one counts. No two modules share a buffer.
        3. Train mode, requires_grad and the keys of state_dict() stay as make_model has left them.
           A block stands in the model only once.
    """

    def make() -> nn.Module:
        with torch.device("meta"):
            return make_model()

    def initialise() -> None:
        for module in model.modules():
            _initialise(module, init)

    model = _together(make)
    # From the inside out, where modules are fewer: a call takes every parameter below it that no
    # call before has taken.
    for module in sorted(model.modules(), key=lambda module: len([*module.modules()])):
        if isinstance(module, block_types) or module is model:
            fully_shard(module, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    _together(initialise)
    # Last: the parameters that make_model has made are not the ones that train.
    return model, _together(lambda: make_optimizer(model.parameters()))


def _initialise(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
    shards = dict(module.named_parameters(recurse=False))
    for name, shard in shards.items():
        # Whole for as long as `init` runs. Drawing straight into the shards would give every rank
        # the same numbers, and other ones than one process draws.
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        setattr(module, name, nn.Parameter(whole, shard.requires_grad))
    init(module)
    for name, shard in shards.items():
        assert isinstance(shard, DTensor)
        mine, whole = shard.to_local(), getattr(module, name)
        rows = -(-len(whole) // shard.device_mesh.size())  # rounded up: the last ranks have fewer
        first = rows * shard.device_mesh.get_local_rank()
        with torch.no_grad():
            mine.copy_(whole[first : first + len(mine)])
        setattr(module, name, shard)


# Part 2; what a killed or failed save leaves is part 3, the stretch


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save a checkpoint of training, sharded: every rank writes its own part.

        complete  when save returns on any rank, load finds the new checkpoint
        older     checkpoints stay
        memory    a rank takes at most its part once more, and two whole parameters

        >>> save("run", model, optimizer, step=100)

    Args:
        folder: of all checkpoints of a run; made if missing; anything else in it stays.
        model: sharded over all ranks, which have the same buffers.
        optimizer: SGD, Adam or AdamW, its settings no tensors; has made a step with every
            parameter that requires a gradient, and with no others.
        step: of training, from 1.

    Raises:
        a step below 1, or not above the newest checkpoint's.

    Details:
        1. A save that is killed before it is complete leaves the checkpoint before it as the
           newest.
        2. So does a save that fails on any rank, such as on a full disk; it raises on every rank.
           torch's CheckpointException, which is no Exception, will do.
        3. Whatever such a save has left behind, any number of ranks can save its step again.
    """

    def check() -> None:
        newest = _newest(folder)
        if step < 1 or (newest is not None and step <= int(newest.name)):
            raise ValueError(
                f"step {step} is below 1, or not above {newest}, the newest checkpoint"
            )

    _together(check)
    weights, state = _together(lambda: get_state_dict(model, optimizer))
    # A folder of its own, in which .metadata is written last: without it, it does not count.
    dcp.save(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=Path(folder) / str(step)
    )


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> int:
    """Load the newest complete checkpoint, on any number of ranks.

        goes on  training continues as if it had not stopped: weights, persistent buffers,
                 optimizer state (on ranks without rows too), and all settings of all groups are
                 as saved
        drops    `grad` of all parameters
        memory   as in `save`, new state included; a mapped file counts whole

        >>> step = load("run", model, optimizer)

    Args:
        folder: as in `save`.
        model: sharded, of the class that was saved, with the same parameters frozen.
        optimizer: made alike (class, groups, kind of state); with other settings, and state or
            none.

    Returns:
        the step that was saved.

    Raises:
        no checkpoint; other names or shapes of weights or persistent buffers. Names the folder.
    """

    def find() -> tuple[Path, dict[str, Any]]:
        newest = _newest(folder)
        if newest is None:
            raise ValueError(f"no checkpoint in {folder}")
        saved: dict[str, Any] = FileSystemReader(newest).read_metadata().state_dict_metadata
        weights = [name for name in saved if name.startswith("model.")]
        there = {name.removeprefix("model."): saved[name].size for name in weights}
        _check_same_shapes(newest, there, _shapes(model.state_dict()))
        return newest, saved

    newest, saved = _together(find)
    # What the optimizer's groups lack, such as a scheduler's settings, needs a place to be read to.
    for name in saved:
        if name.startswith("optimizer.param_groups."):
            number, key = name.split(".", 3)[2:]
            optimizer.param_groups[int(number)].setdefault(key, None)
    # The optimizer's state is made anew, to be read to, and not with gradients around.
    model.zero_grad()
    optimizer.state.clear()
    weights, state = get_state_dict(model, optimizer)
    dcp.load(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=newest
    )
    states: dict[str, Any] = {"model_state_dict": weights, "optim_state_dict": state}
    _together(lambda: set_state_dict(model, optimizer, **states))
    return int(newest.name)


def _newest(folder: str | os.PathLike[str]) -> Path | None:
    """The last checkpoint that was saved to its end."""
    done = [path.parent for path in Path(folder).glob("*/.metadata") if path.parent.name.isdigit()]
    return max(done, key=lambda path: int(path.name), default=None)


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.shape for name, value in state.items()}


def _check_same_shapes(path: object, there: dict[str, Any], here: dict[str, Any]) -> None:
    if other := sorted(n for n in {*there, *here} if there.get(n) != here.get(n)):
        raise ValueError(f"{path} is of another model, first in {other[0]}")


def _together(action: Callable[[], _T]) -> _T:
    """What `action` returns; if it has failed on any rank, every rank raises."""
    result, error = [], None
    try:
        result.append(action())
    except Exception as caught:
        error = caught
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error and repr(error))
    if error is not None:
        raise error
    if any(errors):
        raise RuntimeError(f"another rank has failed: {next(filter(None, errors))}")
    return result[0]


# Part 4, the stretch


def save_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Save the weights as one file, for `torch.load` and the model as it is without shards.

        contents  names and values of the state dict of the model without shards: ordinary tensors
                  on the cpu, without padding; a tied weight under all its names, with one storage
        returns   on every rank once the file is there; rank 0 writes it
        memory    ranks other than 0 take at most three times the largest parameter, padded
        whole     the file is complete or not there; one from before stays until then, if the
                  save is killed, or fails and raises on every rank

        >>> save_whole("model.pt", model)

    Args:
        path: of the file; its folder is there.
        model: sharded.
    """
    _together(model.state_dict)  # its hooks may fail on one rank alone
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # It gathers one parameter after another, so every rank takes part; only rank 0 gets the result.
    weights = get_model_state_dict(model, options=options)

    def write() -> None:
        if dist.get_rank() == 0:
            # What was gathered is a view, and torch.save would write the padding behind it as
            # well: a copy of each without, and one for all names of a tied weight.
            copies: dict[Any, Any] = {}
            for name, value in model.state_dict(keep_vars=True).items():
                if value not in copies:
                    whole: Any = weights[name]
                    copies[value] = whole.clone()
                weights[name] = copies[value]
            partial = Path(f"{os.fspath(path)}.partial")
            torch.save(weights, partial)
            os.replace(partial, path)

    _together(write)


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Load the file of `save_whole`, or of one process, into a sharded model.

        in place  the optimizer's parameters are the ones that are set

        >>> load_whole("model.pt", model)

    Args:
        path: of the file, which every rank may read as a whole.
        model: sharded.

    Raises:
        a name that only the file or only the model's state dict has, or a shape that differs, of
        buffers too; names one of them and the path.
    """

    def read() -> dict[str, Any]:
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        _check_same_shapes(path, _shapes(found), _shapes(model.state_dict()))
        return found

    options = StateDictOptions(full_state_dict=True)
    weights = _together(read)
    _together(lambda: set_model_state_dict(model, weights, options=options))
