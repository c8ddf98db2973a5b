"""Segment checkpointing: trade forward passes for activations, without torch.utils.checkpoint.

Four parts: a checkpoint as an autograd.Function that gives every parameter its gradient, what makes
it right (random state, autocast, odd arguments and outputs), a chain of layers in segments, and the
schedule with the fewest forward steps when only so many snapshots may be kept.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Griewank and
Walther, Algorithm 799: revolve (ACM TOMS 26, 2000); torch.utils.checkpoint for the behaviour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Part 1 and part 2


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, keeping the arguments instead of what is computed from them.

    The forward pass runs without a graph. The backward pass runs `function` again, with a graph,
    and then backward through it. Loss and gradients are those of `function(*args)` to the bit. Only
    the sum of several gradients of one tensor may be formed in another order, and for an argument
    under autocast in another dtype. What `function` changes besides, such as the statistics of
    batch norm, it changes twice.

    Part 1. `function` takes tensors and returns one. Gradients reach the arguments that require
    them and everything that `function` uses besides: the parameters of a module, and any other
    leaf. They do so even where no argument requires one, as the first layer's input does not; only
    under torch.no_grad() and torch.inference_mode() there is no graph at all, and one forward pass.
    A function that is frozen stops nothing. A tensor may be given twice. Until the backward pass is
    over the arguments are kept, and nothing that was computed from them.

    Part 2. What makes the second run equal the first:

    - the random state of the cpu and of the arguments' CUDA devices: dropout drops the same, and
      the stream after the backward pass goes on as if nothing had run twice;
    - autocast as it was in the forward pass: on or off, its dtype, for cpu and cuda, and its cache
      (a weight that is used twice is cast once); the backward pass is outside of it;
    - arguments that are no tensors are handed on as they are; tensors require a gradient where
      they did, and integer tensors have none;
    - `function` may return a tuple; items that are no tensors come through, an output that the
      loss does not use gets no gradient; a parameter or buffer may be among them, and stays what
      it is;
    - a checkpoint may stand inside the function of another;
    - backward with retain_graph=True may be called again;
    - an error in either run reaches the caller; the random stream goes on as if there had been no
      second run.

    Tensors that need a gradient and are computed by other operations must be arguments themselves,
    not hidden in a list or used from outside.

    Raises:
        RuntimeError: an argument was changed in place, by `function` (raised by the forward pass)
            or later (raised by the backward pass): the second run would see other values. Also
            what would come out wrong without a word, if its path leads through the checkpoint:
            torch.autograd.grad() and backward() with inputs= (known by
            torch.autograd._is_checkpoint_valid()), and a second derivative (raised when it is
            taken, or before by backward() with create_graph=True). Unless their gradients are
            right.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    # A Function whose inputs need no gradient is left out of the graph, and the parameters inside
    # with it. This empty tensor keeps it in.
    anchor = torch.empty(0, requires_grad=True)
    return _Checkpoint.apply(anchor, function, *args)  # type: ignore[no-untyped-call]


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[..., Any], *args: Any) -> Any:
        # No graph is built here: inside a Function's forward, gradients are off.
        ctx.set_materialize_grads(False)  # an output that is not used: None, and not zeros
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        versions = [tensor._version for tensor in tensors]
        ctx.function, ctx.args = function, [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.random, ctx.autocast = _RandomState(tensors), _AutocastState()
        with ctx.autocast.restored(keep_casts=False):
            outputs = function(*args)
        if [tensor._version for tensor in tensors] != versions:
            raise RuntimeError("the checkpointed function changes an argument in place")
        # A parameter that is returned as it is would get this node for its history.
        outputs = _detached(outputs)
        # Not ctx.args = args: saved tensors are checked for changes in place, and are freed.
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Gradients are on here only for create_graph=True, and the ones below have no graph.
        if torch.is_grad_enabled() or not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a checkpoint needs backward(), without inputs= or create_graph=")
        args = list(ctx.args)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            # A leaf of its own: the graph that is built now ends here.
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
        return None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return tuple(_detached(output) for output in outputs)
    return outputs.detach() if isinstance(outputs, Tensor) else outputs


class _RandomState:
    """The state of the random number generators that a function on these tensors may use."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.devices = sorted({t.get_device() for t in tensors if t.is_cuda})
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was; afterwards as it is now, so that the stream goes on."""
        with torch.random.fork_rng(self.devices):
            self.restore()
            yield

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)


class _AutocastState:
    """Whether autocast is on, and with which dtype. Backward runs outside the caller's block."""

    def __init__(self) -> None:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self.settings = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in devices
        ]
        self.caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self, *, keep_casts: bool = True) -> Iterator[None]:
        # Autocast keeps the weights that it has cast until its block ends. In torch 2.6 one that
        # was cast without a graph is then found by a run that needs the graph, and gets no gradient
        # (pytorch#112583). So a run without a graph may leave none behind.
        caches = self.caches and keep_casts
        with ExitStack() as stack:
            for device, dtype, enabled in self.settings:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=caches))
            yield


# Part 3


def run_in_segments(layers: Sequence[nn.Module], x: Tensor, segments: int) -> Tensor:
    """The output of `layers` applied in order to `x`, in `segments` segments of equal size.

    Sizes differ by one at most where the division leaves a rest. Every segment but the last is
    checkpointed: the last one's activations are what the backward pass needs first, so to drop
    them would only cost a forward pass. Each layer runs once in the forward pass and, but for
    those of the last segment, once more in the backward pass; once in all under torch.no_grad().

    Peak above the baseline, with the gradients in place: one input for each segment and the
    activations of the largest one.

    Args:
        layers: each from a tensor to a tensor, without changing its input in place.
        x: the input of the first; it need not require a gradient.
        segments: from 1 (nothing is checkpointed) to the number of layers.

    Raises:
        ValueError: no layers; segments below 1 or above the number of layers. Names the numbers.
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

    The peak is `segments + ceil(num_layers / segments)` activations: one kept input a segment, and
    the largest segment's own. It is lowest near sqrt(num_layers), and about 2 * sqrt(num_layers)
    there. Of several best numbers any may be returned.

    Raises:
        ValueError: num_layers below 1; names it.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    return min(range(1, num_layers + 1), key=lambda n: n + -(-num_layers // n))


# Part 4


def fewest_extra_steps(num_layers: int, snapshots: int) -> int:
    """How many layer forwards are needed, besides the one with a graph that each layer has, to run
    backward through `num_layers` layers when `snapshots` layer inputs may be kept at a time.

    The first layer's input is one of the snapshots. A snapshot may be given up and its place used
    again. With one snapshot, every layer is reached from the start: 45 for 10 layers; with as many
    as layers, each but the last runs once: 9. In between t(10, 2) = 20, t(24, 3) = 61 and
    t(100, 5) = 316.

    Raises:
        ValueError: num_layers or snapshots below 1; names it.
    """
    _check_schedule(num_layers, snapshots)
    return _extra_steps(num_layers, snapshots)


def _extra_steps(length: int, snapshots: int) -> int:
    # If no layer runs more than r times besides, comb(snapshots + r, r) layers are within reach.
    # Algorithm 799 has this sum in closed form; _cost is the choice behind it.
    repeats = 0
    while math.comb(snapshots + repeats, repeats) < length:
        repeats += 1
    return repeats * length - math.comb(snapshots + repeats, snapshots + 1)


def _cost(length: int, snapshots: int, split: int) -> int:
    # Advance to the split and keep a snapshot there. What lies behind it is done with one fewer,
    # and when that is finished the snapshot is free again for what lies before it.
    return split + _extra_steps(length - split, snapshots - 1) + _extra_steps(split, snapshots)


def _best_split(length: int, snapshots: int) -> int:
    return min(range(1, length), key=lambda split: _cost(length, snapshots, split))


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

    Gradients are accumulated as by `loss_fn(layers(x)).backward()`, to the bit: into the parameters
    of the layers and of `loss_fn` and, if `x` requires one, into `x` or what it was computed from.
    (Where a tensor gets several, they may be added in another order.) Layers run
    `len(layers) + fewest_extra_steps(len(layers), snapshots)` times in all, `loss_fn` once. Layers
    with dropout drop the same each time they run, and the random stream goes on afterwards as if
    every layer had run once. Other things that a layer changes, such as the statistics of batch
    norm, it changes each time. It may be called under autocast.

    Peak above the baseline, with the gradients in place: `snapshots` activations, and what one
    layer's forward and backward hold. Afterwards nothing is held but the loss.

    Args:
        layers: each from a tensor to a tensor, without changing its input in place.
        x: the input of the first; it counts as a snapshot.
        loss_fn: from the last layer's output to a scalar.
        snapshots: at least 1; more than there are layers is as good as one a layer.

    Returns:
        The loss, a scalar without a graph.

    Raises:
        ValueError: no layers, or snapshots below 1; names the number. Nothing has been run.
    """
    _check_schedule(len(layers), snapshots)
    sweep = _Sweep(layers, loss_fn)
    with _AutocastState().restored(keep_casts=False):
        sweep.reverse(0, len(layers), x, _RandomState([x]), snapshots)
    if x.requires_grad:
        torch.autograd.backward(x, sweep.grad)
    sweep.random.restore()
    return sweep.loss


class _Sweep:
    """The backward pass on its way from the last layer to the first."""

    loss: Tensor
    random: _RandomState  # after every layer has run once
    grad: Tensor | None  # of the loss by the input of the layer that was done last

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Callable[[Tensor], Tensor]) -> None:
        self.layers, self.loss_fn = layers, loss_fn

    def reverse(
        self, start: int, stop: int, x: Tensor, random: _RandomState, snapshots: int
    ) -> None:
        """Backward through layers[start:stop], from the input `x` of layer `start`, a snapshot."""
        while stop - start > 1:
            # With no snapshot left to place, every layer is reached from x.
            split = _best_split(stop - start, snapshots) if snapshots > 1 else stop - start - 1
            random.restore()
            # The new snapshot lives as long as this call: then its place is free for what lies
            # before it.
            self.reverse(
                start + split, stop, *self._advance(start, start + split, x), snapshots - 1
            )
            stop = start + split
        random.restore()
        self._backward(start, x)

    def _advance(self, start: int, stop: int, x: Tensor) -> tuple[Tensor, _RandomState]:
        with torch.no_grad():
            for layer in self.layers[start:stop]:
                x = layer(x)
        return x, _RandomState([x])

    def _backward(self, number: int, x: Tensor) -> None:
        """Forward with a graph, and backward, through one layer."""
        leaf = x.detach().requires_grad_(number > 0 or x.requires_grad)
        out = self.layers[number](leaf)
        if number == len(self.layers) - 1:
            loss = self.loss_fn(out)
            self.loss, self.random = loss.detach(), _RandomState([out])
            loss.backward()
        elif out.requires_grad:  # not so for a frozen first layer
            out.backward(self.grad)
        self.grad = leaf.grad
