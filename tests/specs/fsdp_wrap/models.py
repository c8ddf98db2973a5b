"""What the specs of fsdp_wrap share: a model, data, one process, and the arithmetic of shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import check, check_close, check_equal

Batch = tuple[Tensor, Tensor]

FEATURES, OUTPUTS = 5, 3


class Block(nn.Module):
    """x + down(drop(tanh(up(norm(x))))); the hidden width is 3 * width + 1.

    Smooth, as everything whose gradients are compared in two precisions: see kit.laws.toys.mlp.
    """

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.drop = nn.Dropout(drop)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """From (samples, 5) to (samples, 3). No size divides by 2 or 4, and 4 ranks share 3 rows.

    With `tied`, `again` has the weight of `embed`: both are in the root's unit.
    """

    def __init__(
        self, width: int = 13, blocks: int = 2, *, drop: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.again = nn.Linear(FEATURES, width) if tied else None
        if self.again is not None:
            self.again.weight = self.embed.weight
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        if self.again is not None:
            x = x + self.again(inputs)
        return self.head(x) * self.scale


def make(
    width: int = 13,
    blocks: int = 1,
    *,
    drop: float = 0.0,
    tied: bool = False,
    frozen: Sequence[str] = (),
    seed: int = 4,
) -> Model:
    """The same values in every process; `frozen` are the beginnings of names.

    The width is that of all small models: to DTensor each new shape is work for milliseconds.
    """
    draw.seed(seed)
    model = Model(width, blocks, drop=drop, tied=tied)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def data(samples: Sequence[int], seed: int) -> list[Batch]:
    """Batches of so many samples; no two seeds, and no two batches, have the same data."""
    generator = draw.generator(seed)
    return [
        (
            draw.randn(count, FEATURES, generator=generator) + number / 2,
            draw.randn(count, OUTPUTS, generator=generator) - number / 2,
        )
        for number, count in enumerate(samples)
    ]


def joined(batches: Iterable[Batch]) -> Batch:
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def mse(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def adamw(parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> Optimizer:
    """All shards in one operation, as it takes DTensor milliseconds to think about each; and what
    is no shard in another.
    """
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(type(p), []).append(p)
    groups = [{"params": found} for found in kinds.values()]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Unlike Adam it shows a gradient that is wrong by a factor."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def in_groups(
    parameters: Iterable[nn.Parameter],
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = momentum,
) -> Optimizer:
    """Two groups of parameters; the vectors have a learning rate of their own."""
    every = list(parameters)
    optimizer = make_optimizer([p for p in every if p.ndim > 1])
    optimizer.add_param_group({"params": [p for p in every if p.ndim == 1], "lr": 5e-3})
    return optimizer


class Trained(NamedTuple):
    """What training has come to: of each step the loss and the norm, and what is there at the end.

    Weights are those of the state dict, buffers included; gradients are those of the last step,
    after clipping.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def train_alone(
    model: nn.Module,
    steps: Iterable[Iterable[Batch]],
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = momentum,
    max_norm: float = math.inf,
) -> Trained:
    """One process; in each step a mean over the samples of all its batches."""
    optimizer = make_optimizer(model.parameters())
    losses, norms = [], []
    for batches in steps:
        inputs, targets = joined(batches)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms, weights(model), gradients(model))


def full(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each tensor, on the cpu. A collective if shards are among them: on every rank.

    One for all of them, because a call for each takes longer than the step that is looked at.
    """
    shards: dict[str, Any] = {n: v.detach() for n, v in values.items() if hasattr(v, "to_local")}
    every: list[Tensor] = []
    if shards:
        group = next(iter(shards.values())).device_mesh.get_group()
        mine = torch.cat([_padded(shard, group.size()) for shard in shards.values()])
        every = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(every, mine, group=group)
    result, start = {}, 0
    for name, value in values.items():
        if name in shards:
            numel = part(value, len(every))
            rows = torch.cat([flat[start : start + numel] for flat in every])
            start += numel
            value = rows[: value.numel()].view(value.shape).to(value.dtype)
        result[name] = value.detach().cpu().clone()
    return result


def _padded(shard: Any, ranks: int) -> Tensor:
    local = shard.to_local().flatten()
    return F.pad(local, (0, part(shard, ranks) - local.numel()))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return full(model.state_dict())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return gradients_of(named(model))


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names of the state dict: a wrapper may give others to named_parameters().

    FSDP2 gives every unit back to make a state dict, so a spec does not ask for one between steps.
    """
    held = model.state_dict(keep_vars=True).items()
    return [(name, p) for name, p in held if isinstance(p, nn.Parameter)]


def gradients_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    every = {name: p.grad for name, p in parameters}
    there = full({name: grad for name, grad in every.items() if grad is not None})
    return {name: there.get(name) for name in every}


def check_named(
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    what: str,
    *,
    cause: str,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Fail unless both have the same names, None in the same places, and close values."""
    __tracebackhide__ = True
    check_equal(list(got), list(want), f"names of the {what}", cause="modules have new names")
    for name, true in want.items():
        mine = got[name]
        if mine is None or true is None:
            check(
                mine is true,
                expected=f"{what} of {name}: {'none' if true is None else 'there'}",
                got="none" if mine is None else "there is one",
                cause=cause,
            )
            continue
        check_close(mine, true, f"{what} of {name}", cause=cause, rtol=rtol, atol=atol)


# The arithmetic: a rank has ceil(rows / N) rows of every parameter, N times which is at most
# N - 1 rows more than there are.


def units(model: nn.Module, block_types: Any = Block) -> list[list[nn.Parameter]]:
    """The parameters of each unit of a model that is whole: blocks in their order, the root last.

    A block inside a block comes after it, and has its own.
    """
    blocks = [m for m in model.modules() if isinstance(m, block_types) and m is not model]
    owner: dict[nn.Parameter, int] = {}
    for number, block in enumerate(blocks):
        owner.update(dict.fromkeys(block.parameters(), number))
    found: list[list[nn.Parameter]] = [[] for _ in [*blocks, model]]
    for p in model.parameters():
        found[owner.get(p, len(blocks))].append(p)
    return found


def rounded(nbytes: int) -> int:
    """What a storage counts: a multiple of 512 bytes."""
    return -(-nbytes // 512) * 512


def part(p: Tensor, ranks: int) -> int:
    """Numbers in a rank's part of a parameter, padding included."""
    return -(-len(p) // ranks) * (p.numel() // len(p))


def shard_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """Bytes of a rank's float32 parts; of all with ranks=1."""
    return sum(rounded(4 * part(p, ranks)) for p in parameters)


def whole_bytes(parameters: Iterable[Tensor], ranks: int, itemsize: int = 4) -> int:
    """Bytes of the whole parameters when `ranks` parts are put together, padding included."""
    return sum(rounded(itemsize * ranks * part(p, ranks)) for p in parameters)
