"""What the parts of gradient_accumulation share: data, gradients as a vector, one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, fail, show
from kit.laws.toys import mlp
from kit.memory.ruler import bytes_of, measure

Batch = tuple[Tensor, Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]


def regression(device: torch.device, *sizes: int) -> tuple[nn.Sequential, list[Batch]]:
    """A small model, and micro-batches of these numbers of samples; each has targets of its own.

    The targets of micro-batch n lie around 2 n, so that no two have similar gradients.
    """
    generator = draw.generator(3)
    batches = [
        (draw.randn(size, 7, generator=generator), draw.randn(size, 5, generator=generator))
        for size in sizes
    ]
    draw.seed(3)
    model = mlp(7, 13, 5, device=device, activation=nn.Tanh)
    return model, [(x.to(device), y.to(device) + 2 * n) for n, (x, y) in enumerate(batches)]


def sequences(device: torch.device) -> tuple[nn.Sequential, list[Batch]]:
    """A model, and micro-batches of 3, 1 and 2 samples, each a sequence of 2, 9 and 4 places."""
    model, _ = regression(device)
    shapes = ((3, 2), (1, 9), (2, 4))
    return model, [
        (draw.randn(*shape, 7, device=device), draw.randn(*shape, 5, device=device) + 2 * n)
        for n, shape in enumerate(shapes)
    ]


def lopsided(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples of a loss in which output and target cannot change places."""
    return ((output - target).square() * target.abs()).flatten(1).mean(1).mean()


def sequence_gradients(model: nn.Module, batches: Sequence[Batch]) -> tuple[Tensor, dict]:
    """The gradient of the mean of `lopsided` over all samples, and those of likely mistakes."""

    def weighted(weights: Sequence[int], swapped: bool = False) -> Tensor:
        pairs = [(y, model(x)) if swapped else (model(x), y) for x, y in batches]
        total = sum(w * lopsided(*pair) for w, pair in zip(weights, pairs, strict=True))
        return gradient(model, total / sum(weights))

    samples = [len(x) for x, _ in batches]
    elements = "a micro-batch counts by its elements, not by its samples"
    guesses = {
        elements: weighted([y.numel() for _, y in batches]),
        "loss_fn is called with targets and output, not output and targets": weighted(
            samples, True
        ),
    }
    return weighted(samples), guesses


def joined(batches: Sequence[Batch]) -> Batch:
    """The window in one batch."""
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def bad_batch(parts: Tensor | Sequence[Tensor], device: torch.device) -> tuple[Any, str]:
    """What is no good micro-batch on this device, and its shapes in words."""
    if isinstance(parts, Tensor):
        return parts.to(device), f"one tensor of shape {tuple(parts.shape)}"
    shapes = [tuple(part.shape) for part in parts]
    return tuple(part.to(device) for part in parts), f"shapes {shapes}"


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of `loss` as one vector; the model's own gradients are left alone."""
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def gradient_in(model: nn.Module) -> Tensor:
    """The gradient that the model's parameters hold, as one vector; each must have one."""
    __tracebackhide__ = True
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    check(
        not missing,
        expected="the window's gradients in place after the step",
        got=f"None for {', '.join(missing)}",
        cause="gradients are cleared after the step, or a graph was cut on the way to them",
    )
    return flat([p.grad for p in model.parameters() if p.grad is not None])


def check_no_gradients(model: nn.Module, cause: str) -> None:
    """Fail unless every parameter's grad is None."""
    __tracebackhide__ = True
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    expected = "grad None in every parameter"
    check(not left, expected=expected, got=f"one in {', '.join(left)}", cause=cause)


def is_near(got: Tensor, want: Tensor, rtol: float = 1e-5) -> bool:
    """Whether two vectors differ by no more than `rtol` of the length of the second."""
    error = (got.double() - want.double()).norm()
    return bool(error <= rtol * want.double().norm() + 1e-30)


def check_vector(
    got: Tensor,
    want: Tensor,
    what: str,
    *,
    guesses: Mapping[str, Tensor],
    otherwise: str,
    rtol: float = 1e-5,
) -> None:
    """Fail unless the vectors are near; the cause is the guess that explains what came."""
    __tracebackhide__ = True
    if is_near(got, want, rtol):
        return
    fits = [cause for cause, guess in guesses.items() if is_near(got, guess, 1e-3 + rtol)]
    error = (got.double() - want.double()).norm() / want.double().norm()
    fail(
        expected=f"{what} = {show(want)}",
        got=f"{show(got)}; off by {100 * error.item():.3g} % of its length",
        cause=fits[0] if fits else otherwise,
    )


def count_steps(optimizer: torch.optim.Optimizer) -> list[int]:
    """A list that grows by one entry with every step of the optimizer."""
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def gradient_bytes(model: nn.Module) -> int:
    """What one set of gradients takes: each rounded up to 512 bytes, as the ruler counts."""
    return bytes_of(*(p.detach() for p in model.parameters()))


def deep_model(device: torch.device, count: int) -> tuple[nn.Module, list[Batch]]:
    """A model in which activations dominate, and `count` micro-batches of 256 rows.

    Four hidden layers of 96 are 4 * 256 * 96 * 4 = 0.39 MB; the gradients are a third of that.
    """
    inputs = draw.randn(count, 256, 24, device=device)
    targets = draw.randn(count, 256, 8, device=device)
    model = mlp(24, 96, 96, 96, 96, 8, device=device)
    return model, list(zip(inputs, targets, strict=True))


def one_micro_batch(
    model: nn.Module, batch: Batch, loss_fn: LossFn, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes at the peak of one forward and backward pass, one set of gradients included.

    The gradients are there before it, as they are from the second micro-batch of a window on. They
    are gone again afterwards.
    """
    device = batch[0].device
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_fn(model(batch[0]).float(), batch[1])
        loss.backward()

    peak = measure(step, device, known=[model, *batch]).above_baseline
    model.zero_grad()
    return peak + gradient_bytes(model)
