"""Checkpointed model: recompute activations instead of keeping them.

An *input* is the bytes of a block's input. An *inside* is a plain block's peak above its weights,
their gradients and its input. Weights and modes stay the same between forward and backward.

    errors  ValueError unless it says otherwise, before any change; each names the bad value
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Generator, Tensor, nn

# Operations that are expensive to recompute: matrix products, and attention on every device.
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
    """`num_layers` MemoryIntensiveBlocks in the ModuleList `layers`, run in order.

        runs       in training mode, with gradients on and `use_checkpoint`, each block that a
                   gradient reaches runs exactly once more, in the backward pass; otherwise not
        held       each block's input between the passes; nothing afterwards
        peak       with gradients already allocated: num_layers + 2 inputs + 1 inside
        same bits  output, gradients and random stream as without checkpoints
        keys       of state_dict(): only the blocks' own
        segments   part 3: `segment_size` s blocks, fewer at the end, share a checkpoint, and each
                   is checkpointed again inside it; a segment holds one input, the peak is
                   segments + s + 1 inputs + 1 inside, a block runs at most twice more

        >>> LargeModel(49, 1024, segment_size=7)(x, mask=mask).sum().backward()

    Args:
        num_layers: at least 1.
        segment_size: 1 to num_layers.

    Raises:
        one of these out of its range.

    Details:
        1. The recomputation runs under the forward pass's autocast setting.
        2. The input may need no gradient, and blocks may be frozen; no requires_grad changes.
        3. Several forward passes, each with its own mask, may precede one backward pass.
        4. torch.autograd.grad works, and so do two backward passes.
        5. `use_checkpoint` is an attribute that may be changed between steps.
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
    state: Collection[nn.Module | Generator] = (),
    **kwargs: Any,
) -> Any:
    """Return function(*args, **kwargs), and run it again in the backward pass.

        held     arguments, result and copies of the state, no activations; nothing afterwards
        bits     output and gradients are those of a plain call
        streams  the second run draws the same numbers, from torch's streams and each generator in
                 `state`; the backward pass moves none of them
        buffers  of modules in `state`: the second run sees what the first saw; the backward pass
                 changes none

        >>> y = recompute(block, x, mask=mask, state=[block, generator])

    Args:
        function: takes and returns anything, and changes no argument.

    Details:
        1. Several calls may precede one backward pass, and two backward passes may follow one call.
        2. Tensors by keyword or in tuples, lists and dicts get gradients too.
        3. If a positional tensor that requires a gradient was changed in place after the call, the
           backward pass raises.
        4. An error or Ctrl-C in the second run leaves streams and buffers as they were.
        5. The second run has the first one's autocast setting.
        6. Without gradients there is no second run.
        7. On CUDA the device's stream counts too, even if no argument is a tensor.
    """
    raise NotImplementedError


# Part 3


def best_segment_size(num_layers: int) -> int:
    """The segment size with the lowest peak.

        least  ceil(num_layers / s) + s is least; of several any

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
                   counts once
        runs       each runs once more, in the backward pass, if it is itself in training mode and
                   gradients are on
        held       each block's input and buffers, in the backward pass also 1 inside; nothing
                   afterwards
        same bits  output, gradients, buffers and random stream as without

        >>> checkpoint_blocks(gpt2, GPT2Block)
        12

    Args:
        keep: overloads whose results are held, such as DEAR; changes no bit.

    Raises:
        no such block; one of them checkpointed already. TypeError: something in `keep` is no
        overload.

    Details:
        1. Keys of state_dict(), classes and other models stay the same.
        2. Hooks of a block run once a call.
        3. Blocks take and return anything, and change no argument.
        4. A deep copy of the model checkpoints its own blocks.
        5. Only operations not in `keep` run again. `keep` has no views, casts or in-place
           operations, none of its calls draws random numbers, and its results stay unchanged.
        6. The same bits under autocast, and `keep` works there too.
        7. Several calls of a block may precede one backward pass.
    """
    raise NotImplementedError


# untouched stub b98a332dab1d
