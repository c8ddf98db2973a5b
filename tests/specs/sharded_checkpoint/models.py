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
from kit.laws.checks import check_equal
from kit.laws.toys import mse
from kit.ranks.rank import device
from kit.ranks.shapes import Outer
from kit.ranks.shards import full, mesh, named, weights
from kit.ranks.toys import FEATURES, OUTPUTS, Block, Model, data, freeze

SETTINGS = "settings of groups"
BLOCK_TYPES = (Block, Outer, nn.Sequential)


class Thin(Block):
    """A block with one parameter."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up = nn.Linear(FEATURES, 2 * FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).unflatten(-1, (2, -1)).sum(-2)


class Tiny(nn.Module):
    """Two parameters, of 16 and of 64 bits: files take as long as they have tensors.

    One has a name with which a checkpoint may begin its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Thin()])
        self.to(torch.bfloat16)
        self.model = nn.Linear(FEATURES, OUTPUTS, bias=False, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(self.blocks[0](inputs).double())


class Rich(Model):
    """A tied weight, one of one row, and buffers of all kinds, in one of which training counts."""

    def __init__(self) -> None:
        super().__init__(blocks=1, tied=True)
        self.scale = torch.full((OUTPUTS,), 2.0)
        self.gain = nn.Parameter(torch.ones(1))  # only rank 0 has a row of it
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
        self.register_buffer("table", torch.tensor([[0.5 + 2j, 3j]]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.blocks[0].eval()  # no call may change a mode, whichever it is

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += torch.is_grad_enabled()
        return super().forward(inputs) * self.gain + 0.1 * (self.seen - 2**40)


def sharded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """As `build` shards it, with the values that it has; it computes in this dtype."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model.to(device())
    for module in reversed([*model.modules()]):
        if isinstance(module, BLOCK_TYPES) or module is model:
            # What has been evaluated: a thin block is given back, other units stay gathered.
            is_thin = isinstance(module, Thin)
            fully_shard(module, mesh=mesh(), reshard_after_forward=is_thin, mp_policy=policy)
    return model


def adamw(parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> Optimizer:
    """One operation for all shards: DTensor takes milliseconds to think about each."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, fused=True)


def momentum(parameters: Iterable[nn.Parameter], lr: float = 0.02) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def in_groups(parameters: Iterable[nn.Parameter], kind: Any, lr: float) -> Optimizer:
    """Two groups of parameters; that of vectors has an own rate, and with AdamW more state."""
    every = [*parameters]
    optimizer: Optimizer = kind([p for p in every if p.ndim > 1], lr=lr)
    vectors = [p for p in every if p.ndim == 1]
    optimizer.add_param_group({"params": vectors, "lr": lr / 2, "amsgrad": True})
    return optimizer


def step(model: nn.Module, optimizer: Optimizer, number: int) -> float:
    """A step on 12 samples, which 1, 2 and 3 ranks share; the mean loss, the same on every rank."""
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
    """Other weights and a state of the optimizer, as after a step, without its calls."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def trained(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Sharded, with gradients and state of AdamW, which has the parameters in another order."""
    optimizer = adamw(sorted(sharded(model).parameters(), key=torch.numel))
    move(model, optimizer)
    return model, optimizer


def small(seed: int = 4) -> tuple[nn.Module, Optimizer]:
    """A tiny model that has been trained, by the same step whatever its seed."""
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
        for key, value in optimizer.state.get(p, {}).items()
    }
    ranks = [{*names} for names in of_all([*held])]
    lacks = sorted(f"{x} on rank {n}" for n, has in enumerate(ranks) for x in ranks[0] - has)
    cause = "a rank that has no rows of a parameter has no state for it: it has an empty one"
    check_equal(lacks, [], "optimizer state that a rank lacks", cause=cause)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {**weights(model), **full(held), SETTINGS: groups}


def tied(seed: int = 4) -> Model:
    draw.seed(seed)
    return freeze(Rich(), ["blocks.0.up", "head.bias"])


def other() -> Model:
    """With other weights, modes and buffers than those of `tied`."""
    model = tied(seed=9)
    model.eval().blocks.train()
    for buffer in model.buffers():
        buffer.fill_(7)
    return model


def evaluate(model: nn.Module) -> None:
    """A forward without backward: the model's own weights stay gathered after it."""
    with torch.no_grad():
        model(data([2], seed=1)[0][0].to(device(), next(model.parameters()).dtype))
