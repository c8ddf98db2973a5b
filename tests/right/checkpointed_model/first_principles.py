"""A right answer of another shape: one recursion, and a selective mode of its own."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

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


# Parts 1 to 3


class MemoryIntensiveBlock(nn.Module):
    def __init__(self, hidden_dim: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_dim, 4 * hidden_dim)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * hidden_dim, hidden_dim)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        y = x + self.down(self.dropout(self.relu(self.up(x))))
        return y if mask is None else torch.where(mask.unsqueeze(-1), y, x)


def _run(blocks: list[nn.Module], x: Tensor, mask: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
    """x through the blocks; with `sizes`, in checkpointed runs of sizes[0], each of them by the
    rest of sizes. So () holds everything, (1,) one input a block, and (s, 1) one a segment."""
    if not sizes:
        for block in blocks:
            x = block(x, mask=mask)
        return x
    size, *finer = sizes
    for start in range(0, len(blocks), size):
        part = blocks[start : start + size]
        again = functools.partial(_run, part, sizes=tuple(finer))
        x = checkpoint(again, x, mask, use_reentrant=False)
    return x


class LargeModel(nn.Module):
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
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, not {num_layers}")
        if not 1 <= segment_size <= num_layers:
            raise ValueError(f"segment_size must be from 1 to {num_layers}, not {segment_size}")
        self.hidden_dim = hidden_dim
        self.use_checkpoint = use_checkpoint
        self.segment_size = segment_size
        self.layers = nn.ModuleList(
            MemoryIntensiveBlock(hidden_dim, dropout) for _ in range(num_layers)
        )

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        if x.dim() != 3 or x.shape[-1] != self.hidden_dim:
            raise ValueError(
                f"x must be of shape (batch, length, {self.hidden_dim}), not {tuple(x.shape)}"
            )
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"mask must be of shape {tuple(x.shape[:2])}, not {tuple(mask.shape)}")
        sizes: tuple[int, ...] = ()
        if self.use_checkpoint and self.training and torch.is_grad_enabled():
            sizes = (1,) if self.segment_size == 1 else (self.segment_size, 1)
        return _run(list(self.layers), x, mask, sizes)


def best_segment_size(num_layers: int) -> int:
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    # ceil(n / s) + s is at least ceil(2 sqrt n). With s = m = ceil(sqrt n) it is 2m - 1 for
    # n <= m(m - 1) and else 2m, and that is ceil(2 sqrt n): (m - 1/2)^2 = m(m - 1) + 1/4.
    return math.isqrt(num_layers - 1) + 1


# Part 4


class _Buffers:
    """The buffers of modules as the first run found them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.found: list[tuple[nn.Module, str, Tensor | None]] = []
        for module in dict.fromkeys(m for top in modules for m in top.modules()):
            for name, buffer in module._buffers.items():
                self.found.append((module, name, _copied(buffer)))

    @contextmanager
    def as_found(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        tree = list(dict.fromkeys(m for top in modules for m in top.modules()))
        now = [(module, dict(module._buffers)) for module in tree]
        try:
            for module in tree:
                module._buffers.clear()
            for module, name, old in self.found:
                module._buffers[name] = _copied(old)
            yield
        finally:
            for module, buffers in now:
                module._buffers.clear()
                module._buffers.update(buffers)


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


class _Holding(TorchDispatchMode):
    """In its first use (the forward) notes the results of `keep`; in later ones plays them back.

    The k-th call of an operator is played back by the k-th noted.
    """

    def __init__(self, keep: frozenset[Any]) -> None:
        super().__init__()
        self.keep = keep
        self.held: dict[Any, list[Any]] = defaultdict(list)
        self.calls: dict[Any, int] = {}
        self.replaying = False

    @contextmanager
    def run(self, *, replaying: bool) -> Iterator[None]:
        outer = self.calls, self.replaying
        self.calls, self.replaying = defaultdict(int), replaying
        try:
            with self:
                yield
        finally:
            self.calls, self.replaying = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        number = self.calls.get(func, 0)
        self.calls[func] = number + 1
        if func in self.keep and self.replaying and number < len(self.held[func]):
            return tree_map(_detached, self.held[func][number])
        result = func(*args, **(kwargs or {}))
        if func in self.keep and not self.replaying:
            self.held[func].append(tree_map(_detached, result))
        return result


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


class _Call:
    """One call of a function. Called once by the forward pass, and again by the backward pass, with
    the state as it was."""

    def __init__(
        self,
        forward: Callable[..., Any],
        keep: frozenset[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: Iterable[nn.Module | torch.Generator],
    ) -> None:
        self.forward = forward
        self.is_first = True
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.modules = [part for part in state if isinstance(part, nn.Module)]
        self.buffers = _Buffers(self.modules)
        own = [part for part in state if isinstance(part, torch.Generator)]
        # checkpoint() looks for devices among the tensors that it is given alone.
        generators = dict.fromkeys([*own, *torch.cuda.default_generators])
        self.generators = [(generator, generator.get_state()) for generator in generators]
        self.holding = _Holding(keep) if keep else None

    def give_leaves(self) -> list[Any]:
        leaves, self.leaves = self.leaves, []
        return leaves

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, self.spec)
        if self.is_first:
            self.is_first = False
            with self.holding.run(replaying=False) if self.holding else nullcontext():
                return self.forward(*args, **kwargs)
        with (
            _from(self.generators),
            self.buffers.as_found(self.modules),
            self.holding.run(replaying=True) if self.holding else nullcontext(),
        ):
            return self.forward(*args, **kwargs)


@contextmanager
def _from(generators: list[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    now = [(generator, generator.get_state()) for generator, _ in generators]
    for generator, state in generators:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)


def recompute(
    function: Callable[..., Any],
    /,
    *args: Any,
    state: Collection[nn.Module | torch.Generator] = (),
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, frozenset(), args, kwargs, state)
    return checkpoint(call, *call.give_leaves(), use_reentrant=False)


def _forward(
    block: nn.Module,
    forward: Callable[..., Any],
    keep: frozenset[Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    call = _Call(forward, keep, args, kwargs, [block])
    return checkpoint(call, *call.give_leaves(), use_reentrant=False)


MARK = "_is_checkpointed_block"


def checkpoint_blocks(
    model: nn.Module, block_type: type[nn.Module], *, keep: Collection[Any] = ()
) -> int:
    for op in keep:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"keep must hold overloads of operators, not {op!r}")
    of_type = [module for module in model.modules() if isinstance(module, block_type)]
    inside = {id(inner) for block in of_type for inner in block.modules() if inner is not block}
    blocks = [block for block in of_type if id(block) not in inside]
    if not blocks:
        raise ValueError(f"the model contains no block of class {block_type.__name__}")
    if any(MARK in vars(block) for block in blocks):
        raise ValueError(f"a {block_type.__name__} of the model is checkpointed already")
    held = frozenset(keep)
    for block in blocks:
        # A partial, unlike a closure, is copied with what it holds: the copy's own block and
        # its own forward.
        forward = functools.partial(_forward, block, block.forward, held)
        block.forward = functools.update_wrapper(forward, block.forward)  # type: ignore
        setattr(block, MARK, True)
    return len(blocks)
