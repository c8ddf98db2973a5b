"""Scenarios for part 3: the bytes by formula, a step, and the tensors that exist before it.

All sizes are multiples of 512 bytes, in which the CUDA allocator counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam

from kit.laws import draw
from kit.laws.toys import Block, mlp

KIB = 1024


class Step(NamedTuple):
    want: tuple[int, int, int]  # KiB: baseline, peak above it, retained
    step: Callable[[], object]
    existing: Iterable[torch.Tensor] = ()


def floats(kib, device, **options):
    return torch.ones(kib * KIB // 4, device=device, **options)


class Greedy(torch.autograd.Function):
    """Takes 12 KiB for a moment in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        floats(12, grad.device)
        return grad


class Peak:
    def five_temporaries_in_a_row(device):
        return Step((0, 256, 0), lambda: [floats(256, device).zero_().dim() for _ in range(5)])

    def a_temporary_of_the_backward_pass(device):
        x = floats(4, device, requires_grad=True)
        return Step((4, 4 + 12, 4), lambda: Greedy.apply(x).backward(torch.ones_like(x)), [x])

    def an_optimizer_that_makes_its_momentum(device):
        x = floats(4, device, requires_grad=True)
        x.grad = torch.ones_like(x)
        sgd = SGD([x], lr=0.1, momentum=0.9, foreach=False)
        return Step((8, 4, 4), sgd.step, [x, x.grad])


class Sharing:
    def views_and_in_place_results(device):
        x, out = torch.ones(32, 128, device=device), torch.ones(32, 128, device=device)

        def step():
            y = x * 2
            torch.mul(x, 3, out=out).add_(1)
            return [y.add_(1).relu_().t(), y[3:], y.view(-1), x[:, ::2], x.expand(9, 32, 128)]

        return Step((32, 16, 0), step, [x, out])

    def a_slice_that_is_kept(device):
        kept = []
        return Step((0, 8, 8), lambda: kept.append(floats(8, device)[:1]))

    def rows_with_gaps(device):
        """Two rows of 64 floats, 192 apart: 256 floats."""
        kept, gaps = [], partial(torch.empty_strided, (2, 64), (192, 1), device=device)
        return Step((0, 1, 1), lambda: kept.append(gaps()))


class Existing:
    def a_tensor_and_views_of_it(device):
        x = torch.ones(10, 128, device=device)
        return Step((5, 0, 0), lambda: None, [x, x.t(), x[2:], x])

    def three_floats(device):
        return Step((12 / KIB, 0, 0), lambda: None, [torch.ones(3, device=device)])

    def only_a_slice_of_it(device):
        return Step((5, 0, 0), lambda: None, [torch.ones(10, 128, device=device)[7:]])


class Retained:
    def what_existed_is_freed(device):
        held = [floats(4, device), floats(1, device)]
        return Step((5, 0, -5), held.clear, iter(held[:]))

    def one_for_another(device):
        held = [floats(4, device), floats(1, device)]
        return Step(
            (5, 2, 1), lambda: held.append((floats(2, device), held.pop())[0]), iter(held[:])
        )

    def data_are_replaced(device):
        p = nn.Parameter(floats(8, device))
        return Step((8, 2, -6), lambda: setattr(p, "data", floats(2, device)), [p])


class Kinds:
    def integers_booleans_complex_and_float64(device):
        """1024 of each, of 8 + 1 + 8 + 8 bytes."""
        dtypes, kept = (torch.int64, torch.bool, torch.complex64, torch.float64), []
        new = partial(torch.zeros, 1024, device=device)
        return Step((0, 25, 25), lambda: kept.extend([new(dtype=dtype) for dtype in dtypes]))

    def values_and_indices_in_a_tuple(device):
        x, kept = floats(2, device), []
        return Step((2, 6, 6), lambda: kept.append(torch._foreach_add([x, x, x], 1)), [x])

    def a_step_under_no_grad(device):
        kept = []
        return Step((0, 2, 2), torch.no_grad()(lambda: kept.append(floats(2, device))))

    def a_step_under_inference_mode(device):
        kept = []
        return Step((0, 2, 2), torch.inference_mode()(lambda: kept.append(floats(2, device))))

    def a_literal(device):
        kept = []
        return Step((0, 1, 1), lambda: kept.append(torch.tensor([1.0] * 256, device=device)))


class Grown:
    def resized(device):
        x = torch.empty(0, device=device)
        return Step((0, 8, 8), lambda: x.resize_(2 * KIB), [x])

    def filled_as_out(device):
        x, out = floats(4, device), torch.empty(0, device=device)
        return Step((4, 4, 4), lambda: torch.mul(x, 3, out=out), [x, out])


class Emptied:
    def a_parameter_freed(device):
        x = floats(8, device)
        return Step((8, 0, -8), lambda: x.untyped_storage().resize_(0), [x])

    def gathered_again_when_another_is_freed(device):
        shards = [floats(8, device), floats(6, device)]

        def step():
            for shard, size in ((0, 0), (1, 0), (0, 8), (0, 0), (1, 6)):
                shards[shard].untyped_storage().resize_(size * KIB)
                floats(1, device)
            shards[0].untyped_storage().resize_(16 * KIB)

        return Step((14, 8, 8), step, shards)


class OtherDevices:
    def a_million_floats_on_the_meta_device(device):
        return Step((0, 0, 0), lambda: torch.ones(10**6, device="meta") * 2)


# Real steps, whose bytes the ruler knows: each gives the step, and what exists before it


class Training:
    def linear_layers_and_sgd(device):
        return _training(mlp(128, 512, 256, 128), device, partial(SGD, lr=0.1))

    def normalisation_and_momentum(device):
        model = nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256), nn.LayerNorm(256), nn.Tanh())
        return _training(model, device, partial(SGD, lr=0.1, momentum=0.9, foreach=False))

    def attention_and_adam(device):
        return _training(Block(128, heads=4), device, partial(Adam, foreach=False))

    def the_first_step_of_adam_with_lists(device):
        return _training(mlp(128, 512, 256, 128), device, partial(Adam, foreach=True), rows=2)

    def evaluation(device):
        return _training(mlp(128, 512, 256, 128), device, None)


def _training(model, device, make, rows=20):
    model.to(device)
    x = draw.randn(7, rows, 128, device=device)
    optimizer = make(model.parameters()) if make else None

    def step():
        with torch.set_grad_enabled(make is not None):
            loss = model(x).square().mean()
        if make:
            loss.backward()
            optimizer.step()

    if device.type == "cuda":  # libraries take their workspaces once
        model(x).square().mean().backward()
        model.zero_grad()
    return step, [x, *model.parameters()]
