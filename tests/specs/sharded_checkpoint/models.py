"""What is built, saved and loaded: models, their first values, and training by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.toys import mse
from kit.ranks.rank import device
from kit.ranks.shapes import Outer
from kit.ranks.shards import full, mesh, named, weights
from kit.ranks.toys import FEATURES, OUTPUTS, Block, Model, data, freeze

SETTINGS = "settings of groups"
BLOCK_TYPES = (Block, Outer, nn.Sequential)


class Tiny(nn.Module):
    """Two weights, of 16 and 64 bits; the name of one is a prefix that checkpoints like to use."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16))
        self.model = nn.Linear(FEATURES, OUTPUTS, bias=False, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(self.block(inputs).double())


class Rich(Model):
    """A tied weight, a weight of one row, and buffers, one of which counts training steps."""

    def __init__(self) -> None:
        super().__init__(blocks=1, tied=True)
        self.scale = torch.full((OUTPUTS,), 2.0)
        self.gain = nn.Parameter(torch.ones(1))  # only rank 0 has a row of it
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.blocks[0].eval()  # no call may change a mode, whichever it is

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += torch.is_grad_enabled()
        return super().forward(inputs) * self.gain + 0.1 * (self.seen - 2**40)


def sharded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """As `build` shards it, with its own values; it computes in this dtype."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model.to(device())
    for module in reversed([*model.modules()]):
        if isinstance(module, BLOCK_TYPES) or module is model:
            fully_shard(module, mesh=mesh(), mp_policy=policy)
    return model


def adamw(parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> Optimizer:
    """Fused: DTensor needs milliseconds for each operation."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, fused=True)


def momentum(parameters: Iterable[nn.Parameter], lr: float = 0.02) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def in_groups(parameters: Iterable[nn.Parameter], kind: Any, lr: float) -> Optimizer:
    """Two groups. Trainable vectors have another rate, and more state with AdamW."""
    every = [*parameters]
    optimizer: Optimizer = kind([p for p in every if p.ndim > 1], lr=lr)
    vectors = [p for p in every if p.ndim == 1 and p.requires_grad]
    optimizer.add_param_group({"params": vectors, "lr": lr / 2, "amsgrad": True})
    return optimizer


def step(model: nn.Module, optimizer: Optimizer, number: int) -> float:
    """A step on 12 samples, shared by 1, 2 or 3 ranks; the mean loss, the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = (t.chunk(ranks)[rank].to(device()) for t in data([12], seed=number)[0])
    optimizer.zero_grad()
    loss = mse(model(inputs), targets)
    loss.backward()
    optimizer.step()
    loss = loss.detach() / ranks
    dist.all_reduce(loss)
    return loss.item()


def move(model: nn.Module, optimizer: Optimizer) -> None:
    """Change weights and optimizer state, as a training step does."""
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()


def trained(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Sharded, with gradients and AdamW state; the optimizer has its own order of parameters."""
    optimizer = adamw(sorted(sharded(model).parameters(), key=torch.numel))
    move(model, optimizer)
    return model, optimizer


def small(seed: int = 4) -> tuple[nn.Module, Optimizer]:
    """A tiny model after a step, which is the same with every seed."""
    draw.seed(seed)
    model, optimizer = trained(Tiny())
    for held in optimizer.state.values():
        held["step"] += 256  # 257 is no number of bfloat16
    return model, optimizer


def of_all(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, optimizer state and settings, whole, by name."""
    held = {
        f"{key} of {name}": torch.as_tensor(value)
        for name, p in named(model)
        if len(p) > 1  # ranks without rows need no state
        for key, value in optimizer.state.get(p, {}).items()
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {**weights(model), **full(held), SETTINGS: groups}


def tied(seed: int = 4) -> Model:
    draw.seed(seed)
    return freeze(Rich(), ["blocks.0.up", "head.bias"])


def other() -> Model:
    """With other weights and buffers than `tied`."""
    model = tied(seed=9)
    for buffer in model.buffers():
        buffer.fill_(7)
    return model


def evaluate(model: nn.Module) -> None:
    """A forward without backward: parameters of the root stay unsharded."""
    with torch.no_grad():
        model(data([2], seed=1)[0][0].to(device(), next(model.parameters()).dtype))
