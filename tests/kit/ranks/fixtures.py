"""What a kata about shards needs of pytest; its conftest.py imports these names.

from kit.ranks.fixtures import all_sizes, fsdp2_runs_here, worlds_meet_meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kit import forkserver
from kit.ranks.world import World


@pytest.fixture(autouse=True)
def fsdp2_runs_here(device: torch.device) -> None:
    """Skips every spec where fully_shard does not run."""
    if device.type == "cpu" and torch.__version__ < "2.7":  # compared as versions, not as text
        pytest.skip("fully_shard of torch 2.6 does not run on the cpu")


@pytest.fixture(scope="session")
def all_sizes(request: pytest.FixtureRequest) -> list[int]:
    """The sizes of all worlds of this run: parameters `world`, or `saving` and `loading`."""
    return sorted({size for item in request.session.items for size in _sizes(item)})


@pytest.fixture(autouse=True)
def worlds_meet_meanwhile(
    request: pytest.FixtureRequest, worlds: Callable[[int], World], all_sizes: list[int]
) -> Iterator[None]:
    """Once a spec has passed, the ranks of all sizes start, while others are simulated."""
    yield
    if request.session.testsfailed or not forkserver.is_warm():
        return
    for size in all_sizes:
        worlds(size).start()


def _sizes(item: pytest.Item) -> list[int]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "world" in getattr(item, "fixturenames", ()):
        return [parameters.get("world", 2)]
    return [parameters[key] for key in ("saving", "loading") if key in parameters]
