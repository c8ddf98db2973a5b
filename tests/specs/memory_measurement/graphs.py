"""Scenarios for part 2: the saved bytes by formula, the forward pass, and its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw


class Graph(NamedTuple):
    want: int
    forward: Callable[[], object]
    model: nn.Module = nn.Module()


def leaf(device, *shape, dtype=None):
    return draw.randn(*shape, device=device, dtype=dtype, requires_grad=True)


class Held:
    def a_result_in_a_dict(device):
        x = leaf(device, 16)
        return Graph(4 * 16, lambda: {"out": (x.exp(), None)})

    def masks_and_indices(device):
        """masked_fill saves a bool mask (1 byte each), index_select int64 indices (8 bytes)."""
        x, mask = leaf(device, 4, 9), draw.rand(4, 9, device=device) < 0.5
        index = draw.randint(4, (7,), device=device)
        return Graph(36 + 8 * 7, lambda: x.masked_fill(mask, 0.0).index_select(0, index))

    def complex_numbers(device):
        z = leaf(device, 10, dtype=torch.complex64)
        return Graph(8 * 10, lambda: z.exp())

    def a_pass_under_no_grad(device):
        x = leaf(device, 16)
        return Graph(0, torch.no_grad()(lambda: x.exp()))

    def a_backbone_under_no_grad(device):
        """Only the head's input is saved, 11 x 5, and its weight is of the model."""
        body, head = nn.Linear(7, 5, device=device), nn.Linear(5, 3, device=device)
        x = draw.randn(11, 7, device=device)
        forward = torch.no_grad()(lambda: body(x).relu())
        return Graph(4 * 11 * 5, lambda: head(forward()), nn.ModuleList([body, head]))


class Sharing:
    def a_result_saved_three_times(device):
        x = leaf(device, 10)

        def forward():
            y = x.sigmoid()
            return [y * y, y * y.flip(0).detach().flip(0)]  # y, and a copy of it

        return Graph(4 * 10 + 4 * 10, forward)

    def a_column_of_a_table(device):
        w, table = leaf(device, 6), draw.randn(6, 50, device=device)
        return Graph(4 * 6 * 50, lambda: w * table[:, 3])

    def one_row_of_a_large_tensor(device):
        w, large = leaf(device, 6), draw.randn(500, 6, device=device, dtype=torch.float64)
        return Graph(8 * 500 * 6, lambda: w * large[:1])

    def two_halves_of_a_table(device):
        scale, table = leaf(device, 8), draw.randn(16, device=device)
        return Graph(4 * 16, lambda: [scale * table[:8], scale * table[8:]])

    def an_expanded_row(device):
        w, row = leaf(device, 6), draw.randn(1, 6, device=device)
        return Graph(4 * 6, lambda: w * row.expand(40, 6))


class LeftOut:
    def linear_batch_norm_and_a_frozen_linear(device):
        """x (5 x 6), batch norm's input and two statistics of 8; no weights, no running mean."""
        layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)
        layers[2].requires_grad_(False)
        x = leaf(device, 5, 6)
        return Graph(4 * (5 * 6 + 5 * 8 + 2 * 8), lambda: layers(x), nn.Sequential(layers))

    def a_weight_in_two_halves(device):
        model, x = nn.Linear(6, 8, bias=False, device=device), leaf(device, 5, 6)
        return Graph(4 * 30, lambda: [F.linear(x, w) for w in model.weight.chunk(2)], model)

    def a_row_of_a_buffer(device):
        model, x = nn.Module(), leaf(device, 6)
        model.register_buffer("table", draw.randn(9, 6, device=device))
        return Graph(0, lambda: x * model.table[4], model)


class Gone:
    def a_metric_that_nobody_detached(device):
        x = leaf(device, 64)
        return Graph(4 * 64, lambda: (x.exp().sum().item(), x.tanh())[1])

    def its_tensor_lives_on(device):
        """x was saved for the square, whose graph is gone; x itself lives."""
        x = leaf(device, 64)
        return Graph(4 * 64, lambda: (x.square().sum().item(), x.tanh())[1])

    def a_result_that_is_not_returned(device):
        x = leaf(device, 64)
        return Graph(0, lambda: x.exp().sum().item())


class Leaves:
    def an_input_and_a_scale(device):
        x, scale = leaf(device, 10), leaf(device, 1)
        return Graph(4 * 10 + 4, lambda: x * scale)


class OtherModels:
    def a_loss_with_a_weight_of_its_own(device):
        """x (3 x 4) and its output (3 x 5) for the weights, and the loss's weight (5 x 2)."""
        model, loss = nn.Linear(4, 5, device=device), nn.Linear(5, 2, device=device)
        x = draw.randn(3, 4, device=device)
        return Graph(4 * (3 * 4 + 3 * 5 + 5 * 2), lambda: loss(model(x)), model)
