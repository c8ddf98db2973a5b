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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


# untouched stub 3091ec4dd8cf
