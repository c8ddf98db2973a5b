"""Checkpointed model: recompute activations instead of keeping them.

An *input*: a block's input in bytes; an *inside*: its plain peak above weights, their gradients,
input. An "error" is any exception.

    errors  ValueError unless it says otherwise; each names the offending value, and comes before
            any change
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Generator, Tensor, nn

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


# Part 1, and the segments of part 3


class MemoryIntensiveBlock(nn.Module):
    """A feed-forward block, four times as wide inside: x + down(dropout(relu(up(x)))).

        children  `up`, `relu`, `dropout` and `down`
        mask      bool (batch, length); where it is False, x comes through unchanged

    Args:
        hidden_dim: the width of x.
    """

    def __init__(self, hidden_dim: int, dropout: float = 0.1) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, hidden_dim) to the same shape."""
        raise NotImplementedError


class LargeModel(nn.Module):
    """`num_layers` MemoryIntensiveBlocks in the ModuleList `layers`, one after another.

        runs       if the model itself is in training mode, with gradients on and `use_checkpoint`,
                   each block that a gradient reaches runs exactly once more, in the backward pass
                   (it may stop early); otherwise once
        held       each block's input between the passes; nothing afterwards
        peak       with gradients in place: num_layers + 2 inputs + 1 inside
        same bits  output, gradients and random stream as without checkpoints
        keys       of state_dict(): the blocks' own
        segments   part 3: `segment_size` s blocks, fewer at the end, share a checkpoint, and each
                   is checkpointed again within; it holds one input, the peak is segments + s + 1
                   inputs + 1 inside, a block runs at most twice more

        >>> LargeModel(49, 1024, segment_size=7)(x, mask=mask).sum().backward()

    Args:
        num_layers: at least 1.
        segment_size: 1 to num_layers.

    Raises:
        one of these out of its range.

    Details:
        1. The recomputation has the forward pass's autocast, or none.
        2. The input needs no gradient, and blocks may be frozen; no requires_grad changes.
        3. Several forward passes may precede one backward pass, each with its own mask.
        4. torch.autograd.grad works, and so do two backward passes and gradients of gradients.
        5. An input, mask or parameter changed in place before the backward pass: an error or right
           gradients.
        6. A deep copy is a model of its own, also after a training step.
        7. use_checkpoint and segment_size may be set later, as attributes, in range. Nobody changes
           them or train/eval modes between the passes.
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
        """From (batch, length, hidden_dim) to the same.

        Raises:
            x of another shape, or mask not (batch, length).
        """
        raise NotImplementedError


# Part 2


def recompute(
    function: Callable[..., Any],
    /,
    *args: Any,
    state: Iterable[nn.Module | Generator] = (),
    **kwargs: Any,
) -> Any:
    """Return function(*args, **kwargs), and run it again in backward.

        held     arguments, result, copies of the state; no activations
        bits     output and gradients are those of a plain call
        streams  the second run draws what the first drew, from torch's streams and each generator
                 in `state`; the backward pass moves none
        buffers  of modules in `state`, even None or replaced: the second run finds what the first
                 found; the backward pass changes none

        >>> y = recompute(block, x, mask=mask, state=[block, generator])

    Args:
        function: takes and returns anything, changes no argument.
        state: modules and torch.Generators.

    Raises:
        TypeError: anything else in `state`.

    Details:
        1. Several calls may precede one backward pass, and two backward passes may follow one call.
        2. Tensors by keyword or in tuples, lists and dicts get gradients; changed in place, they
           make the backward pass raise an error. A keyword may have a name that torch's checkpoint
           uses, such as `debug`. Nobody changes parameters or train/eval modes between the passes.
        3. An error or Ctrl-C in the second run leaves streams and buffers as they were.
        4. The second run has the first one's autocast, or none.
        5. Without gradients there is no second run.
        6. On cuda the device's stream counts, even if no argument is a tensor.
        7. A result dropped without a backward pass leaves no tensor to the garbage collector.
    """
    raise NotImplementedError


# Part 3


def best_segment_size(num_layers: int) -> int:
    """The segment size with the lowest peak.

        least  ceil(num_layers / s) + s is least; of several any will do

    Raises:
        num_layers below 1.
    """
    raise NotImplementedError


# Part 4


def checkpoint_blocks(
    model: nn.Module, block_type: type[nn.Module], *, keep: Collection[Any] = ()
) -> int:
    """Checkpoint the blocks of somebody else's model, in place; return their number.

        blocks     of `block_type` or a subclass, at any depth, none inside another; a shared one
                   is one
        runs       each runs once more, in the backward pass, if it is itself in training mode and
                   gradients are on
        held       each block's input and buffers; in backward also 1 inside
        same bits  output, gradients, buffers and random stream as without

        >>> checkpoint_blocks(gpt2, GPT2Block)
        12

    Args:
        model: is not a block itself.
        keep: changes no bit.

    Raises:
        no such block; one of them checkpointed already. TypeError: something in `keep` is no
        overload.

    Details:
        1. Keys of state_dict(), classes and other models stay the same.
        2. Hooks of a block run once a call; a forward put on the block before still runs.
        3. Blocks take and return anything, changing no argument.
        4. A deep copy of the model checkpoints its own blocks.
        5. Blocks of another class may follow in a second call.
        6. Results of the overloads in `keep`, such as DEAR, are held, unless that call draws random
           numbers; only other operations run again. `keep` has no views, casts or in-place
           operations.
        7. The same bits under autocast, and `keep` works there too.
        8. Calls share nothing; a dropped result leaves nothing. Nobody changes parameters or
           train/eval modes between the passes.
        9. Generators among the attributes of a block and its submodules count.
        10. With `keep` a call has one backward pass; under autocast a block has one call. A held
            result changed in place: an error or right gradients.
    """
    raise NotImplementedError


# untouched stub 05ce726501dc
