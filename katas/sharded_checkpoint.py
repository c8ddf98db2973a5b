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

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


# untouched stub 403338b8f32c
