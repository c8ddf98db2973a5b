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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

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
        again = functools.partial(_run_again, part, sizes=tuple(finer))
        # The mask and the weights go as arguments and not in a closure: then they are saved, hence
        # guarded against changes in place, like x.
        weights = [p for block in part for p in block.parameters()]
        x = checkpoint(again, x, mask, *weights, use_reentrant=False)
    return x


def _run_again(
    blocks: list[nn.Module],
    x: Tensor,
    mask: Tensor | None,
    *_: Tensor,
    sizes: tuple[int, ...],
) -> Tensor:
    return _run(blocks, x, mask, sizes)


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
        self.num_layers = num_layers
        self.hidden_dim = hidden_dim
        self.use_checkpoint = use_checkpoint
        self.segment_size = segment_size  # refused before weights are drawn
        self.layers = nn.ModuleList(
            MemoryIntensiveBlock(hidden_dim, dropout) for _ in range(num_layers)
        )

    @property
    def segment_size(self) -> int:
        return self._segment_size

    @segment_size.setter
    def segment_size(self, size: int) -> None:
        if not 1 <= size <= self.num_layers:
            raise ValueError(f"segment_size must be from 1 to {self.num_layers}, not {size}")
        self._segment_size = size

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
        storages: dict[int, torch.UntypedStorage] = {}
        for module in dict.fromkeys(m for top in modules for m in top.modules()):
            for name, buffer in module._buffers.items():
                self.found.append((module, name, _moved(buffer, storages)))

    @contextmanager
    def as_found(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        tree = list(dict.fromkeys(m for top in modules for m in top.modules()))
        now = [(module, dict(module._buffers)) for module in tree]
        storages: dict[int, torch.UntypedStorage] = {}
        try:
            for module in tree:
                module._buffers.clear()
            for module, name, old in self.found:
                module._buffers[name] = _moved(old, storages)
            yield
        finally:
            for module, buffers in now:
                module._buffers.clear()
                module._buffers.update(buffers)


def _moved(buffer: Tensor | None, storages: dict[int, torch.UntypedStorage]) -> Tensor | None:
    """The same view of a copy of the storage; each storage is copied once."""
    if buffer is None:
        return None
    storage = buffer.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    new = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    where = buffer.storage_offset(), buffer.size(), buffer.stride()
    return new.set_(storages[storage._cdata], *where).requires_grad_(buffer.requires_grad)


def _alias(x: Any) -> Any:
    """The same bytes and the same version counter, outside the graph."""
    if not isinstance(x, Tensor):
        return x
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Held:
    """The results of one call of an operator, and the random states that it left behind."""

    def __init__(self, result: Any, random: list[tuple[torch.device, Tensor]]) -> None:
        self.random = random
        self._set(tree_map(_alias, result))

    def _set(self, result: Any) -> None:
        self.result = result
        self.versions = [(t, t._version) for t in tree_leaves(result) if isinstance(t, Tensor)]

    def is_intact(self) -> bool:
        return all(t._version == version for t, version in self.versions)

    def is_in(self, storages: set[int]) -> bool:
        return any(_storage(t) in storages for t, _ in self.versions)

    def move(self) -> None:
        if self.is_intact():
            self._set(tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.result))

    def replay(self) -> Any:
        for device, state in self.random:
            _set_random_state(device, state)
        return tree_map(_alias, self.result)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class _Holding(TorchDispatchMode):
    """In its first use (the forward) notes the results of `keep`; in later ones plays them back.

    The k-th call of an operator is played back by the k-th noted. A result that somebody has
    written to since is computed again.
    """

    def __init__(self, keep: frozenset[Any]) -> None:
        super().__init__()
        self.keep = keep
        self.held: dict[Any, list[_Held]] = defaultdict(list)
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
        kwargs = kwargs or {}
        # What draws from a generator moves it, so it is computed again.
        draws = any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs)))
        if func not in self.keep or draws:
            if func._schema.is_mutable:
                self._make_way(func, args, kwargs)
            return func(*args, **kwargs)
        if not self.replaying:
            result, random = self._observe(func, args, kwargs)
            self.held[func].append(_Held(result, random))
            return result
        number = self.calls[func]
        self.calls[func] += 1
        if number < len(self.held[func]) and (held := self.held[func][number]).is_intact():
            return held.replay()
        return func(*args, **kwargs)

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs), []
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        devices = {t.device for t in tensors} | {torch.device("cpu")}
        before = {device: _random_state(device) for device in devices if device.type != "meta"}
        result = func(*args, **kwargs)
        after = [(device, _random_state(device)) for device in before]
        return result, [(d, state) for d, state in after if not torch.equal(state, before[d])]

    def _make_way(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        written = set()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= {_storage(t) for t in tree_leaves(value) if isinstance(t, Tensor)}
        for calls in self.held.values():
            for held in calls:
                if held.is_in(written):
                    held.move()


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
    state: Iterable[nn.Module | torch.Generator] = (),
    **kwargs: Any,
) -> Any:
    parts = tuple(state)
    for part in parts:
        if not isinstance(part, (nn.Module, torch.Generator)):
            raise TypeError(f"state must hold modules and generators, not {part!r}")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, frozenset(), args, kwargs, parts)
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
    own = [value for module in block.modules() for value in vars(module).values()]
    generators = {v for v in tree_leaves((args, kwargs, own)) if isinstance(v, torch.Generator)}
    call = _Call(forward, keep, args, kwargs, [block, *generators])
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
    blocks = [block for block in of_type if block is not model and id(block) not in inside]
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
