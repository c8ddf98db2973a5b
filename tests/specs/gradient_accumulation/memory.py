"""Bytes at the peak of a window, against a formula: mostly activations, gradients or logits.

activations: 256 rows through four hidden layers of 96 (0.39 MB, three times the gradients G), 4
    micro-batches. At most one micro-batch's pass with one set of gradients, and 0.35 G.
gradients: 12 weights of 64 x 64, 3 rows, 3 micro-batches. At most one micro-batch's pass with one
    set of gradients, and 0.35 G: room for one gradient and its square at a time, in float64 too.
wide_output: 64 rows of 4,096 logits, L = 1 MiB. The backward pass needs the log-probabilities
    that the loss has saved, their gradient and that of the logits: 3 L, and the gradient of the
    weight W beside the sum. Logits that a name keeps alive make it 4 L. At most 3.25 L + 3 W.
"""

import copy
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_bar
from kit.laws.precisions import scaler_for
from kit.laws.toys import mlp, mse
from kit.memory.ruler import bytes_of, measure

# A model and a window for it.
Case = namedtuple("Case", "name model batches loss dtype", defaults=[torch.float32])
CLASSES = 4096
CASES = pytest.mark.parametrize("case", ["gradients", "activations", "wide_output"])
CASES_OF_TOKENS = pytest.mark.parametrize("case", [*CASES.args[1], "wide_output-bf16"])
CAUSES = {
    "activations": "graphs are kept, or micro-batches are joined",
    "gradients": "gradients are copied: sums, norms and clipping need no second set",
    "wide_output": "a name still holds the output in the backward pass, or outputs are kept, or "
    "the loss makes another copy, as a second softmax does",
}


def limit_of(case):
    """The bytes above the baseline that a window may take, and that a plain one takes."""
    rest, gradients = len(case.batches) - 1, gradients_of(case)
    if case.name == "wide_output":
        logits, three = 4 * 64 * CLASSES, 3 * gradients
        formula = "3.25 x the logits + 3 x the weight; plain holds the output"
        return 3.25 * logits + three, 4 * logits + three, formula
    one, formula = one_micro_batch(case) + gradients, "one micro-batch, its gradients G and 0.35 G"
    plain = one + max(rest * (one - 2 * gradients), gradients)
    return one + 0.35 * gradients, plain, formula


def gradients_of(case):
    return bytes_of(*(p.detach() for p in case.model.parameters()))


def of_samples(name, device, dtype=torch.float32):
    widths, rows, count = {
        "activations": ((24, 96, 96, 96, 96, 8), 256, 4),
        "gradients": ((64,) * 13, 3, 3),
        "wide_output": ((4, CLASSES), 64, 3),
    }[name]
    model = mlp(*widths, device=device)
    inputs = [draw.randn(rows, widths[0], device=device) for _ in range(count)]
    targets = [draw.randn(rows, widths[-1], device=device) for _ in inputs]
    loss = mse
    if name == "wide_output":
        targets = [draw.randint(CLASSES, (rows,), device=device) for _ in inputs]
        loss = F.cross_entropy
    return Case(name, model, [*zip(inputs, targets, strict=True)], loss, dtype)


def of_tokens(name, device):
    """As of_samples; a third of the tokens in the first of two rows have no label.

    In bfloat16 the logits are cast to float32: a name for either is over the limit.
    """
    name, _, half = name.partition("-")
    layers, length, classes = {
        "activations": ([nn.Embedding(64, 24), mlp(24, *[96] * 4, 8)], 128, 8),
        "gradients": ([nn.Embedding(64, 64), *[nn.Linear(64, 64) for _ in range(11)]], 3, 64),
        "wide_output": ([nn.Embedding(64, 4), nn.Linear(4, CLASSES)], 32, CLASSES),
    }[name]
    batches = []
    for _ in range(3):
        targets = draw.randint(classes, (2, length), device=device)
        targets[0, ::3] = -100
        batches.append((draw.randint(64, (2, length), device=device), targets))
    model = nn.Sequential(*layers).to(device, torch.bfloat16 if half else None)
    return Case(name, model, batches, lambda out, y: F.cross_entropy(out.mT, y))


def one_micro_batch(case):
    """Bytes at the peak of one forward and backward pass.

    Gradients exist before it, as from a window's second micro-batch on, and are cleared after it.
    """
    (inputs, targets), *_ = case.batches
    for p in case.model.parameters():
        p.grad = torch.zeros_like(p)

    def step():
        half = case.dtype != torch.float32
        with torch.autocast(inputs.device.type, case.dtype, enabled=half):
            loss = case.loss(case.model(inputs).float(), targets)
        loss.backward()

    peak = measure(step, inputs.device, known=[case.model, inputs, targets]).above_baseline
    case.model.zero_grad()
    return peak


def peak(case, call, module):
    """Bytes above the baseline before the window, which has no gradients."""
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    device, known = case.batches[0][0].device, [case.model, *case.batches]
    return measure(lambda: call(module, case, optimizer), device, known=known).above_baseline


def check_peak(case, call, answer, reference):
    """Fail unless the peak of `call` stays within the limit of the case."""
    __tracebackhide__ = True
    limit, plain, formula = limit_of(case)
    half = "; or 16-bit weights stay in autocast's cache until its outermost block ends"
    check_bar(
        f"peak of a window of {len(case.batches)} above its baseline",
        peak(copy.deepcopy(case), call, answer),
        limit,
        plain=plain,
        reference=peak(case, call, reference),
        formula=formula,
        cause=CAUSES[case.name] + half * (case.dtype != torch.float32),
    )


def epoch(module, case, optimizer):
    """One window, clipped far below its norm."""
    return module.train_epoch(
        *(case.model, case.batches, case.loss, optimizer),
        window=len(case.batches),
        dtype=case.dtype,
        scaler=scaler_for(case.dtype, case.batches[0][0].device),
        max_norm=1e-3,
    )
