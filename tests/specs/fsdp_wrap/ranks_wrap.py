"""What runs on every rank: programs for the specs of wrap."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kit.laws.checks import check_close, check_equal
from kit.ranks.rank import device
from specs.fsdp_wrap.models import (
    Batch,
    Block,
    Trained,
    check_named,
    data,
    gradients,
    gradients_of,
    joined,
    make,
    momentum,
    mse,
    named,
    train_alone,
    weights,
)
from specs.fsdp_wrap.shapes import SHAPES, Weigh, WeighTwice

STEPS = 2


@functools.cache  # a mesh has process groups, which are never given back
def mesh() -> DeviceMesh:
    """Over all ranks of the world."""
    return init_device_mesh(device().type, (dist.get_world_size(),))


@functools.cache
def meshes(inner: int) -> DeviceMesh:
    """Groups of so many ranks, side by side: those of one share the model."""
    shape = (dist.get_world_size() // inner, inner)
    return init_device_mesh(device().type, shape, mesh_dim_names=("groups", "shards"))


def batches(number: int, size: int) -> list[Batch]:
    """The step with this number: a batch for each rank, of as many samples."""
    return data([3] * size, seed=number)


def train(answer: Any, rank: int, shape: str, dtype: torch.dtype = torch.float32) -> Trained:
    """Two steps with momentum, each rank with data of its own."""
    model, kinds = SHAPES[shape]()
    model.to(device())
    optimizer = answer.wrap(model, mesh(), kinds, momentum, dtype=dtype)
    steps = [batches(number, dist.get_world_size())[rank] for number in range(STEPS)]
    return _train(model, optimizer, steps)


def alone(shape: str, size: int) -> Trained:
    """What `train` on so many ranks is to come to."""
    steps = [batches(number, size) for number in range(STEPS)]
    first, both = (train_alone(SHAPES[shape]()[0], steps[:count]) for count in (1, STEPS))
    return both._replace(gradients=first.gradients)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[Batch]) -> Trained:
    """Unlike `train_alone` it returns the gradients of the first step."""
    parameters = named(model)
    losses = [_step(model, optimizer, steps[0])]
    first = gradients_of(parameters)
    losses += [_step(model, optimizer, batch) for batch in steps[1:]]
    return Trained(losses, [], weights(model), first)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = _backward(model, optimizer, batch)
    optimizer.step()
    return loss


def _backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    inputs, targets = (tensor.to(device()) for tensor in batch)
    optimizer.zero_grad()
    output = model(inputs)
    cause = "what the model returns is left in bfloat16, and a loss of it has 8 bits"
    check_equal(output.dtype, torch.float32, "dtype of the model's output", cause=cause)
    loss = mse(output, targets)
    loss.backward()
    return loss.item()


def in_groups(answer: Any, rank: int, inner: int) -> None:
    """Each group of `inner` ranks trains a model of its own, with data of its own."""
    model, group = make().to(device()), rank // inner
    optimizer = answer.wrap(model, meshes(inner)["shards"], Block, momentum)
    steps = [batches(10 * group + number, inner) for number in range(STEPS)]
    got = _train(model, optimizer, [step[rank % inner] for step in steps])
    first, both = (train_alone(make(), steps[:count]) for count in (1, STEPS))
    cause = "another group than the mesh's takes part: that of all ranks, which is the default"
    check_named(got.gradients, first.gradients, f"gradient of group {group}", cause=cause)
    check_named(got.weights, both.weights, f"weights of group {group}", cause=cause)


def keeps_values(answer: Any, rank: int, dtype: torch.dtype = torch.float32) -> None:
    """Weights and flags right after wrap."""
    for name in ("odd_sizes", "frozen", "nested"):
        model, kinds = SHAPES[name]()
        want = weights(model)
        trained = [p.requires_grad for p in model.parameters()]
        answer.wrap(model.to(device()).eval(), mesh(), kinds, momentum, dtype=dtype)
        what = f"of the model {name.replace('_', ' ')} after wrap"
        cause = "the values, or their digits, get lost: they are those of the model that is given"
        got = weights(model)
        check_named(got, want, f"value {what}", cause=cause, rtol=0, atol=0)
        for key, value in want.items():
            cause = "dtype is for what is gathered: shards and buffers stay float32"
            check_equal(got[key].dtype, value.dtype, f"dtype of {key} {what}", cause=cause)
        cause = "requires_grad is what the caller has set"
        check_equal([p.requires_grad for p in model.parameters()], trained, what, cause=cause)
        cause = "train() is called: whether dropout is on is the caller's business"
        on = any(module.training for module in model.modules())
        check_equal(on, False, f"training mode {what}", cause=cause)


def evaluates(answer: Any, rank: int, reshard_after_forward: bool) -> None:
    """Forward passes without a graph, before each step of two, and before the weights move."""
    model, alone = (make(blocks=2, drop=d).to(device()) for d in (0.5, 0.0))
    own = momentum(alone.parameters())
    optimizer = answer.wrap(
        model.eval(), mesh(), Block, momentum, reshard_after_forward=reshard_after_forward
    )
    for number in range(STEPS):
        every = batches(number, dist.get_world_size())
        inputs = every[rank][0].to(device())
        cause = "a forward pass that no backward follows sees other weights, or has dropout on; or "
        cause += "what one has gathered before a step is still there after it"
        for when in (f"after {number} steps", f"between backward and step {number + 1}"):
            with torch.no_grad():
                got, want = model(inputs), alone(inputs)
            check_close(got, want, f"output in eval mode {when}", cause=cause, rtol=1e-4)
            if when.startswith("after"):
                _backward(model, optimizer, every[rank])
                _backward(alone, own, joined(every))
        optimizer.step()
        own.step()


def weigh(answer: Any, rank: int, values: list[float], lr: float, count: int) -> Trained:
    """Steps of plain SGD on the sum of what the model makes of this rank's value."""
    model = WeighTwice().to(device())
    optimizer = answer.wrap(
        model, mesh(), Weigh, lambda ps: torch.optim.SGD(ps, lr=lr), dtype=torch.bfloat16
    )
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.full((1, 3), values[rank], device=device())).sum().backward()
        optimizer.step()
    return Trained([], [], weights(model), gradients(model))
