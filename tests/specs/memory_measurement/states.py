"""Scenarios for part 1: the bytes by formula, and the model and optimizer that hold them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from kit.laws.toys import mlp


class State(NamedTuple):
    want: tuple[int, int, int, int]  # parameters, gradients, buffers, optimizer
    model: nn.Module
    optimizer: Optimizer | None = None


def trained(device, *widths):
    """With a gradient for each parameter."""
    model = mlp(*widths, device=device)
    model(torch.ones(2, widths[0], device=device)).sum().backward()
    return model


def with_buffers(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def with_state(model, state):
    """An optimizer whose state is as deep as that of L-BFGS."""
    optimizer = Optimizer(model.parameters(), {})
    optimizer.state[next(model.parameters())] = state
    return optimizer


class Parameters:
    def layers_within_layers(device):
        deep = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 3)), "b": nn.Linear(3, 1)})
        return State((4 * (9 + 4), 0, 0, 0), nn.Sequential(deep, nn.ReLU()).to(device))

    def a_frozen_layer(device):
        return State((4 * 18, 0, 0, 0), nn.Linear(5, 3, device=device).requires_grad_(False))

    def parameters_of_several_dtypes(device):
        counts = {torch.bfloat16: 7, torch.complex64: 5, torch.float64: 3, torch.int8: 11}
        zeros = [torch.zeros(n, dtype=dtype, device=device) for dtype, n in counts.items()]
        model = nn.ParameterList(nn.Parameter(zero, requires_grad=False) for zero in zeros)
        return State((2 * 7 + 8 * 5 + 8 * 3 + 11, 0, 0, 0), model)


class Gradients:
    def gradients_of_one_layer_only(device):
        model = nn.Sequential(trained(device, 3, 4), nn.Linear(4, 6, device=device))
        return State((4 * (16 + 30), 4 * 16, 0, 0), model)

    def frozen_after_the_backward_pass(device):
        model = trained(device, 5, 3)
        model[0].weight.requires_grad_(False)  # it keeps the gradient that it has
        return State((4 * 18, 4 * 18, 0, 0), model)


class Buffers:
    def buffers_within_layers(device):
        """Batch norm: mean and variance of 6 floats, an int64 counter; and a hidden cache."""
        model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(6)), nn.ReLU()).to(device)
        model[0][0].register_buffer("cache", torch.zeros(11, device=device), persistent=False)
        return State((4 * 12, 0, 4 * 12 + 8 + 4 * 11, 0), model)

    def buffers_of_several_dtypes(device):
        counts = {torch.bool: 17, torch.int64: 5, torch.complex64: 9}
        zeros = {str(d)[6:]: torch.zeros(n, dtype=d, device=device) for d, n in counts.items()}
        return State((0, 0, 17 + 8 * 5 + 8 * 9, 0), with_buffers(none=None, **zeros))


class Moments:
    def adam_before_its_first_step(device):
        model = trained(device, 13, 5)
        return State((280, 280, 0, 0), model, Adam(model.parameters()))

    def adam_after_it(device):
        """Two moments for each of 70 parameters, and a float32 step counter for each tensor."""
        world = Moments.adam_before_its_first_step(device)
        world.optimizer.step()
        return world._replace(want=(280, 280, 0, 2 * 280 + 2 * 4))

    def sgd_without_momentum(device):
        model = trained(device, 3, 4)
        (optimizer := SGD(model.parameters(), lr=0.1)).step()
        return State((64, 64, 0, 0), model, optimizer)

    def momentum_for_a_loss_too(device):
        """The loss's own parameters are not the model's; their momentum is the optimizer's."""
        model, loss = trained(device, 3, 4), trained(device, 4, 2)
        both = [*model.parameters(), *loss.parameters()]
        (optimizer := SGD(both, lr=0.1, momentum=0.9)).step()
        return State((64, 64, 0, 64 + 40), model, optimizer)


class Sharing:
    def weights_tied_in_two_ways(device):
        """One Parameter in two layers (GPT's head), and two Parameters on one storage."""
        embedding, head, twin = (nn.Embedding(19, 6, device=device) for _ in range(3))
        head.weight = embedding.weight
        twin.weight = nn.Parameter(embedding.weight.detach())
        return State((4 * 19 * 6, 0, 0, 0), nn.ModuleList([embedding, head, twin]))

    def gradients_in_one_flat_tensor(device):
        """As DDP keeps them, one behind the other; the flat tensor has 40 floats."""
        model, flat = nn.Linear(8, 4, device=device), torch.zeros(40, device=device)
        model.weight.grad, model.bias.grad = flat[:32].view(4, 8), flat[32:36]
        return State((144, 160, 0, 0), model)

    def a_buffer_with_a_gradient_in_it(device):
        model = nn.Linear(8, 4, bias=False, device=device)
        model.register_buffer("flat", torch.zeros(40, device=device))
        model.weight.grad = model.flat[:32].view(4, 8)
        return State((128, 160, 0, 0), model)

    def a_buffer_that_looks_at_a_parameter(device):
        model = nn.Linear(8, 4, bias=False, device=device)
        model.register_buffer("row", model.weight.detach()[1])
        return State((128, 0, 0, 0), model)

    def state_that_is_the_gradient(device):
        model, own = trained(device, 7, 4), torch.zeros(3, device=device)
        state = {"last": model[0].weight.grad, "own": own}
        return State((128, 128, 0, 12), model, with_state(model, state))


class Views:
    def an_expanded_buffer(device):
        wide = torch.zeros(3, 1, device=device).expand(3, 1000)
        return State((0, 0, 12, 0), with_buffers(wide=wide))

    def slices_of_large_tensors(device):
        large, odd = torch.zeros(500, device=device), torch.zeros(100, device=device).double()
        slices = with_buffers(first=large[:1], second=large[1:3], odd=odd[1::2])
        return State((0, 0, 4 * 500 + 8 * 100, 0), slices)

    def a_buffer_with_gaps(device):
        """Rows of 3 floats, 10 apart: the last float of four rows is number 33."""
        gaps = torch.empty_strided((4, 3), (10, 1), device=device)
        return State((0, 0, 4 * 33, 0), with_buffers(gaps=gaps))


class Deep:
    def tensors_in_lists_dicts_and_tuples(device):
        model, old = nn.Linear(2, 2, device=device), torch.zeros(5, device=device)
        deep = {"deep": (torch.zeros(7, dtype=torch.float64, device=device), None)}
        pair = (3, torch.zeros(11, device=device))
        optimizer = with_state(model, {"pair": pair, "old": [old, deep]})
        return State((24, 0, 0, 4 * 11 + 4 * 5 + 8 * 7), model, optimizer)


class Hyperparameters:
    def a_tensor_as_learning_rate(device):
        model = trained(device, 3, 4)
        adam = Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        return State((64, 64, 0, 0), model, adam)


class Meta:
    def tied_layers_on_the_meta_device(device):
        model = nn.Sequential(nn.Linear(8, 4, device="meta"), nn.Linear(4, 8, device="meta"))
        model[1].weight = model[0].weight
        return State((4 * (32 + 4 + 8), 0, 0, 0), model)
