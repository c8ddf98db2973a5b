"""Segment checkpointing: trade forward passes for activations.

    written here  nothing of torch.utils.checkpoint runs
    untouched     modes, hooks, training flags and the caller's data, after an error too
    errors        ValueError that names the bad value, before any change, unless stated otherwise

Source: Chen et al. (arXiv 1604.06174).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Part 1 and part 2


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, keeping the arguments instead of what is computed from them.

        runs          once in the call, once more in backward
        gradients     to the bit those of `function(*args)`, added to `.grad`, for arguments,
                      parameters and any other leaf that `function` uses; sums of several gradients
                      may round differently
        data          parameters get gradients even if no argument requires one; if nothing inside
                      requires one, backward does nothing
        kept          only the arguments until backward; in backward the activations of one
                      checkpoint at a time
        freed         tensor arguments in backward, everything else with the graph; without the
                      garbage collector
        random state  the second run draws the same numbers from torch's default generators; the
                      stream continues as after one run
        autocast      in the second run as in the first: off, or on with its dtype; backward keeps
                      its caller's autocast
        result        what `function` returns: a tensor, or a tuple or namedtuple of tensors and
                      other things; those that share no memory may be changed in place
        no_grad       under no_grad and inference_mode it is the plain call

        >>> checkpoint(block, x).sum().backward()

    Args:
        function: computes the same both times; side effects, such as batch norm's statistics,
            happen twice.
        args: tensors of any dtype; anything else is passed on unchanged.

    Raises:
        RuntimeError if an argument is changed in place: in the call if `function` does it, else in
        backward. TypeError for arguments with a tensor inside a list, tuple or dict, at any depth.

    Details:
        1. An output that the loss does not use gets no gradient, not even zeros.
        2. A checkpoint inside another one works, and lowers the peak further.
        3. After backward(retain_graph=True) a second backward works.
        4. An error in either run propagates; a failed second run leaves the random stream as it
           was.
        5. autograd.grad(), backward(inputs=...) and create_graph=True raise RuntimeError, or give
           right gradients and no others.
        6. Tensors nested deeper in the result, as in a list, raise TypeError or get right
           gradients.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    _refuse_hidden_tensors(args)
    # A Function whose inputs need no gradient is left out of the graph, and the parameters inside
    # with it. This empty tensor keeps it in.
    anchor = torch.empty(0, requires_grad=True)
    kinds: list[type] = []
    items = _Checkpoint.apply(anchor, function, kinds, *args)  # type: ignore[no-untyped-call]
    kind = kinds.pop()
    # A namedtuple is made of its items by _make.
    return getattr(kind, "_make", kind)(items) if issubclass(kind, tuple) else items[0]


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, function: Callable[..., Any], kinds: list[type], *args: Any
    ) -> tuple[Any, ...]:
        # No graph is built here: inside a Function's forward, gradients are off.
        ctx.set_materialize_grads(False)  # an unused output gets None, not zeros
        ctx.places = [n for n, arg in enumerate(args) if isinstance(arg, Tensor)]
        tensors = [args[place] for place in ctx.places]
        versions = [tensor._version for tensor in tensors]
        ctx.function, ctx.args = function, [None if isinstance(a, Tensor) else a for a in args]
        ctx.random, ctx.autocast = _RandomState(), _AutocastState()
        with ctx.autocast.restored():
            outputs = function(*args)
        if [tensor._version for tensor in tensors] != versions:
            raise RuntimeError("the checkpointed function changes an argument in place")
        # Not ctx.args = args: saved tensors are checked for changes in place, and are freed.
        ctx.save_for_backward(*tensors)
        kinds.append(type(outputs))
        items = outputs if isinstance(outputs, tuple) else (outputs,)
        _refuse_hidden_tensors(items)
        # Detached: a parameter that is returned as it is would get this node for its history.
        return tuple(item.detach() if isinstance(item, Tensor) else item for item in items)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Gradients are on here only under create_graph=True; those computed below have no graph.
        # The other check is private: torch has no public one for grad() and inputs=.
        if torch.is_grad_enabled() or not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a checkpoint needs backward(), without inputs= or create_graph=")
        args = list(ctx.args)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            # A new leaf: the graph that is built now ends here.
            args[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        with torch.enable_grad(), ctx.random.restored(), ctx.autocast.restored():
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and grad is not None
        ]
        if pairs:
            # backward, not grad: the parameters inside accumulate theirs.
            torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]
        return None, None, None, *(a.grad if isinstance(a, Tensor) else None for a in args)


def _refuse_hidden_tensors(values: Iterable[Any]) -> None:
    """Autograd does not look for tensors inside a list, tuple or dict."""
    for value in values:
        if not isinstance(value, Tensor) and _has_tensors(value):
            raise TypeError(f"a checkpoint cannot see the tensors inside a {type(value).__name__}")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


class _RandomState:
    """The state of torch's default generators, of every device: 16 bytes for a GPU."""

    def __init__(self) -> None:
        # Not only of the arguments' devices: a function may draw without any tensor argument.
        generators = (torch.default_generator, *torch.cuda.default_generators)
        self.states = [(generator, generator.get_state()) for generator in generators]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the state saved here; afterwards the stream continues where it was."""
        now = [(generator, generator.get_state()) for generator, _ in self.states]
        self.restore()
        try:
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)

    def restore(self) -> None:
        for generator, state in self.states:
            generator.set_state(state)


class _AutocastState:
    """Whether autocast is on, and with which dtype. Backward runs outside the caller's block."""

    def __init__(self) -> None:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self.settings = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in devices
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        # No cache of cast weights: in torch 2.6 a run with a graph can find a copy that was made
        # without one, and the weight gets no gradient (pytorch#112583).
        with ExitStack() as stack:
            for device, dtype, enabled in self.settings:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


# Part 3


def run_in_segments(layers: Sequence[nn.Module], x: Tensor, segments: int) -> Tensor:
    """The output of `layers` applied in order to `x`, in checkpointed segments.

        sizes      equal, or differing by one
        runs       each layer once, and again in backward, except in the last segment, whose
                   activations are needed at once
        gradients  those of the plain chain, as in `checkpoint`
        peak       one input per segment, and the activations of the largest segment

        >>> run_in_segments(layers, x, segments=4).sum().backward()

    Args:
        layers: each from a tensor to a floating-point tensor, not in place; one may appear twice.
        x: the first layer's input.
        segments: from 1 to the number of layers.

    Raises:
        no layers; segments out of range, with both numbers in the message.
    """
    starts = _starts(len(layers), segments)
    for start, stop in itertools.pairwise(starts):
        x = checkpoint(_Chain(layers[start:stop]), x)
    return _Chain(layers[starts[-1] :])(x)


def _starts(num_layers: int, segments: int) -> list[int]:
    """Where each segment begins."""
    if not 1 <= segments <= num_layers:
        raise ValueError(f"from 1 segment to one a layer: {segments} segments, {num_layers} layers")
    return [number * num_layers // segments for number in range(segments)]


class _Chain:
    """Layers applied in order."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def best_segments(num_layers: int) -> int:
    """The number of segments with the lowest peak for layers that each hold one activation.

        peak  `segments + ceil(num_layers / segments)` activations; any of several best

        >>> best_segments(16)
        4

    Raises:
        num_layers below 1.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    return min(range(1, num_layers + 1), key=lambda n: n + -(-num_layers // n))


# Part 4, the stretch


def fewest_extra_steps(num_layers: int, snapshots: int) -> int:
    """The fewest layer runs without a graph that backward through `num_layers` layers needs, if
    at most `snapshots` layer inputs are kept at a time.

        steps      from the last layer to the first: to reach a layer's input, all layers from a
                   snapshot up to it run without a graph; then the layer runs once with one, which
                   does not count
        snapshots  the first layer's input is one; the input of the layer that runs with a graph
                   is no snapshot

        >>> fewest_extra_steps(10, snapshots=3)
        15

    Raises:
        num_layers or snapshots below 1.
    """
    _check_schedule(num_layers, snapshots)
    # Algorithm 799 (revolve) has this closed form; _next_snapshot is the schedule behind it.
    repeats = _repeats(num_layers, snapshots)
    return repeats * num_layers - math.comb(snapshots + repeats, snapshots + 1)


def _repeats(num_layers: int, snapshots: int) -> int:
    """How often a layer runs without a graph, at most."""
    # With at most r such runs of each, comb(snapshots + r, r) layers are possible.
    repeats = 0
    while math.comb(snapshots + repeats, repeats) < num_layers:
        repeats += 1
    return repeats


def _next_snapshot(num_layers: int, snapshots: int) -> int:
    """How many of two or more layers to run before the next snapshot is kept.

    The layers behind it are done with one snapshot fewer. After that its place is free again, for
    the layers before it.
    """
    if snapshots == 1:
        return num_layers - 1  # every layer's input is reached from the start
    if snapshots >= num_layers - 1:
        return 1  # every input can be kept: no layer runs twice

    def runs(n: int) -> int:
        behind = fewest_extra_steps(num_layers - n, snapshots - 1)
        return n + behind + fewest_extra_steps(n, snapshots)

    return min(range(1, num_layers), key=runs)


def _check_schedule(num_layers: int, snapshots: int) -> None:
    if num_layers < 1:
        raise ValueError(f"at least 1 layer is needed, not {num_layers}")
    if snapshots < 1:
        raise ValueError(f"at least 1 snapshot is needed, not {snapshots}")


def backward_with_snapshots(
    layers: Sequence[nn.Module],
    x: Tensor,
    loss_fn: Callable[[Tensor], Tensor],
    snapshots: int,
) -> Tensor:
    """Forward and backward through `layers` with at most `snapshots` layer inputs kept at a time.

        gradients     those of `loss_fn(layers(x)).backward()`, as in `checkpoint`, also for what
                      `x` was computed from
        runs          layers at most `len(layers) + fewest_extra_steps(...)` times, `loss_fn` once
        random state  as in `checkpoint`: a layer draws the same in each run, and the stream
                      continues as after one
        peak          `snapshots` activations, and one layer's forward and backward with its input
        freed         afterwards only the loss is left

        >>> loss = backward_with_snapshots(layers, x, loss_fn, snapshots=3)

    Args:
        layers: as for run_in_segments.
        x: the first layer's input, which counts as a snapshot.
        loss_fn: from the last output to a scalar; may have parameters.
        snapshots: at least 1; may exceed the number of layers.

    Returns:
        The loss, a scalar without a graph.

    Raises:
        no layers; snapshots below 1.

    Details:
        1. Layers and `loss_fn` run under the caller's autocast.
        2. It works for 1,200 layers with 1,200 snapshots.
    """
    _check_schedule(len(layers), snapshots)
    kept = [_Snapshot(0, x, _RandomState())]
    grad = None  # of the loss with respect to the input of the layer done last
    with _AutocastState().restored():
        for number in reversed(range(len(layers))):
            with ExitStack() as stack:
                if number < len(layers) - 1:  # a repeated run; loss and backward are outside
                    stack.enter_context(kept[-1].random.restored())
                value = _advance(layers, kept, number, snapshots)
                leaf = value.detach().requires_grad_(number > 0 or x.requires_grad)
                del value
                out = layers[number](leaf)
            if number == len(layers) - 1:
                out = loss_fn(out)
                loss = out.detach().clone()  # a view would keep the output
                out.backward()
            elif grad is not None and out.requires_grad:  # a layer may detach
                out.backward(grad)
            grad = leaf.grad
            del out, leaf  # the next runs need the place
    if grad is not None:
        x.backward(grad)
    return loss


class _Snapshot(NamedTuple):
    """The input of layer `number`, and the random state in which the layer was reached."""

    number: int
    value: Tensor
    random: _RandomState


def _advance(
    layers: Sequence[nn.Module], kept: list[_Snapshot], number: int, snapshots: int
) -> Tensor:
    """The input of layer `number`, run from the newest snapshot; keeps more where there is room."""
    at, x, _ = kept[-1]
    while at < number:
        stop = at + _next_snapshot(number + 1 - at, snapshots - len(kept) + 1)
        with torch.no_grad():
            x = _Chain(layers[at:stop])(x)
        at = stop
        if len(kept) < snapshots:
            kept.append(_Snapshot(at, x, _RandomState()))
    if kept[-1].number == number:
        kept.pop()  # not needed again: its place is free
    return x
