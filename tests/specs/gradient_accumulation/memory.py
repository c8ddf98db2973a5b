"""Bytes at the peak of a window, held to a formula: where activations, gradients or logits rule.

activations: 256 rows through four hidden layers of 96 (0.39 MB, three times the gradients G), 8
    micro-batches. At most one micro-batch's pass with one set of gradients, and 0.3 G.
held_graph: as activations, behind layers that keep their output in an attribute of their node, as
    fast kernels do. Such memory ends with the node, which ends with the last name for the loss.
gradients: 24 weights of 64 x 64, 3 rows, 5 micro-batches. At most one micro-batch's pass with one
    set of gradients, and 0.3 G: room for a copy of one gradient at a time, in float64 too.
data: 64 rows of 4,096 numbers (1 MiB) for a layer of 8, in windows of four that are made when they
    are asked for. The data of a window, of one micro-batch more, and its pass.
wide_output: 64 rows of 8,192 logits, L = 2 MiB. In the backward pass there are the
    log-probabilities that the loss has saved, their gradient and that of the logits: 3 L, and the
    gradient of the weight W beside the sum. Logits that a name still holds make 4 L. At most
    3.25 L + 3 W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check_bar
from kit.laws.precisions import scaler_for
from kit.laws.toys import mlp, mse
from kit.memory.ruler import bytes_of, measure

CLASSES = 8192
CASES = pytest.mark.parametrize("case", ["activations", "held_graph", "gradients", "wide_output"])
OF_TOKENS = pytest.mark.parametrize("case", ["held_graph", "gradients", "wide_output"])
CAUSES = {
    "activations": "graphs are kept until the window's end, or micro-batches are joined",
    "held_graph": "a name still holds the loss, and with it a graph, in the next forward pass",
    "gradients": "gradients are copied: sums, norms and clipping need no second set",
    "wide_output": "a name still holds the output in the backward pass, or outputs are kept",
    "data": "micro-batches are all fetched first or kept, or a window while the next is taken",
}


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.relu()
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.kept > 0)


class Keeping(nn.Module):
    """ReLU, which keeps its output by itself and not by save_for_backward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Keep.apply(x)
        return result


@dataclass
class Case:
    """A window, and the bytes that it may take above what is there before."""

    name: str
    model: nn.Module
    batches: list[Any]
    loss: Callable[[Tensor, Tensor], Tensor]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.gradients = bytes_of(*(p.detach() for p in self.model.parameters()))
        if self.name == "wide_output":
            logits = 4 * 64 * CLASSES
            self.limit = 3.25 * logits + 3 * self.gradients
            self.plain = 4 * logits + 3 * self.gradients
            self.formula = "3.25 x the logits + 3 x the weight; plain holds the output"
        else:
            one = one_micro_batch(self) + self.gradients
            self.limit = one + 0.3 * self.gradients
            self.plain = one + (len(self.batches) - 1) * (one - 2 * self.gradients)
            self.plain = max(self.plain, one + self.gradients)
            self.formula = "one micro-batch, its gradients G and 0.3 G"


def of_samples(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    widths, rows, count = {
        "activations": ((24, 96, 96, 96, 96, 8), 256, 8),
        "held_graph": ((24, 96, 96, 96, 96, 8), 256, 8),
        "gradients": ((64,) * 25, 3, 5),
        "wide_output": ((4, CLASSES), 64, 3),
        "data": ((4096, 8), 64, 4),
    }[name]
    activation = Keeping if name == "held_graph" else nn.ReLU
    model = mlp(*widths, device=device, activation=activation)
    inputs = [draw.randn(rows, widths[0], device=device) for _ in range(count)]
    if name == "wide_output":
        targets = [draw.randint(CLASSES, (rows,), device=device) for _ in inputs]
        return Case(name, model, [*zip(inputs, targets, strict=True)], F.cross_entropy, dtype)
    targets = [draw.randn(rows, widths[-1], device=device) for _ in inputs]
    return Case(name, model, [*zip(inputs, targets, strict=True)], mse, dtype)


def of_tokens(name: str, device: torch.device) -> Case:
    """As of_samples; the wide output has 8 micro-batches of 2 x 32 tokens, some without a label."""
    layers: list[nn.Module] = [nn.Embedding(64, 4), nn.Linear(4, CLASSES)]
    shape, count, classes = (2, 32), 8, CLASSES
    if name == "gradients":
        layers = [nn.Embedding(64, 64), *[nn.Linear(64, 64) for _ in range(23)]]
        shape, count, classes = (2, 3), 5, 64
    if name == "held_graph":
        layers = [nn.Embedding(64, 24), mlp(24, 96, 96, 96, 96, 8, activation=Keeping)]
        shape, count, classes = (2, 128), 5, 8
    batches = []
    for _ in range(count):
        targets = draw.randint(classes, shape, device=device)
        targets[0, ::3] = -100
        batches.append((draw.randint(64, shape, device=device), targets))
    model = nn.Sequential(*layers).to(device)
    return Case(name, model, batches, lambda out, y: F.cross_entropy(out.mT, y))


def one_micro_batch(case: Case) -> int:
    """Bytes at the peak of one forward and backward pass.

    The gradients are there before it, as they are from the second micro-batch of a window on. They
    are gone again afterwards.
    """
    (inputs, targets), *_ = case.batches
    for p in case.model.parameters():
        p.grad = torch.zeros_like(p)

    def step() -> None:
        half = case.dtype != torch.float32
        with torch.autocast(inputs.device.type, case.dtype, enabled=half):
            loss = case.loss(case.model(inputs).float(), targets)
        loss.backward()

    peak = measure(step, inputs.device, known=[case.model, inputs, targets]).above_baseline
    case.model.zero_grad()
    return peak


Call = Callable[[Any, Case, torch.optim.Optimizer], object]


def peak(case: Case, call: Call, module: object) -> int:
    """Bytes above the baseline of one call."""
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    device = case.batches[0][0].device
    known = [case.model, *case.batches]
    return measure(lambda: call(module, case, optimizer), device, known=known).above_baseline


def check_peak(
    make: Callable[[], Case], call: Call, answer: object, reference: object, what: str = ""
) -> None:
    """Fail unless the peak of `call` stays within the limit of the case."""
    __tracebackhide__ = True
    case = make()
    check_bar(
        what or f"peak of a window of {len(case.batches)} above its baseline",
        peak(case, call, answer),
        case.limit,
        plain=case.plain,
        reference=peak(make(), call, reference),
        formula=case.formula,
        cause=CAUSES[case.name],
    )


def epoch_of_one_window(module: Any, case: Case, optimizer: torch.optim.Optimizer) -> object:
    options = {"dtype": case.dtype, "scaler": scaler_for(case.dtype, case.batches[0][0].device)}
    return module.train_epoch(
        *(case.model, case.batches, case.loss, optimizer),
        **(options | {"window": len(case.batches), "max_norm": 1.0}),
    )


def with_data(device: torch.device) -> Case:
    """Data are nearly all: those of one window of four, and of a micro-batch that a name holds."""
    case = of_samples("data", device)
    data = bytes_of(*case.batches[0])
    case.plain = int(case.limit) + 12 * data
    case.limit += 5 * data
    case.formula += ", and the data of five; plain keeps the data of twelve"
    return case


def epoch_of_three_windows(module: Any, case: Case, optimizer: torch.optim.Optimizer) -> object:
    data = ((x.clone(), y.clone()) for _ in range(3) for x, y in case.batches)
    return module.train_epoch(case.model, data, case.loss, optimizer, window=4)
