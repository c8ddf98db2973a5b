"""A right answer from the stub alone, in torch's own idioms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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


class _Recomputation:
    """Context of the second run: modules and generators are as the first run found them.

    What it writes to buffers is dropped, so that running statistics are not updated again.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        generators: Iterable[torch.Generator] = (),
        inner: AbstractContextManager[Any] | None = None,
    ) -> None:
        tree = list({id(m): m for module in modules for m in module.modules()}.values())
        self.buffers = [(m, _copied(m._buffers)) for m in tree]
        self.states = [(g, g.get_state()) for g in generators]
        self.inner = nullcontext() if inner is None else inner

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for generator, state in self.states:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for module, found in self.buffers:
                stack.callback(_put, module, dict(module._buffers))
                _put(module, _copied(found))
            stack.enter_context(self.inner)
            self.stack = stack.pop_all()

    def __exit__(self, *exc: object) -> None:
        self.stack.__exit__(*exc)


def _copied(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: b if b is None else b.detach().clone() for name, b in buffers.items()}


def _put(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)


# Parts 1 to 3


def _run_segment(blocks: nn.ModuleList, x: Tensor, mask: Tensor | None) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, mask=mask, use_reentrant=False)
    return x


def _check_at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


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
        _check_at_least_1("num_layers", num_layers)
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
        if not (self.use_checkpoint and self.training and torch.is_grad_enabled()):
            for layer in self.layers:
                x = layer(x, mask=mask)
            return x
        for start in range(0, len(self.layers), self.segment_size):
            segment = self.layers[start : start + self.segment_size]
            if len(segment) == 1:
                x = checkpoint(segment[0], x, mask=mask, use_reentrant=False)
            else:
                x = checkpoint(_run_segment, segment, x, mask, use_reentrant=False)
        return x


def best_segment_size(num_layers: int) -> int:
    _check_at_least_1("num_layers", num_layers)
    # No size above 2 * sqrt(num_layers) + 2 is better than one near the root.
    sizes = range(1, min(num_layers, 2 * math.isqrt(num_layers) + 2) + 1)
    return min(sizes, key=lambda size: -(-num_layers // size) + size)


# Part 4


class _ReplayKept(TorchDispatchMode):
    """Results of `keep` come from the cache; other operations run, however often they are called.

    (Their number may differ: autocast casts a weight again that was in its own cache before.)
    """

    def __init__(self, keep: frozenset[Any], cached: TorchDispatchMode) -> None:
        super().__init__()
        self.keep = keep
        self.cached = cached

    def __enter__(self) -> TorchDispatchMode:
        # As its own __enter__ does: a second backward pass is told that it is one.
        if hasattr(self.cached, "func_counter"):  # torch 2.11 had none, nor second passes
            self.cached.func_counter.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.keep:
            return self.cached.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _selective_contexts(
    keep: frozenset[Any],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if not keep:
        return nullcontext(), nullcontext()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    caching, cached = create_selective_checkpoint_contexts(policy)
    return caching, _ReplayKept(keep, cached)


class _CheckpointedForward:
    """Stands in for a block's `forward`, as an attribute of the block.

    Hooks of the block are run by its __call__, outside of this. A deep copy of the block copies
    the bound method too, and so calls the copy.
    """

    def __init__(self, block: nn.Module, keep: frozenset[Any]) -> None:
        self.block = block
        self.forward = block.forward
        self.keep = keep
        functools.update_wrapper(self, block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)

        return _run_twice(self.forward, args, kwargs, [self.block], (), self.keep)


def _run_twice(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: Iterable[nn.Module],
    generators: Iterable[torch.Generator],
    keep: frozenset[Any],
) -> Any:
    # Leaves go by position, whatever their names, so that checkpoint sees all tensors.
    leaves, spec = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        return function(*args, **kwargs)

    def context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = _selective_contexts(keep)
        every = [*generators, *torch.cuda.default_generators]
        return first, _Recomputation(modules, every, second)

    return checkpoint(run, *leaves, use_reentrant=False, context_fn=context_fn)


def recompute(
    function: Callable[..., Any],
    /,
    *args: Any,
    state: Collection[nn.Module | torch.Generator] = (),
    **kwargs: Any,
) -> Any:
    modules = [part for part in state if isinstance(part, nn.Module)]
    generators = [part for part in state if isinstance(part, torch.Generator)]
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return _run_twice(function, args, kwargs, modules, generators, frozenset())


def checkpoint_blocks(
    model: nn.Module, block_type: type[nn.Module], *, keep: Collection[Any] = ()
) -> int:
    kept = frozenset(keep)
    for op in kept:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"keep takes overloads of operators, not {op}")
    candidates = [m for m in model.modules() if isinstance(m, block_type)]
    inside = {m for block in candidates for m in block.modules() if m is not block}
    blocks = [block for block in candidates if block not in inside]
    if not blocks:
        raise ValueError(f"the model contains no {block_type.__name__}")
    if any(isinstance(vars(block).get("forward"), _CheckpointedForward) for block in blocks):
        raise ValueError(f"a {block_type.__name__} of the model is checkpointed already")
    for block in blocks:
        block.forward = _CheckpointedForward(block, kept)
    return len(blocks)
