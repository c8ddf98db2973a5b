"""A right answer of another shape: taps in the graph, and an explicit list of actions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import pairwise
from math import comb, isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

# What a forward pass depends on besides its arguments


def _generators() -> list[torch.Generator]:
    """The cpu's generator and those of all CUDA devices."""
    return [torch.default_generator, *torch.cuda.default_generators]


class _Cursor:
    """A position in the random streams that a rerun draws from, and that moves on with it."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators
        self.states = [generator.get_state() for generator in generators]

    def copy(self) -> _Cursor:
        twin = object.__new__(_Cursor)
        twin.generators, twin.states = self.generators, list(self.states)
        return twin

    def _exchange(self) -> None:
        """The generators' states and this cursor's change places."""
        for at, generator in enumerate(self.generators):
            state, self.states[at] = self.states[at], generator.get_state()
            generator.set_state(state)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()


@contextmanager
def _graphless() -> Iterator[None]:
    """No graph, and no weight cast without one left in autocast's cache for those who need one."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _autocast_as_now() -> list[Callable[[], torch.autocast]]:
    return [
        partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")
    ]


# Where a rerun's graph ends and begins


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _anchor() -> Tensor:
    """An input that makes a Function's outputs require a gradient where no other input does."""
    return torch.empty(0, device="cpu", requires_grad=True)


class _Tap(torch.autograd.Function):
    """An alias of a tensor at which the graph ends; what gradient arrives is put into `found`.

    A leaf's .grad would do but for its layout: AccumulateGrad copies a gradient that is strided
    otherwise than the leaf, and the operations below would then sum in another order.
    """

    @staticmethod
    def forward(ctx: Any, found: dict[int, Tensor], key: int, anchor: Tensor, of: Tensor) -> Tensor:
        ctx.found, ctx.key = found, key
        ctx.set_materialize_grads(False)
        return of.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.found[ctx.key] = grad
        return None, None, None, None


def _tap(found: dict[int, Tensor], key: int, of: Tensor) -> Tensor:
    with torch.enable_grad():
        return _Tap.apply(found, key, _anchor(), of.detach())


# Part 1 and part 2


class _Place(NamedTuple):
    """Stands for the tensor of that number among the arguments kept."""

    number: int


class _Rerun:
    """All that the second run needs, but for the tensors themselves: autograd keeps those."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.tensors: list[Tensor] = []
        self.args: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                self.tensors.append(arg)
                arg = _Place(len(self.tensors) - 1)
            self.args.append(arg)
        self.function = function
        self.cursor = _Cursor(_generators())
        self.autocast = _autocast_as_now()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        args = [tensors[arg.number] if type(arg) is _Place else arg for arg in self.args]
        with ExitStack() as stack:
            for autocast in self.autocast:
                stack.enter_context(autocast())
            stack.enter_context(self.cursor.copy().drawing())
            stack.enter_context(torch.enable_grad())
            return self.function(*args)


def _differentiable_outputs(result: Any) -> list[Tensor]:
    return [
        out for out in (result if isinstance(result, tuple) else [result]) if _differentiable(out)
    ]


class _Recompute(torch.autograd.Function):
    """Ties outputs that were computed without a graph to the arguments."""

    @staticmethod
    def forward(
        ctx: Any, rerun: _Rerun, outputs: list[Tensor], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rerun = rerun
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for out in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpoint: only backward() without inputs= reaches the parameters inside, "
                "torch.autograd.grad() and backward(inputs=...) do not"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("checkpoint: create_graph=True, but there is no second derivative")
        kept = ctx.saved_tensors  # raises if one was changed in place
        needed = ctx.needs_input_grad[3:]
        found: dict[int, Tensor] = {}
        inner = [
            _tap(found, at, tensor) if need else tensor.detach()
            for at, (tensor, need) in enumerate(zip(kept, needed, strict=True))
        ]
        # Outputs, not edges: torch 2.6 frees a nested checkpoint's node with its last output.
        roots = [
            (out, grad)
            for out, grad in zip(_differentiable_outputs(ctx.rerun(inner)), grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        del inner
        if roots:
            outputs, seeds = zip(*roots, strict=True)
            torch.autograd.backward(outputs, seeds)
        return None, None, None, *(found.get(at) for at in range(len(kept)))


def _all_in_sight(how: str, items: Iterable[Any]) -> None:
    """Raises TypeError if a list, tuple or dict among the items has a tensor somewhere inside."""
    for item in items:
        if isinstance(item, (list, tuple, dict)):
            todo: list[Any] = [item]
            while todo:
                part = todo.pop()
                if isinstance(part, Tensor):
                    kind = type(item).__name__
                    raise TypeError(f"checkpoint: a tensor inside a {kind} was {how}")
                if isinstance(part, (list, tuple, dict)):
                    todo += part.values() if isinstance(part, dict) else part


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    _all_in_sight("given", args)
    rerun = _Rerun(function, args)
    tensors, rerun.tensors = rerun.tensors, []
    versions = [tensor._version for tensor in tensors]
    with _graphless():
        result = function(*args)
    if versions != [tensor._version for tensor in tensors]:
        raise RuntimeError(
            "checkpoint: the function changed an argument in place, "
            "its second run would see other values"
        )
    _all_in_sight("returned", result if isinstance(result, tuple) else [result])
    outputs = _differentiable_outputs(result)
    if not outputs:
        return result
    tied = iter(_Recompute.apply(rerun, outputs, _anchor(), *tensors))
    if not isinstance(result, tuple):
        return next(tied)
    items = [next(tied) if _differentiable(item) else item for item in result]
    make = getattr(type(result), "_make", type(result))  # named tuples, torch.return_types
    return make(items)


# Part 3


def run_in_segments(layers: Sequence[nn.Module], x: Tensor, segments: int) -> Tensor:
    count = len(layers)
    if count < 1:
        raise ValueError(f"no layers: {count} given")
    if not 1 <= segments <= count:
        raise ValueError(f"segments must be from 1 to the {count} layers, not {segments}")
    # Cuts rounded up put the longer segments first: what they hold in the backward pass comes
    # when few inputs are left.
    cuts = [-(-count * at // segments) for at in range(segments + 1)]
    for start, stop in pairwise(cuts[:-1]):
        x = checkpoint(partial(_apply_all, layers[start:stop]), x)
    return _apply_all(layers[cuts[-2] :], x)


def _apply_all(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    return reduce(lambda value, layer: layer(value), layers, x)


def best_segments(num_layers: int) -> int:
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    # s + ceil(n / s) >= s + n / s >= 2 sqrt(n), and s = ceil(sqrt(n)) reaches ceil(2 sqrt(n)):
    # the other term is s - 1 for n up to s * (s - 1), and s from there to s * s.
    return 1 + isqrt(num_layers - 1)


# Part 4


def fewest_extra_steps(num_layers: int, snapshots: int) -> int:
    _check_plan(num_layers, snapshots)
    # Layer by layer, C(s + q, s) - C(s + q - 1, s) of them run q times at most and no fewer, until
    # all are used up: the sum over q is r * n - C(s + r, s + 1).
    repeats = _repeats(num_layers, snapshots)
    return repeats * num_layers - comb(snapshots + repeats, snapshots + 1)


def _check_plan(num_layers: int, snapshots: int) -> None:
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    if snapshots < 1:
        raise ValueError(f"snapshots must be at least 1, not {snapshots}")


def _repeats(num_layers: int, snapshots: int) -> int:
    """How often a layer runs at most without a graph: the least r with C(s + r, s) >= n."""

    def reach(repeats: int) -> int:
        return comb(snapshots + repeats, snapshots)

    bound = 1
    while reach(bound) < num_layers:
        bound *= 2
    return bisect_left(range(bound), num_layers, key=reach)


def _first_stretch(num_layers: int, snapshots: int) -> int:
    """How far from the snapshot at the start of two or more layers to the next, at the least cost.

    With r repeats C(s + r, s) = C(s + r - 1, s) + C(s + r - 1, s - 1) layers can be done: the first
    term's before the next snapshot, with a repeat fewer, the second's after it, with a snapshot
    fewer. Any stretch is optimal that leaves neither part more than that, nor so little that it
    would need one repeat less than that; this is the longest.
    """
    repeats = _repeats(num_layers, snapshots)
    most = comb(snapshots + repeats - 1, snapshots)
    least_after = comb(snapshots + repeats - 2, snapshots - 1)
    return min(most, num_layers - least_after)


# What the machine that runs a schedule can do. It holds one value at hand, a layer's input.
KEEP = "keep"  # put the input of layer i, at hand, into a snapshot
LOAD = "load"  # take the snapshot of layer i in hand, and keep it
TAKE = "take"  # the same, and give its place up
STEP = "step"  # run layer i without a graph: its output is at hand
TURN = "turn"  # run layer i with a graph and backward; nothing is at hand


def _schedule(num_layers: int, snapshots: int) -> list[tuple[str, int]]:
    """The actions of a backward pass with the fewest steps, with the input of layer 0 at hand."""
    actions: list[tuple[str, int]] = []
    # Stretches of layers still to be turned, the next one on top: start, stop, places (that of the
    # start's snapshot among them), and whether the start is already in its snapshot.
    ahead = [(0, num_layers, snapshots, False)]
    while ahead:
        start, stop, places, kept = ahead.pop()
        if stop - start == 1:
            actions += [(TAKE, start)] if kept else []
            actions += [(TURN, start)]
            continue
        actions += [(LOAD if kept else KEEP, start)]
        middle = start + _first_stretch(stop - start, places)
        actions += [(STEP, at) for at in range(start, middle)]
        ahead += [(start, middle, places, True), (middle, stop, places - 1, False)]
    return actions


def backward_with_snapshots(
    layers: Sequence[nn.Module],
    x: Tensor,
    loss_fn: Callable[[Tensor], Tensor],
    snapshots: int,
) -> Tensor:
    count = len(layers)
    if count < 1:
        raise ValueError(f"no layers: {count} given")
    _check_plan(count, snapshots)
    sweep = _Sweep(layers, x, loss_fn)
    for action, at in _schedule(count, min(snapshots, count)):
        getattr(sweep, action)(at)
    return sweep.loss


class _Snapshot(NamedTuple):
    value: Tensor
    cursor: _Cursor


class _Sweep:
    """The machine for a schedule's actions."""

    def __init__(
        self, layers: Sequence[nn.Module], x: Tensor, loss_fn: Callable[[Tensor], Tensor]
    ) -> None:
        self.layers, self.x, self.loss_fn = layers, x, loss_fn
        self.last = len(layers) - 1
        self.generators = _generators()
        self.snapshots: dict[int, _Snapshot] = {}
        self.value: Tensor | None = x
        self.cursor: _Cursor | None = None  # none while layers run for the first time
        self.grad: Tensor | None = None  # of the output of the layer to be turned next
        self.loss: Any = None

    def keep(self, at: int) -> None:
        cursor = _Cursor(self.generators) if self.cursor is None else self.cursor.copy()
        self.snapshots[at] = _Snapshot(self.value, cursor)

    def load(self, at: int) -> None:
        self.value, cursor = self.snapshots[at]
        self.cursor = cursor.copy()

    def take(self, at: int) -> None:
        self.load(at)
        del self.snapshots[at]

    def step(self, at: int) -> None:
        with _graphless():
            self.value = self._run(at, self.value)

    def turn(self, at: int) -> None:
        found: dict[int, Tensor] = {}
        # The first layer's graph goes on to what x was computed from.
        value, self.value = self.value, None
        if at > 0:
            value = _tap(found, at, value) if _differentiable(value) else value
        with torch.enable_grad():
            output = self._run(at, value)
            del value
            if at == self.last:
                output = self.loss_fn(output)
                self.loss = output.detach().clone()  # on memory of its own
        if at == self.last:
            output.backward()
        elif self.grad is not None and output.requires_grad:
            # Of a view: torch 2.6 frees the node of an autograd.Function with its last output.
            with torch.enable_grad():
                edge, grad = get_gradient_edge(output.view_as(output)), self.grad
            del output
            self.grad = None
            torch.autograd.backward((edge,), (grad,))
        self.grad = found.get(at)

    def _run(self, at: int, value: Tensor) -> Tensor:
        if self.cursor is None:
            return self.layers[at](value)
        with self.cursor.drawing():
            return self.layers[at](value)
