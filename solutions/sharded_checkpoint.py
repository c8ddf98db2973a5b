"""Sharded checkpoints: build a model too large for any rank, save it, resume on other ranks.

A sharded model is made with fully_shard: each of N ranks holds 1/N of each parameter's rows,
rounded up. A rank's part is its rows of weights and optimizer state. All ranks call these functions
together, with the same arguments.

    evaluated  a model may be saved right after a forward pass without backward, with parameters
               still unsharded
    together   if a function, file or folder fails on one rank, every rank raises; none hangs
    untouched  gradients, modes and the random state, unless a line says otherwise
    errors     Raises lists ValueErrors: on every rank, naming the offending value, before any
               change

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
    """Build a model too large for any rank: make it on meta, shard it, initialise its shards.

        values     as when one process calls `init` on each module, in the order of
                   `model.modules()`: the same bits on any number of ranks
        units      fully_shard on each block, without the blocks inside it, and on the model for
                   the rest
        optimizer  has the shards
        memory     a rank holds at most its shards, the buffers, and two units unsharded

        >>> model, optimizer = build(GPT, mesh, Block, init, torch.optim.AdamW)

    Args:
        make_model: called under the meta device.
        mesh: one-dimensional, all ranks in order of rank.
        block_types: classes of the blocks; subclasses count.
        init: sets a module's own parameters and buffers in place, not its children's; draws from
            the default generator, whose state is the same on every rank.
        make_optimizer: gets all parameters, frozen ones too.

    Details:
        1. A parameter shared by two modules of one unit stays tied.
        2. Train mode, requires_grad and the keys of state_dict() stay as make_model set them.
    """

    def make() -> nn.Module:
        with torch.device("meta"):
            return make_model()

    def initialise() -> None:
        for module in model.modules():
            _initialise(module, init)

    model = _together(make)
    # Inner blocks first: fully_shard takes all parameters below a module that are not yet taken.
    for module in reversed([*model.modules()]):
        if isinstance(module, block_types) or module is model:
            fully_shard(module, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    _together(initialise)
    # Last: fully_shard and to_empty() may replace parameters.
    return model, _together(lambda: make_optimizer(model.parameters()))


def _initialise(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
    shards = dict(module.named_parameters(recurse=False))
    for name, shard in shards.items():
        # Unsharded only while `init` runs. Drawn into shards, every rank would have the same
        # numbers, and not those of one process.
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        setattr(module, name, nn.Parameter(whole, shard.requires_grad))
    init(module)
    for name, shard in shards.items():
        assert isinstance(shard, DTensor)
        mine, whole = shard.to_local(), getattr(module, name)
        rows = -(-len(whole) // shard.device_mesh.size())  # rounded up: last ranks have fewer
        first = rows * shard.device_mesh.get_local_rank()
        with torch.no_grad():
            mine.copy_(whole[first : first + len(mine)])
        setattr(module, name, shard)


# Part 2; what a killed or failed save leaves is part 3, the stretch


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save a sharded checkpoint of training: every rank writes its own part.

        complete  when save returns on any rank, load finds the new checkpoint
        memory    a rank takes at most its part once more, and two unsharded parameters

        >>> save("run", model, optimizer, step=100)

    Args:
        folder: of the run's checkpoints; made if missing; other files in it stay.
        model: sharded over all ranks, with the same buffers on each.
        optimizer: SGD, Adam or AdamW, after a step of all trainable parameters; frozen ones have
            no state.
        step: of training, from 1.

    Raises:
        a step that is not above the newest checkpoint's.

    Details:
        1. A save killed before it is complete leaves the checkpoint before it as the newest.
        2. So does a save that fails on any rank, as on a full disk; it raises on every rank.
        3. After either, any number of ranks can save that step again.
    """

    def check() -> None:
        newest = _newest(folder)
        if newest is not None and step <= int(newest.name):
            raise ValueError(f"step {step} is not above {newest}, the newest checkpoint")

    _together(check)
    weights, state = get_state_dict(model, optimizer)
    # One folder per step. dcp writes its .metadata last: without it, a folder does not count.
    dcp.save(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=Path(folder) / str(step)
    )


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> int:
    """Load the complete checkpoint of the highest step, on any number of ranks.

        resumes  training continues as if it had not stopped: weights, persistent buffers,
                 optimizer state and all settings of all groups are as saved; gradients are dropped
        memory   as in `save`, new state included; a memory-mapped file counts in full

        >>> step = load("run", model, optimizer)

    Args:
        folder: as in `save`.
        model: sharded, of the saved class, with the same frozen parameters.
        optimizer: of the same class, groups and kind of state, new or not; settings may differ.

    Returns:
        the step that was saved.

    Raises:
        no checkpoint; other names or shapes than in the model's state dict. Names the folder.
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
    # dcp reads only keys that are there. A new optimizer lacks some, such as a scheduler's.
    for name in saved:
        if name.startswith("optimizer.param_groups."):
            number, key = name.split(".", 3)[2:]
            optimizer.param_groups[int(number)].setdefault(key, None)
    # get_state_dict makes the state to read into, but only if there is none, and no gradients.
    model.zero_grad()
    optimizer.state.clear()
    weights, state = get_state_dict(model, optimizer)
    dcp.load(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=newest
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(newest.name)


def _newest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step."""
    done = [path.parent for path in Path(folder).glob("*/.metadata") if path.parent.name.isdigit()]
    return max(done, key=lambda path: int(path.name), default=None)


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.shape for name, value in state.items()}


def _check_same_shapes(path: object, there: dict[str, Any], here: dict[str, Any]) -> None:
    if other := sorted(n for n in {*there, *here} if there.get(n) != here.get(n)):
        raise ValueError(f"{path} is of another model: {other[0]} differs")


def _together(action: Callable[[], _T]) -> _T:
    """What `action` returns; if it fails on any rank, every rank raises."""
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
    """Save the weights as one file, for `torch.load` and the unsharded model.

        contents  the state dict of the unsharded model, as ordinary tensors on the cpu
        returns   on every rank once the file is there; rank 0 writes it
        memory    ranks other than 0 take at most three times the largest parameter, padded
        whole     a save that is killed or fails leaves the file from before, or none; a failure
                  raises on every rank

        >>> save_whole("model.pt", model)

    Args:
        path: of the file, in a folder that exists.
        model: sharded.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # Every rank takes part: parameters are gathered one by one. Only rank 0 gets the result.
    weights = get_model_state_dict(model, options=options)

    def write() -> None:
        if dist.get_rank() == 0:
            partial = Path(f"{os.fspath(path)}.partial")
            torch.save(weights, partial)
            os.replace(partial, path)

    _together(write)


def load_whole(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Load a file of `save_whole`, or of one process, into a sharded model.

        in place  parameters are set, not replaced: the optimizer still has them

        >>> load_whole("model.pt", model)

    Args:
        path: of the file.
        model: sharded.

    Raises:
        other names or shapes than in the model's state dict; names one of them and the path.
    """

    def read() -> dict[str, Any]:
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        _check_same_shapes(path, _shapes(found), _shapes(model.state_dict()))
        return found

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, _together(read), options=options)
