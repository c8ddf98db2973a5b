"""Segment checkpointing: trade forward passes for activations.

    written here  nothing of torch.utils.checkpoint runs
    untouched     modes, hooks, training flags and the caller's data, after an error too
    errors        ValueError that names the bad value, before any change, unless stated otherwise

Source: Chen et al. (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    raise NotImplementedError


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
    raise NotImplementedError


def best_segments(num_layers: int) -> int:
    """The number of segments with the lowest peak for layers that each hold one activation.

        peak  `segments + ceil(num_layers / segments)` activations; any of several best

        >>> best_segments(16)
        4

    Raises:
        num_layers below 1.
    """
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


# untouched stub b2713638e91a
