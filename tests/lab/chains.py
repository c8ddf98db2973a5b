"""A chain of equal layers, every way to checkpoint it, and what no way can do better than."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from lab.measure import peak_of, solution

Step = Callable[[], object]


class Layer(nn.Module):
    """ZOMI's layer, relu(linear(x)): of its forward pass backward needs one activation, its output.

    Same signature as Q9's block, so that LargeModel can run it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        # The default would make the numbers of deep chains so small that they compute slowly.
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """From (batch, length, width) to the same shape."""
        return torch.relu(self.linear(x))


def chain(
    depth: int, width: int, batch: tuple[int, int], device: torch.device, *, simple: bool
) -> tuple[Any, Tensor]:
    """A LargeModel of so many layers, ZOMI's or its own blocks, and an input for it."""
    with device:
        model = solution("checkpointed_model").LargeModel(depth, width, dropout=0.0).train()
        if simple:
            model.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        return model, torch.randn(*batch, width)


def plain(model: Any, x: Tensor) -> Step:
    """Forward and backward, with every activation kept."""

    def step() -> None:
        y = x
        for layer in model.layers:
            y = layer(y)
        y.sum().backward()

    return step


def in_segments(model: Any, x: Tensor, segments: int) -> Step:
    """The reference of segment_checkpointing."""
    run = solution("segment_checkpointing").run_in_segments
    return lambda: run(model.layers, x, segments).sum().backward()


def sequential(model: Any, x: Tensor, segments: int) -> Step:
    """The function of torch that ZOMI calls."""
    layers = list(model.layers)
    return lambda: checkpoint_sequential(layers, segments, x, use_reentrant=False).sum().backward()


def nested(model: Any, x: Tensor, segment_size: int) -> Step:
    """The reference of checkpointed_model: checkpoints in checkpoints; size 1: one a layer."""

    def step() -> None:
        model.segment_size = segment_size
        model(x).sum().backward()

    return step


def optimal(model: Any, x: Tensor, snapshots: int) -> Step:
    """Revolve's schedule: the fewest runs with so many inputs kept and one layer's graph."""
    run = solution("segment_checkpointing").backward_with_snapshots
    return lambda: run(model.layers, x, torch.sum, snapshots)


# By name: a way with its settings, which are segments, a segment's size, or snapshots.
WAYS: dict[str, Callable[[Any, Tensor, int], Step]] = {
    "run_in_segments": in_segments,
    "checkpoint_sequential": sequential,
    "segment_size": nested,
    "optimal schedule": optimal,
}


class Point(NamedTuple):
    """What one setting of a way takes: bytes in inputs of a layer, runs per layer."""

    setting: int
    peak: float
    runs: float


def measured(model: Any, x: Tensor, steps: dict[int, Step]) -> list[Point]:
    """The peak above model, gradients and input, and the runs, for each setting."""
    points = []
    for setting, step in steps.items():
        with counting_runs(model) as runs:
            peak = peak_of(step, x.device, [model, x])
        points.append(Point(setting, peak / x.nbytes, runs[0] / len(model.layers)))
    return points


@contextmanager
def counting_runs(model: Any) -> Iterator[list[int]]:
    """How often a layer of the model begins to run inside the block, as the list's one number."""
    runs = [0]

    def count(layer: nn.Module, args: object) -> None:
        runs[0] += 1

    hooks = [layer.register_forward_pre_hook(count) for layer in model.layers]
    try:
        yield runs
    finally:
        for hook in hooks:
            hook.remove()


def flops_of(step: Step) -> int:
    """Floating-point operations of the matrix products in a step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def fewest_runs(depth: int, graph: int) -> list[float]:
    """For each number of activations that may wait, the fewest runs of a layer that backward needs.

    A lower bound for schedules that keep inputs or graphs of whole layers: `graph` activations are
    a layer's graph, one of them its output, and the chain's input is free. What the layer that is
    at work needs for itself comes on top. Entry w: runs over depth if w activations may wait;
    infinite if that is too few.

    The chain's first layer keeps its graph, or some layers run without a graph to an input that is
    kept for what lies behind it, and then what lies before it is done with the place free again.
    """
    before = [float("inf")] * (depth + 1)
    table = list[list[float]]()
    for waiting in range((depth - 1) * graph + 1):
        row = [0.0, 0.0, *[float("inf")] * (depth - 1)]
        for layers in range(2, depth + 1):
            if waiting >= graph:
                row[layers] = table[waiting - graph][layers - 1]
            if waiting:
                kept = (k + before[layers - k] + row[k] for k in range(1, layers))
                row[layers] = min(row[layers], *kept)
        table.append(row)
        before = row
    return [1 + row[depth] / depth for row in table]
