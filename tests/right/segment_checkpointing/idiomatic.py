"""A right answer from the stub alone, in torch's own idioms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb, isqrt
from typing import Any

import torch
from torch import Tensor, nn

# What all parts need: runs without a graph, runs that repeat an earlier one, and stand-ins for
# tensors, at which a backward pass ends


@contextlib.contextmanager
def _without_graph() -> Iterator[None]:
    """No graph, and no use of autocast's cache of cast weights: a cast made here has no graph, and
    a release whose cache does not mind (2.13's does) would give the weight no gradient from a later
    use in the same autocast region.
    """
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Raises RuntimeError if one of the arguments was changed in place inside."""
    versions = [tensor._version for tensor in tensors]
    yield
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                f"an argument of shape {tuple(tensor.shape)} was changed in place by the function, "
                "which has to run again and would see other values"
            )


class _RandomState:
    """The random state of the cpu and of all CUDA devices, as it is when this is made."""

    def __init__(self) -> None:
        self.devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


class _AutocastState:
    """Autocast for cpu and cuda, as it is when this is made."""

    def __init__(self) -> None:
        self.settings = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in ("cpu", "cuda")
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for settings in self.settings:
                stack.enter_context(torch.autocast(**settings))
            yield


# Part 1 and part 2


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor among arguments or outputs that are kept without their tensors."""

    index: int


def _take_out(items: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    """`items` with a slot for each tensor, and the tensors."""
    template: list[Any] = []
    tensors: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            tensors.append(item)
            item = _Slot(len(tensors) - 1)
        template.append(item)
    return template, tensors


def _put_in(template: Iterable[Any], tensors: Sequence[Tensor]) -> list[Any]:
    return [tensors[item.index] if isinstance(item, _Slot) else item for item in template]


def _holds_tensors(item: Any) -> bool:
    parts = item.values() if isinstance(item, dict) else item
    return isinstance(item, Tensor) or (
        isinstance(item, (list, tuple, dict)) and any(map(_holds_tensors, parts))
    )


def _none_hidden(items: Iterable[Any]) -> None:
    for item in items:
        if not isinstance(item, Tensor) and _holds_tensors(item):
            raise TypeError(f"checkpoint() does not look for tensors in a {type(item).__name__}")


class _Call:
    """A function and its arguments without the tensors, to be run twice under equal conditions."""

    def __init__(self, function: Callable[..., Any], args: list[Any]) -> None:
        self.function = function
        self.args = args
        self.random = _RandomState()
        self.autocast = _AutocastState()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self.function(*_put_in(self.args, tensors))


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


class _Checkpoint(torch.autograd.Function):
    """From the tensors among the arguments to those among the outputs.

    `anchor` requires a gradient, so that the outputs do and backward() is called, for the sake of
    the parameters, where no argument does. What is no tensor leaves by `rest`.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, rest: list[Any], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an output that is not used has no gradient, not zeros
        with _without_graph(), _unchanged(tensors):
            result = call(tensors)
        _none_hidden(_as_tuple(result))
        ctx.save_for_backward(*tensors)  # and their versions: later changes raise in backward()
        template, outputs = _take_out(_as_tuple(result))
        rest.append((type(result), template))
        # An output may be an argument, or a parameter, which must not get this node as its history.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpoint() needs backward() without inputs=: in torch.autograd.grad(), or with "
                "inputs=, the parameters inside could not get their gradients"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("checkpoint() has no second derivative (create_graph=True)")

        call: _Call = ctx.call
        needed = ctx.needs_input_grad[3:]
        leaves = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), call.random.again(), call.autocast.again():
            _, outputs = _take_out(_as_tuple(call(leaves)))
        roots = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        del outputs
        if roots:
            # Outside of the contexts above: a backward pass runs under what is set around it.
            torch.autograd.backward(*zip(*roots, strict=True))
        return None, None, None, *(leaf.grad for leaf in leaves)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    _none_hidden(args)
    template, tensors = _take_out(args)
    rest: list[Any] = []
    anchor = torch.empty(0, requires_grad=True)
    outputs = _Checkpoint.apply(_Call(function, template), rest, anchor, *tensors)
    kind, template = rest.pop()
    items = _put_in(template, outputs)
    if not issubclass(kind, tuple):
        return items[0]
    return kind._make(items) if hasattr(kind, "_make") else kind(items)  # a namedtuple stays one


# Part 3


def _check_layers(layers: Sequence[nn.Module]) -> None:
    if len(layers) == 0:
        raise ValueError("no layers: their number is 0")


def _run(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def run_in_segments(layers: Sequence[nn.Module], x: Tensor, segments: int) -> Tensor:
    _check_layers(layers)
    if not 1 <= segments <= len(layers):
        raise ValueError(f"segments is {segments}, not 1 to {len(layers)}, the number of layers")
    # The longer ones first: the last segment runs while the inputs of all of them are kept.
    size, longer = divmod(len(layers), segments)
    start = 0
    for segment in range(segments - 1):
        stop = start + size + (segment < longer)
        x = checkpoint(_run, layers[start:stop], x)
        start = stop
    return _run(layers[start:], x)


def best_segments(num_layers: int) -> int:
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}, below 1")
    return isqrt(num_layers - 1) + 1  # sqrt(num_layers), rounded up


# Part 4
#
# With `c` snapshots and every layer run at most `r` times without a graph, comb(c + r, c) layers
# can be run backward through (Griewank and Walther).


def _most_runs(num_layers: int, snapshots: int) -> int:
    """How often the layer that is run most is run without a graph, in the best schedule."""
    runs = 0
    while comb(snapshots + runs, snapshots) < num_layers:
        runs += 1
    return runs


def _next_snapshot(num_layers: int, snapshots: int) -> int:
    """How many layers to run before the next snapshot, the input of the first being one.

    The layers before it will have all `snapshots`, those after it one less. Running the former for
    it adds one run to theirs, so it is best placed where they then need `runs - 1` and the latter
    `runs`, which binds both numbers from both sides; this is the smallest that fits.
    """
    runs = _most_runs(num_layers, snapshots)
    fewest_before = comb(snapshots + runs - 2, snapshots) if runs > 1 else 1
    most_after = comb(snapshots - 1 + runs, snapshots - 1)
    return max(fewest_before, num_layers - most_after)


def fewest_extra_steps(num_layers: int, snapshots: int) -> int:
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}, below 1")
    if snapshots < 1:
        raise ValueError(f"snapshots is {snapshots}, below 1")
    runs = _most_runs(num_layers, snapshots)
    return runs * num_layers - comb(snapshots + runs, snapshots + 1)


@dataclass(frozen=True)
class _Snapshot:
    """The input of the layer at `index`, and the random state from which that layer ran."""

    index: int
    value: Tensor
    random: _RandomState


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def backward_with_snapshots(
    layers: Sequence[nn.Module],
    x: Tensor,
    loss_fn: Callable[[Tensor], Tensor],
    snapshots: int,
) -> Tensor:
    _check_layers(layers)
    if snapshots < 1:
        raise ValueError(f"snapshots is {snapshots}, below 1")
    snapshots = min(snapshots, len(layers))
    # A snapshot's random state is all that a run from it needs: the layers draw in order.
    kept = [_Snapshot(0, x.detach(), _RandomState())]
    loss: Tensor | None = None
    grad: Tensor | None = None  # of the output of layer `last`
    for last in reversed(range(len(layers))):
        start = kept[-1]
        # The first time, the layers draw from the stream as it is; then they draw the same again.
        with contextlib.nullcontext() if loss is None else start.random.again():
            index, value = start.index, start.value
            with _without_graph():
                while index < last:
                    free = snapshots - len(kept)
                    stop = index + _next_snapshot(last + 1 - index, free + 1)
                    while index < stop:
                        index, value = index + 1, layers[index](value)
                    if free:
                        kept.append(_Snapshot(index, value, _RandomState()))
            if kept[-1].index == last:
                kept.pop()
            del start

            leaf = value.detach().requires_grad_(
                _differentiable(value) if last else x.requires_grad
            )
            del value
            with torch.enable_grad():
                output = layers[last](leaf)
                if loss is None:
                    output = loss_fn(output)
                    loss = output.detach().clone()  # not a view of something large
        if last == len(layers) - 1:
            output.backward()
        elif grad is not None and output.requires_grad:
            output.backward(grad)
        del output
        grad = leaf.grad
        del leaf
    if grad is not None:
        x.backward(grad)
    assert loss is not None
    return loss
