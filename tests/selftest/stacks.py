"""A stack of equal blocks for the tests of the simulated world, and the sizes that it must have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.memory.account import Account, account
from kit.ranks.collectives import Collective, collectives

BLOCKS, SAMPLES, WIDTH, HIDDEN = 3, 70, 61, 83
SHAPES = ((HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))  # of one block's parameters

World = Callable[[int], AbstractContextManager[Any]]


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class Stack(nn.Module):
    """BLOCKS blocks, checkpointed or not; (SAMPLES, WIDTH) to the same."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        draw.seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def shard(
    model: Stack, mesh: Any, *, blocks: bool = True, root: bool = True, **options: Any
) -> Any:
    """The model under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks if blocks else ():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options) if root else model


def bf16() -> Any:
    """The policy of FSDP2: bfloat16 parameters, float32 reductions."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def books(
    world: World, ranks: int, *, sgd: bool = True, checkpointed: bool = False, **options: Any
) -> tuple[Account, list[Collective]]:
    """The first step of rank 0: its account, and what it calls."""
    with world(ranks) as mesh:
        model = shard(Stack(checkpointed), mesh, **options)
        optimizer = make_optimizer(model, sgd)
        x = draw.randn(SAMPLES, WIDTH)

        def step() -> None:
            model(x).float().square().mean().backward()
            optimizer.step()

        with collectives() as calls:
            return account(step, model=model, optimizer=optimizer, known=[x]), calls


def make_optimizer(model: nn.Module, sgd: bool = False) -> torch.optim.Optimizer:
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    return kind(model.parameters(), lr=0.1, foreach=True)


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def numel(shape: tuple[int, ...], ranks: int = 1) -> int:
    """Elements of a parameter on one of so many ranks, padding included."""
    rows, *rest = shape
    return -(-rows // ranks) * (rest[0] if rest else 1)


def part(ranks: int) -> int:
    """Bytes of the shards of one block, a storage for each parameter."""
    return sum(rounded(4 * numel(shape, ranks)) for shape in SHAPES)


def gathered(ranks: int, size: int = 4) -> int:
    """Bytes of one gathered block, a storage for each parameter; the padding is gathered too."""
    return sum(rounded(size * ranks * numel(shape, ranks)) for shape in SHAPES)


def together(ranks: int) -> int:
    """Elements of the shards of one block, as they are sent."""
    return sum(numel(shape, ranks) for shape in SHAPES)
