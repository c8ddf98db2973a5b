"""Checkpointed model: recompute activations instead of keeping them.

An *input* is the bytes of a block's input. An *inside* is a plain block's peak above its weights,
their gradients and its input. Weights and modes stay the same between forward and backward.

    errors  ValueError unless it says otherwise, before any change; each names the bad value
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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
        super().__init__()
        self.up = nn.Linear(hidden_dim, 4 * hidden_dim)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * hidden_dim, hidden_dim)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, hidden_dim) to the same shape."""
        update: Tensor = self.down(self.dropout(self.relu(self.up(x))))
        if mask is not None:
            update = update.masked_fill(~mask.unsqueeze(-1), 0.0)
        return x + update


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
        """From (batch, length, hidden_dim) to the same.

        Raises:
            x of another shape, or mask not (batch, length).
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_dim:
            raise ValueError(f"x of shape (batch, length, {self.hidden_dim}), not {tuple(x.shape)}")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"mask of shape {tuple(x.shape[:2])}, not {tuple(mask.shape)}")
        blocks = list(self.layers)
        # In evaluation there is no memory to save, and recomputing costs time. Under no_grad() the
        # checkpoint itself does nothing.
        if not (self.use_checkpoint and self.training):
            return _run(blocks, x, mask)
        if self.segment_size == 1:
            return _run_checkpointed(blocks, x, mask)
        for start in range(0, len(blocks), self.segment_size):
            segment = blocks[start : start + self.segment_size]
            # Checkpoints inside a checkpoint: the recomputation keeps inputs, not insides.
            x = checkpoint(_run_checkpointed, segment, x, mask, use_reentrant=False)
        return x


def _run(blocks: Sequence[nn.Module], x: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, mask=mask)
    return x


def _run_checkpointed(blocks: Sequence[nn.Module], x: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        # Not reentrant: that form needs an input with a gradient, or the parameters get none.
        x = checkpoint(block, x, mask=mask, use_reentrant=False)
    return x


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
    return _recompute(function, args, kwargs, state, ())


def _recompute(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Collection[nn.Module | Generator],
    keep: Collection[Any],
) -> Any:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is entered around the first run, and around the second."""
        keeping: Any = nullcontext()
        replaying: Any = nullcontext()
        if keep:
            keeping, replaying = create_selective_checkpoint_contexts(list(keep))
        return keeping, _Found(state, replaying)

    # Tensors by position are saved by autograd, which notices a change in place. The partial keeps
    # keyword arguments apart from checkpoint()'s own.
    run = partial(function, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


class _Found:
    """The buffers and generators as the first run found them: a context around the second run.

    A class, because a context made by @contextmanager cannot be entered for a second backward.
    """

    def __init__(
        self, state: Collection[nn.Module | Generator], replaying: AbstractContextManager[Any]
    ) -> None:
        self.replaying = replaying
        tops = [part for part in state if isinstance(part, nn.Module)]
        self.modules = list(dict.fromkeys(module for top in tops for module in top.modules()))
        self.buffers = _copied([module._buffers for module in self.modules])
        # checkpoint() saves the streams of the devices of its positional tensors only.
        streams = [part for part in state if isinstance(part, Generator)]
        generators = [*streams, *torch.cuda.default_generators]
        self.states = [(generator, generator.get_state()) for generator in generators]

    def __enter__(self) -> None:
        self.own = [module._buffers for module in self.modules]
        self.now = [(generator, generator.get_state()) for generator, _ in self.states]
        # Copies once more: there may be a second backward pass.
        self._set(_copied(self.buffers), self.states)
        # Last: selective recomputation replays the operations of the first run, and copying
        # buffers was not among them.
        self.replaying.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.replaying.__exit__(*error)
        # Always: a recomputation that stops early ends by an exception.
        self._set(self.own, self.now)

    def _set(
        self, buffers: list[dict[str, Tensor | None]], states: list[tuple[Generator, Tensor]]
    ) -> None:
        for module, its in zip(self.modules, buffers, strict=True):
            module._buffers = its
        for generator, state in states:
            generator.set_state(state)


def _copied(found: list[dict[str, Tensor | None]]) -> list[dict[str, Tensor | None]]:
    return [{n: b if b is None else b.detach().clone() for n, b in its.items()} for its in found]


# Part 3


def best_segment_size(num_layers: int) -> int:
    """The segment size with the lowest peak.

        least  ceil(num_layers / s) + s is least; of several any

    Raises:
        num_layers below 1.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    return min(range(1, num_layers + 1), key=lambda size: -(-num_layers // size) + size)


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
    for op in keep:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"keep takes overloads, such as aten.mm.default, not {op!r}")
    found = [module for module in model.modules() if isinstance(module, block_type)]
    inside = {part for block in found for part in block.modules() if part is not block}
    blocks = [block for block in found if block not in inside]
    if not blocks:
        raise ValueError(f"no {block_type.__name__} in this {type(model).__name__}")
    if any(isinstance(vars(block).get("forward"), _Checkpointed) for block in blocks):
        raise ValueError(f"these {block_type.__name__} are checkpointed already")
    for block in blocks:
        # On the instance, so the class and its other models stay as they are. Only forward is
        # replaced: hooks run around it, and parameters keep their names.
        block.forward = _Checkpointed(block, block.forward, keep)
    return len(blocks)


class _Checkpointed:
    """A block's forward that recomputes. An object, because copy.deepcopy() copies what it holds;
    a closure would go on calling the original block."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], keep: Collection[Any]
    ) -> None:
        self.block, self.forward, self.keep = block, forward, keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.block.training:
            return self.forward(*args, **kwargs)
        return _recompute(self.forward, args, kwargs, [self.block], self.keep)
