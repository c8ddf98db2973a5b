"""Segment checkpointing: trade forward passes for activations, without torch.utils.checkpoint.

Four parts: a checkpoint as an autograd.Function that gives every parameter its gradient, what makes
it right (random state, autocast, odd arguments and outputs), a chain of layers in segments, and the
schedule with the fewest forward steps when only so many snapshots may be kept.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Griewank and
Walther, Algorithm 799: revolve (ACM TOMS 26, 2000); torch.utils.checkpoint for the behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    raise NotImplementedError


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
    raise NotImplementedError


def best_segments(num_layers: int) -> int:
    """The number of segments with the lowest peak for layers that each hold one activation.

    The peak is `segments + ceil(num_layers / segments)` activations: one kept input a segment, and
    the largest segment's own. It is lowest near sqrt(num_layers), and about 2 * sqrt(num_layers)
    there. Of several best numbers any may be returned.

    Raises:
        ValueError: num_layers below 1; names it.
    """
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


# untouched stub cc71fb0f5b49
