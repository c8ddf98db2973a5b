"""Checkpointed model: recompute activations instead of keeping them, and lose no bit.

Four parts: a LargeModel whose blocks are checkpointed in training, the same bits with and without,
segments and the square-root law, and checkpointing for models that somebody else wrote.

In the bars an *input* is the bytes of one block's input, and the *inside* of a block is what one
block's own forward and backward add to memory at their peak.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174);
torch.utils.checkpoint, whose selective form is create_selective_checkpoint_contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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
        super().__init__()
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim must be at least 1, not {hidden_dim}")
        self.up = nn.Linear(hidden_dim, 4 * hidden_dim)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * hidden_dim, hidden_dim)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, hidden_dim) to the same shape.

        Where `mask`, bool (batch, length), is False, x comes through unchanged.
        """
        update: Tensor = self.down(self.dropout(self.relu(self.up(x))))
        if mask is not None:
            update = update.masked_fill(~mask.unsqueeze(-1), 0.0)
        return x + update


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
        super().__init__()
        if not 1 <= segment_size <= num_layers:
            raise ValueError(f"no segments of {segment_size} blocks in {num_layers} layers")
        self.layers = nn.ModuleList(
            MemoryIntensiveBlock(hidden_dim, dropout) for _ in range(num_layers)
        )
        self.hidden_dim = hidden_dim
        self.use_checkpoint = use_checkpoint
        self.segment_size = segment_size

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, hidden_dim) to the same shape; `mask` goes to every block.

        Raises:
            ValueError: x is not of shape (batch, length, hidden_dim), or the mask not of
                (batch, length); names the shape.
        """
        self._check_shapes(x, mask)
        blocks = list(self.layers)
        # In evaluation there is no memory to save, and recomputing costs. Under no_grad() the
        # checkpoint itself steps aside.
        if not (self.use_checkpoint and self.training):
            return _run(blocks, x, mask)
        if self.segment_size == 1:
            return _run_checkpointed(blocks, x, mask)
        for start in range(0, len(blocks), self.segment_size):
            segment = blocks[start : start + self.segment_size]
            # Checkpoints within a checkpoint: the recomputation keeps inputs, and not insides.
            x = checkpoint(_run_checkpointed, segment, x, mask, use_reentrant=False)
        return x

    def _check_shapes(self, x: Tensor, mask: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[-1] != self.hidden_dim:
            raise ValueError(f"x of shape (batch, length, {self.hidden_dim}), not {tuple(x.shape)}")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"mask of shape {tuple(x.shape[:2])}, not {tuple(mask.shape)}")


def _run(blocks: Sequence[nn.Module], x: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, mask=mask)
    return x


def _run_checkpointed(blocks: Sequence[nn.Module], x: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        # Not reentrant: that form needs an input with a gradient, or the parameters get none.
        x = checkpoint(block, x, mask=mask, use_reentrant=False)
    return x


def best_segment_size(num_layers: int) -> int:
    """The segment size with the lowest peak: it minimises `ceil(num_layers / s) + s` inputs.

    Near sqrt(num_layers), so the peak grows as 2 * sqrt(num_layers). Of several best sizes any may
    be returned.

    Raises:
        ValueError: num_layers below 1; names it.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    return min(range(1, num_layers + 1), key=lambda size: -(-num_layers // size) + size)


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
    if not (isinstance(block_type, type) and issubclass(block_type, nn.Module)):
        raise TypeError(f"block_type must be a class of modules, not {block_type!r}")
    for op in keep:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"keep takes overloads, such as aten.mm.default, and not {op!r}")
    blocks = list(dict.fromkeys(_outermost(model, block_type)))  # a shared block comes once
    if not blocks:
        raise ValueError(f"no {block_type.__name__} in this {type(model).__name__}")
    if any(isinstance(vars(block).get("forward"), _Checkpointed) for block in blocks):
        raise ValueError(f"these {block_type.__name__} are checkpointed already")
    for block in blocks:
        # On the instance, so the class and its other models stay as they are. Only forward is
        # replaced: hooks run around it, and parameters keep their names.
        block.forward = _Checkpointed(block, block.forward, keep)
    return len(blocks)


def _outermost(module: nn.Module, block_type: type[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, block_type):
            yield child
        else:
            yield from _outermost(child, block_type)


class _Checkpointed:
    """A block's forward that recomputes. An object, because copy.deepcopy() copies what it holds:
    a closure would go on calling the block that was copied from."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], keep: Collection[Any]
    ) -> None:
        self.block, self.forward, self.keep = block, forward, list(keep)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.block.training:
            return self.forward(*args, **kwargs)
        # Bound first: checkpoint() would take a keyword argument such as `debug` for its own.
        run = partial(self.forward, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is entered around the forward pass, and around its recomputation."""
        keeping: Any = nullcontext()
        replaying: Any = nullcontext()
        if self.keep:
            keeping, replaying = create_selective_checkpoint_contexts(self.keep)
        # The statistics first: a selective recomputation knows only the forward's operations, and
        # would not know the copying of buffers.
        return keeping, _both(_statistics_held(self.block), replaying)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


@contextmanager
def _statistics_held(block: nn.Module) -> Iterator[None]:
    """Let batch normalisation update copies of its running statistics, which are then dropped."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [dict(norm.named_buffers()) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
