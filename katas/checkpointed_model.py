"""Checkpointed model: recompute activations instead of keeping them, and lose no bit.

Four parts: a LargeModel whose blocks are checkpointed in training, the same bits with and without,
segments and the square-root law, and checkpointing for models that somebody else wrote.

In the bars an *input* is the bytes of one block's input, and the *inside* of a block is what one
block's own forward and backward add to memory at their peak.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174);
torch.utils.checkpoint, whose selective form is create_selective_checkpoint_contexts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

# Operations whose results are dear to recompute: matrix products, and attention on every device.
DEAR: frozenset[Any] = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


# Parts 1 to 3


class MemoryIntensiveBlock(nn.Module):
    """A residual feed-forward block, four times as wide inside: x + down(dropout(relu(up(x)))).

    Its children are `up` (hidden_dim to 4 * hidden_dim), `relu`, `dropout` and `down`.

    Raises:
        ValueError: hidden_dim below 1; names it.
    """

    def __init__(self, hidden_dim: int, dropout: float = 0.1) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, hidden_dim) to the same shape.

        Where `mask`, bool (batch, length), is False, x comes through unchanged.
        """
        raise NotImplementedError


class LargeModel(nn.Module):
    """`num_layers` MemoryIntensiveBlocks in the ModuleList `layers`, one after another.

    Part 1. In training mode with gradients on, and if `use_checkpoint`, each block is checkpointed:
    what is held between forward and backward is its input, and after the backward pass nothing; its
    forward runs exactly once more, in the backward pass (where no gradient passes it may be left
    out). In eval mode and under torch.no_grad() every block runs once. Peak above the baseline,
    with the gradients in place and `segment_size` 1: `(num_layers + 2) inputs + 1 inside`.

    Part 2. Checkpointing changes no bit: output and gradients, with dropout; the random stream
    afterwards; under autocast; for an input that requires no gradient; for a mask; with frozen
    blocks; with several forward passes before one backward. The keys of state_dict() are those of
    the blocks alone, so that weights can be exchanged with a model that does not checkpoint, and a
    deep copy is a model of its own.

    Part 3. With `segment_size` s above 1, s blocks in a row (the last segment may have fewer) are
    checkpointed together, and when a segment is recomputed, each of its blocks is checkpointed
    again. Held are then one input a segment, and while a segment is worked on, its blocks' inputs:
    peak above the baseline `(segments + s + 1) inputs + 1 inside`. A block's forward runs at most
    twice more. (With once more, all s insides would have to be held.)

    Args:
        num_layers: at least 1.
        hidden_dim: of every block, at least 1.
        dropout: of every block, a probability.
        use_checkpoint: whether to checkpoint at all; may be changed later, as an attribute.
        segment_size: blocks in a segment, from 1 to num_layers; may be changed later too, within
            that range.

    Raises:
        ValueError: a number out of its range; names it.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_dim: int,
        *,
        dropout: float = 0.1,
        use_checkpoint: bool = True,
        segment_size: int = 1,
    ) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, hidden_dim) to the same shape; `mask` goes to every block.

        Raises:
            ValueError: x is not of shape (batch, length, hidden_dim), or the mask not of
                (batch, length); names the shape.
        """
        raise NotImplementedError


def best_segment_size(num_layers: int) -> int:
    """The segment size with the lowest peak: it minimises `ceil(num_layers / s) + s` inputs.

    Near sqrt(num_layers), so the peak grows as 2 * sqrt(num_layers). Of several best sizes any may
    be returned.

    Raises:
        ValueError: num_layers below 1; names it.
    """
    raise NotImplementedError


# Part 4


def checkpoint_blocks(
    model: nn.Module, block_type: type[nn.Module], *, keep: Collection[Any] = ()
) -> int:
    """Checkpoint every block of a model that somebody else wrote, in place and without its code.

    A block is a submodule of `block_type` (or of a class derived from it) that is not inside
    another one; one that the model holds in several places is one block. From now on its forward is
    recomputed in the backward pass when the block is in training mode and gradients are on; at
    other times nothing changes. It may take and return anything, positional and by keyword of any
    name, but changes nothing that it is given (a key-value cache is switched off in training). No
    bit changes, no key of state_dict() changes, the block's own hooks run as they did, and so does
    a forward that somebody has put on the block itself; its class and other models of that class
    stay as they are, and a deep copy of the model checkpoints its own blocks.

    Selective recomputation: results of the operations in `keep` (such as DEAR) are held, and only
    the others are recomputed. That costs fewer FLOPs than recomputing all and holds fewer bytes
    than holding all. Not asked for: operations in `keep` that draw random numbers when they are
    called, and a block that is called more than once in one autocast region.

    Batch normalisation inside a block updates its running statistics once, in the forward pass,
    and not again in the recomputation.

    Args:
        model: any module that contains blocks; not a block itself.
        block_type: the class of the blocks, such as GPT2Block.
        keep: overloads of operators, such as torch.ops.aten.mm.default.

    Returns:
        The number of blocks.

    Raises:
        TypeError: block_type is no class of modules, or something in `keep` is no overload (such
            as torch.ops.aten.mm); names it.
        ValueError: the model contains no such block (names the class), or has been through this
            for one of them before (for blocks of another class it may have been). After any error
            nothing has been changed.
    """
    raise NotImplementedError


# untouched stub 45b013a1f676
