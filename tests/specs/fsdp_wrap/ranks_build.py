"""What runs on every rank: programs for the specs of build."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import check_raises
from kit.memory.ruler import measure
from kit.ranks.collectives import collectives
from kit.ranks.rank import device
from specs.fsdp_wrap.models import (
    FEATURES,
    OUTPUTS,
    Block,
    Model,
    Trained,
    full,
    gradients,
    momentum,
    mse,
    train_alone,
    weights,
)
from specs.fsdp_wrap.ranks_step import Plan, batches, of_all
from specs.fsdp_wrap.ranks_wrap import mesh, meshes

SEED = 6


class Outer(nn.Module):
    """A block with a block inside, and a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.inner = Block(width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.tanh(self.gate(x)) + self.shift


class Nested(nn.Module):
    """Blocks in blocks; a parameter of the root itself, by two names; buffers of three kinds."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(OUTPUTS))
        self.offset_again = self.offset
        self.register_buffer("scale", torch.ones(7, 1))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(OUTPUTS), persistent=False)
        self.head = nn.Linear(width, OUTPUTS)
        self.outer = nn.Sequential(Outer(width), Outer(width))
        self.embed = nn.Linear(FEATURES, width)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.head(self.outer(self.embed(inputs))) + self.offset
        return x * self.mask * self.scale[0] + self.steps[0]


def tied_and_frozen() -> Model:
    model = Model(tied=True)
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "tied_and_frozen": tied_and_frozen,
    "blocks_in_blocks": Nested,
}
BLOCK_TYPES = (Block, Outer)


def init(module: nn.Module) -> None:
    """Random values for all that is the module's own: whoever is out of order gets other ones."""
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, mean=0.02, std=0.15)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
        else:
            buffer.fill_(3)


def built_alone(kind: str) -> nn.Module:
    """What one process has.

    To be called on a rank: `init` draws where the parameters are, and a GPU has other numbers.
    """
    model = MODELS[kind]().to(device())
    draw.seed(SEED)
    for module in model.modules():
        init(module)
    return model


def built(
    answer: Any, kind: str, make_optimizer: Callable[..., Optimizer] = momentum, **options: Any
) -> tuple[nn.Module, Optimizer]:
    types = BLOCK_TYPES if kind == "blocks_in_blocks" else Block
    draw.seed(SEED)
    return answer.build(MODELS[kind], mesh(), types, init, make_optimizer, **options)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, also the buffers that are not in the state dict."""
    return {**weights(model), **full(dict(model.named_buffers()))}


def first_values(answer: Any, rank: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model that was just built has, and what one process has."""
    alone = _first_values_alone(kind)  # before the answer can change what both are made with
    model, _ = built(answer, kind)
    names = dict(model.named_parameters(remove_duplicate=False))
    on_meta = [name for name, value in model.state_dict().items() if value.is_meta]
    found = {
        "values": {} if on_meta else values(model),
        "tied": ties(model),
        "mode": {module.training for module in model.modules()},
        "trained": [name for name, p in names.items() if p.requires_grad],
        "kinds": {type(p).__name__ for p in names.values()},
        "on meta": on_meta,
    }
    return found, alone


def ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    groups: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def train_built(
    answer: Any, rank: int, kind: str, plan: Plan, steps: int = 2
) -> tuple[Trained, Trained]:
    """What it comes to, and what one process comes to with the data of all ranks."""
    alone = train_alone(built_alone(kind), [of_all(plan, step) for step in range(steps)])
    model, optimizer = built(answer, kind)
    results = [
        answer.train_step(model, batches(plan, number, rank), mse, optimizer)
        for number in range(steps)
    ]
    losses = [result.loss.item() for result in results]
    norms = [result.grad_norm.item() for result in results]
    return Trained(losses, norms, weights(model), gradients(model)), alone


def _first_values_alone(kind: str) -> dict[str, Any]:
    model = built_alone(kind)
    every = model.named_parameters(remove_duplicate=False)
    trained = [name for name, p in every if p.requires_grad]
    return {"values": values(model), "tied": ties(model), "trained": trained}


def makes(answer: Any, rank: int) -> list[str]:
    """On which device each call of make_model has made its tensors."""
    seen = []

    def make_model() -> Model:
        seen.append(torch.empty(1).device.type)
        return Model()

    answer.build(make_model, mesh(), Block, init, momentum)
    seen.append(torch.empty(1).device.type)
    return seen


def peak_of_build(
    answer: Any, over: DeviceMesh, width: int, blocks: int, where: torch.device
) -> int:
    """Bytes above the baseline while a model is built; its optimizer has no state yet."""
    reading = measure(
        lambda: answer.build(functools.partial(Model, width, blocks), over, Block, init, momentum),
        where,
    )
    return reading.above_baseline


def peak(answer: Any, rank: int, width: int, blocks: int) -> int:
    return peak_of_build(answer, mesh(), width, blocks, device())


def options(answer: Any, rank: int, plan: Plan) -> dict[str, Any]:
    """What each option of `build` does to forward and backward, one after another."""
    ((inputs, targets),) = batches(plan, 0, rank)
    found: dict[str, Any] = {}
    want = weights(built_alone("plain"))
    for name, value in (
        ("dtype", torch.bfloat16),
        ("checkpoint", True),
        ("reshard_after_forward", False),
    ):
        model, _ = built(answer, "plain", **{name: value})
        first = weights(model)
        dtypes: list[torch.dtype] = []
        model.blocks[0].up.register_forward_pre_hook(
            lambda _, args, d=dtypes: d.append(args[0].dtype)
        )
        with collectives() as calls:
            mse(model(inputs), targets).backward()
        found[name] = {
            "other values": [n for n in first if not torch.equal(first[n], want[n])],
            "dtype inside a block": str(dtypes[0]),
            "dtypes of parameters": [str(kind) for kind in {p.dtype for p in model.parameters()}],
            "forwards of a block": len(dtypes),
            "gathers": sum(call.kind == "all_gather" for call in calls),
        }
    return found


def refused(answer: Any, rank: int) -> None:
    """Each of what `wrap` refuses."""

    class Other(nn.Module):
        pass

    def shares_a_parameter() -> Model:
        model = Model()
        model.blocks[1].norm.weight = model.blocks[0].norm.weight
        return model

    def build(make_model: Any = Model, over: Any = None, types: Any = Block, **more: Any) -> None:
        answer.build(make_model, over or mesh(), types, init, momentum, **more)

    cases: list[tuple[str, Callable[[], object], Sequence[object]]] = [
        ("for a mesh of two dimensions", lambda: build(over=meshes(1)), ["2"]),
        ("for a class that is not there", lambda: build(types=(Block, Other)), ["Other"]),
        ("for dtype=torch.float16", lambda: build(dtype=torch.float16), ["float16"]),
        (
            "for a parameter that two blocks share",
            lambda: build(shares_a_parameter),
            ["norm.weight"],
        ),
    ]
    for when, call, mentions in cases:
        check_raises(call, ValueError, mentions=mentions, when=when)
