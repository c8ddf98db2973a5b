"""What the specs of segment_checkpointing share: layers that are counted, and a run to compare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_equal
from kit.laws.toys import mlp
from kit.memory.ruler import measure


class Layer(nn.Module):
    """Linear, tanh, dropout: (rows, width) to the same shape. Notes in `log` each time it runs."""

    def __init__(self, number: int, log: list[int], width: int, dropout: float) -> None:
        super().__init__()
        self.number, self.log, self.dropout = number, log, dropout
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.number)
        return nn.functional.dropout(self.linear(x).tanh(), self.dropout, self.training)


def chain(
    count: int, device: torch.device, *, width: int = 5, dropout: float = 0.25
) -> tuple[list[nn.Module], list[int]]:
    """`count` layers, the same ones each time, and the list in which they note that they ran."""
    draw.seed(11)
    log: list[int] = []
    return [Layer(number, log, width, dropout).to(device) for number in range(count)], log


def plain(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def plain_call(function: Callable[..., Any], *args: object) -> Any:
    """What a checkpoint is compared with."""
    return function(*args)


def loss_of(out: Tensor) -> Tensor:
    """A scalar with a different gradient everywhere."""
    return out.float().square().mean()


def named(layers: Iterable[nn.Module]) -> dict[str, Tensor]:
    return dict(nn.ModuleList(layers).named_parameters())


def check_not_torchs_own(step: Callable[[], object]) -> None:
    """Fail if a function of torch.utils.checkpoint runs in `step`."""
    __tracebackhide__ = True
    seen: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(before)
    check(
        not seen,
        expected="a checkpoint made without torch.utils.checkpoint",
        got=f"{seen[0]}() of that module runs" if seen else "",
        cause="the checkpoint is to be written here",
    )


@dataclass
class Run:
    """One forward and backward pass: the loss, the gradients, and the random numbers after it."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    random: Tensor


def train(loss: Callable[[], Tensor], leaves: Mapping[str, Tensor]) -> Run:
    """Seed, `loss()`, backward; the gradients of the leaves start at None."""
    return run(lambda: _backward(loss()), leaves)


def run(step: Callable[[], Tensor], leaves: Mapping[str, Tensor]) -> Run:
    """Seed, and `step()`, which runs backward and returns the loss."""
    for leaf in leaves.values():
        leaf.grad = None
    draw.seed(29)
    value = step()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    device = next(iter(leaves.values())).device
    loss = value.detach() if isinstance(value, Tensor) else value
    return Run(loss, grads, draw.next_random(device))


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def check_same(got: Run, want: Run, *, cause: str) -> None:
    """Fail unless loss and gradients are the plain run's to the bit, and none is missing."""
    __tracebackhide__ = True
    check_equal(got.loss, want.loss, "loss", cause=cause)
    check_grads(got.grads, want.grads, cause=cause)


def check_grads(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], *, cause: str
) -> None:
    __tracebackhide__ = True
    missing = [name for name, grad in want.items() if grad is not None and got[name] is None]
    check(
        not missing,
        expected=f"a gradient for each of {', '.join(n for n, g in want.items() if g is not None)}",
        got=f"None for {', '.join(missing)}",
        cause=cause,
    )
    for name, grad in want.items():
        check_equal(got[name], grad, f"gradient of {name}", cause=cause)


def check_random(got: Run, want: Run, *, cause: str) -> None:
    """Fail unless the random stream goes on as after the plain run."""
    __tracebackhide__ = True
    check_equal(got.random, want.random, "the next random numbers", cause=cause)


# Memory


def zero_grads(*things: nn.Module | Tensor) -> list[nn.Module | Tensor]:
    """Put gradients in place, so that a peak is one of activations; returns what is known."""
    for thing in things:
        for leaf in thing.parameters() if isinstance(thing, nn.Module) else [thing]:
            leaf.grad = torch.zeros_like(leaf)
    return list(things)


def wide_blocks(count: int, device: torch.device) -> nn.ModuleList:
    """Blocks whose inside is eight times their input; the first dimension is large."""
    draw.seed(11)
    return nn.ModuleList(mlp(32, 256, 32, device=device) for _ in range(count))


def big_chain(count: int, device: torch.device) -> nn.ModuleList:
    return nn.ModuleList(chain(count, device, width=_shape(device)[1])[0])


def big_input(device: torch.device) -> Tensor:
    """(rows, width), so large that activations outweigh everything else."""
    draw.seed(5)
    return draw.randn(*_shape(device), device=device, requires_grad=True)


def _shape(device: torch.device) -> tuple[int, int]:
    return (4096, 128) if device.type == "cuda" else (256, 32)


def peak_of(step: Callable[[], object], known: Sequence[object], device: torch.device) -> int:
    """Bytes above the baseline at the peak of `step`."""
    return measure(step, device, known=known).above_baseline


def plain_peak(layers: nn.ModuleList, x: Tensor) -> int:
    """Forward and backward of `layers` without any checkpoint, gradients in place."""
    known = zero_grads(layers, x)
    return peak_of(lambda: loss_of(plain(layers, x)).backward(), known, x.device)


def run_lengths(log: Sequence[int]) -> list[int]:
    """Lengths of the ascending runs in a log of layers, in order."""
    lengths: list[int] = []
    for place, number in enumerate(log):
        if place and number == log[place - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths
