"""Segment checkpointing: trade forward passes for activations.

    written here  nothing of torch.utils.checkpoint runs
    untouched     modes, hooks, training flags and the caller's data, after an error too; no seed
                  is set
    errors        ValueError that names the offending value, before any change, unless it says
                  otherwise

Source: Chen et al. (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

# Part 1 and part 2


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, keeping the arguments instead of what is computed from them.

        runs          once in the call, once more in backward, as far as needed
        gradients     to the bit those of `function(*args)`, added to `.grad`: of arguments that
                      require one, of parameters and other leaves that `function` uses; several for
                      one tensor add up in any order and precision
        data          parameters get theirs even if no argument requires one; a function without
                      gradients is no error, not even in backward
        kept          until backward the arguments, and nothing computed from them; then one
                      checkpoint's inside at a time
        freed         arguments in backward, the rest with the results; without the garbage
                      collector
        random state  the second run draws what the first drew from torch's default generators; the
                      stream goes on as after one run
        autocast      in the second run as in the first: off, or on with its dtype; backward runs
                      in the caller's
        result        what `function` returns: a tensor, a tuple, namedtuple or torch.return_types
                      of tensors and other things; tensors may change in place
        no_grad       under no_grad and inference_mode it is the plain call

        >>> checkpoint(block, x).sum().backward()

    Args:
        function: computes the same in both runs and under no_grad; what it changes, such as
            batch norm's statistics, may change twice.
        args: dense tensors of any dtype, not made under inference_mode; the second run may get
            other tensor objects. Other things are handed on.

    Raises:
        RuntimeError if an argument is changed in place: by the call if `function` does it, else
        in backward. TypeError for a given list, tuple or dict with a tensor inside; names the
        container's type.

    Details:
        1. An output that the loss does not use gets no gradient, not even zeros. While it is
           alive, arguments may be kept.
        2. A parameter or buffer may be returned; it stays a leaf, and the result has its values.
           A result may require a gradient that it did not inside. Results that share memory with
           anything may not be changed in place.
        3. A checkpoint may stand inside the function of another, and lowers the peak there too.
        4. A second backward pass needs retain_graph=True in the first, and then works.
        5. An error in either run comes through; a failed second run leaves the random stream as
           it was.
        6. autograd.grad(), inputs= (of arguments) and create_graph=True: RuntimeError, or right
           gradients and no others. Backward under inference_mode is not asked for.
        7. A tensor inside a returned list, tuple or dict, however deep: TypeError, or right
           gradients.
    """
    raise NotImplementedError


# Part 3


def run_in_segments(layers: Sequence[nn.Module], x: Tensor, segments: int) -> Tensor:
    """The output of `layers` applied in order to `x`, in checkpointed segments.

        sizes      equal, or differing by one
        runs       each layer once; again in backward, except in the last segment, whose inside is
                   needed at once
        gradients  those of the plain chain, as in `checkpoint`; `x` need not require one
        peak       one input for each segment, and the largest segment's activations

        >>> run_in_segments(layers, x, segments=4).sum().backward()

    Args:
        layers: each from a tensor to a tensor, the same under no_grad, without changing its
            input in place; one may stand twice. All but the first take floating-point numbers.
        x: the first layer's input.
        segments: from 1 to the number of layers.

    Raises:
        no layers; other numbers of segments; names both.
    """
    raise NotImplementedError


def best_segments(num_layers: int) -> int:
    """The number of segments with the lowest peak for layers that each hold one activation.

        peak  `segments + ceil(num_layers / segments)` activations; of several best any

        >>> best_segments(16)
        4

    Raises:
        num_layers below 1.
    """
    raise NotImplementedError


# Part 4, the stretch


def fewest_extra_steps(num_layers: int, snapshots: int) -> int:
    """The fewest layer runs without a graph, to run backward through `num_layers` layers when
    `snapshots` layer inputs may be kept at a time.

        steps      all layers from a snapshot to the one whose turn it is run without a graph;
                   each layer's turn, the last layer's first, is one run with a graph: not counted
        snapshots  the first layer's input is one; the input of the layer whose turn it is takes
                   no place

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

        gradients     those of `loss_fn(layers(x)).backward()`, as in `checkpoint`; if `x`
                      requires one, of `x` and what it was computed from
        runs          layers at most `len(layers) + fewest_extra_steps(...)` times, `loss_fn` once
        random state  layers draw the same from torch's default generators in each run; the stream
                      goes on as if each ran once, after an error too
        peak          `snapshots` activations, and one layer's forward and backward with its input
        freed         afterwards nothing is left but the loss

        >>> loss = backward_with_snapshots(layers, x, loss_fn, snapshots=3)

    Args:
        layers: as for run_in_segments.
        x: the first layer's input, a snapshot.
        loss_fn: from the last output to a scalar that requires a gradient; may have parameters.
        snapshots: at least 1, also more than there are layers.

    Returns:
        The loss, a scalar without a graph.

    Raises:
        no layers; snapshots below 1.

    Details:
        1. Layers and `loss_fn` run under the caller's autocast.
        2. It works for 1,200 layers with as many snapshots.
    """
    raise NotImplementedError


# untouched stub e0cbf01bf235
