"""What the specs of checkpointed_model share: one step with all its results, runs, and peaks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from kit.laws import draw
from kit.laws.checks import check, check_equal, show
from kit.memory.ruler import bytes_of, measure

WIDTH = 16  # of the LargeModels
LAYERS = 7
# Segments of 3 do not divide 7 blocks: the last one has a single block.
SIZES = pytest.mark.parametrize(
    "size", [1, 3, LAYERS], ids=["each_block", "segments_of_3", "one_segment"]
)


def inputs(device: torch.device, rows: int = 3, length: int = 5, *, grad: bool = False) -> Tensor:
    """Small inputs of shape (rows, length, WIDTH), for everything but bytes."""
    return draw.randn(rows, length, WIDTH, device=device).requires_grad_(grad)


def large_inputs(device: torch.device) -> Tensor:
    """Inputs beside which the weights weigh little; they require a gradient, and have one."""
    rows, length = (5, 64) if device.type == "cpu" else (16, 512)
    x = draw.randn(rows, length, WIDTH, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)
    return x


def by_hand(block: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """What a block computes, from its weights."""
    hidden = F.relu(F.linear(x, block.up.weight, block.up.bias))
    hidden = F.dropout(hidden, block.dropout.p, block.training)
    update = F.linear(hidden, block.down.weight, block.down.bias)
    return x + (update if mask is None else torch.where(mask.unsqueeze(-1), update, 0.0))


_DIFFERS = (
    "the recomputation has another input, mask, mode or precision than the forward pass had: they"
    " were left somewhere and have changed since, or are changed for it"
)


def back(output: Tensor, *, cause: str = _DIFFERS) -> None:
    """The backward pass from a loss of `output`; one that torch itself refuses is a failure."""
    __tracebackhide__ = True
    check(
        output.requires_grad,
        expected="an output with a graph behind it",
        got="an output that requires no gradient",
        cause="a reentrant checkpoint passes gradients on only if its input requires one; or the"
        " blocks run under no_grad(), or on a detached input",
    )
    refused = None
    try:
        output.float().square().mean().backward()
    except CheckpointError as error:
        refused = str(error).splitlines()[0]
    check(
        refused is None,
        expected="a recomputation that does what the forward pass did",
        got=refused,
        cause=cause,
    )


def step(
    module: nn.Module,
    forward: Callable[[], Tensor],
    *leaves: Tensor,
    seed: int = 4,
    cause: str = _DIFFERS,
) -> dict[str, Any]:
    """Forward and backward from a fixed seed: output, gradients, and where the random stream is.

    The gradients are those of the module's trainable parameters and of `leaves`.
    """
    __tracebackhide__ = True
    device = next(module.parameters()).device
    module.zero_grad()
    for leaf in leaves:
        leaf.grad = None
    draw.seed(seed)
    output = forward()
    found: dict[str, Any] = {"output": output.detach()}
    found["the next random number after the forward pass"] = draw.next_random(device)
    back(output, cause=cause)
    found["the next random number after the backward pass"] = draw.next_random(device)
    for name, p in module.named_parameters():
        if p.requires_grad:
            found[f"gradient of {name}"] = None if p.grad is None else p.grad.clone()
    for number, leaf in enumerate(leaves):
        found[f"gradient of input {number}"] = None if leaf.grad is None else leaf.grad.clone()
    return found


def rounding(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """How far apart two runs of the same step may be, in parts of each tensor's length.

    Nothing on the cpu. On cuda the backward pass of attention adds up in no fixed order: a few
    roundings of the precision that it computes in.
    """
    return 0.0 if device.type == "cpu" else 4 * max(torch.finfo(dtype).eps, 1e-5)


def check_same(
    got: dict[str, Any], want: dict[str, Any], *, cause: str, within: float = 0.0
) -> None:
    """Fail unless two steps have the same results; `want` is the one without checkpoints.

    To the bit, or `within` this part of each tensor's length.
    """
    __tracebackhide__ = True
    missing = [name for name in want if got[name] is None and want[name] is not None]
    check(
        not missing,
        expected="a gradient wherever there is one without checkpoints",
        got=f"none for {len(missing)} tensors: no {', no '.join(missing[:3])}",
        cause=f"{cause}; or the graph is cut, by detach() for one",
    )
    for name, value in want.items():
        if value is None or not within:
            check_equal(got[name], value, name, cause=cause)
            continue
        off = ((got[name] - value).norm() / value.norm().clamp_min(1e-30)).item()
        check(
            off <= within,
            expected=f"{name} = {show(value)}, within {100 * within:.2g} % of its length",
            got=f"{show(got[name])}, {100 * off:.2g} % off",
            cause=cause,
        )


class Runs:
    """Counts how often each of some modules is called.

    For a block it is a child that is counted: it is called whenever the block's forward runs, by
    whatever way.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.counts = [0] * len(self.modules)
        for number, module in enumerate(self.modules):
            module.register_forward_pre_hook(lambda *_, n=number: self._note(n))

    def _note(self, number: int) -> None:
        self.counts[number] += 1

    def take(self) -> list[int]:
        """The counts since the last time."""
        counts, self.counts = self.counts, [0] * len(self.modules)
        return counts


def runs_of(model: Any) -> Runs:
    """Counts how often the forward of each block of a LargeModel runs."""
    return Runs(block.up for block in model.layers)


def peak(model: nn.Module, x: Tensor, forward: Callable[[], Tensor] | None = None) -> int:
    """Bytes above the baseline at the peak of one forward and backward, gradients in place."""
    __tracebackhide__ = True
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    run = forward or (lambda: model(x))
    return measure(lambda: back(run()), x.device, known=[model, x]).above_baseline


def held_after_forward(
    model: nn.Module, x: Tensor, forward: Callable[[], Tensor] | None = None
) -> int:
    """Bytes that are held between the forward and the backward pass, the output included."""
    kept: list[Tensor] = []
    run = forward or (lambda: model(x))
    return measure(lambda: kept.append(run()), x.device, known=[model, x]).retained


def held_after_backward(model: nn.Module, x: Tensor) -> int:
    """Bytes that a step leaves behind, the gradients not among them."""
    __tracebackhide__ = True
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return measure(lambda: back(model(x)), x.device, known=[model, x]).retained


# What is measured once serves every spec, and every answer in a run of many: bytes do not vary.


@functools.cache
def peak_of_block(module: Any, device: torch.device) -> int:
    """The peak of one plain block: an inside."""
    return peak(module.MemoryIntensiveBlock(WIDTH).to(device), large_inputs(device))


@functools.cache
def peak_of_model(
    module: Any, layers: int, size: int, device: torch.device, *, use: bool = True
) -> int:
    """The peak of a LargeModel, and a plain one has no segments."""
    options = {"segment_size": size} if use else {"use_checkpoint": False}
    return peak(module.LargeModel(layers, WIDTH, **options).to(device), large_inputs(device))


def one_input(x: Tensor) -> int:
    """The bytes of one block's input, as the allocator rounds them."""
    return bytes_of(x.detach())
