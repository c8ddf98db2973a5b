"""One save_whole as a picture: parameters gathered on a rank that writes nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from kit.memory.account import Account
from kit.ranks.world import World
from specs.sharded_checkpoint import ranks_whole

TITLE = "save_whole on rank 1 of 2, 6 blocks 256 wide"


def timeline(
    answer: ModuleType, reference: ModuleType, world: World, tmp_path: Path
) -> dict[str, Account]:
    """The plain way is the whole state dict on every rank."""
    ways = {"plain": reference, "reference": reference, "yours": answer}
    return {
        name: world.run(way, ranks_whole.books, tmp_path / f"{name}.pt", name == "plain")[1]
        for name, way in ways.items()
    }
