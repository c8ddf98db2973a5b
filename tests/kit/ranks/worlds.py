"""The real worlds of a run, a plugin of pytest: when they are launched, shared and ended."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import forkserver
from kit.ranks.world import World, needs_world

_WORLDS = pytest.StashKey[dict[tuple[int, str], World]]()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Real processes, two unless the spec is parametrized otherwise (`indirect=True`).

    They serve all specs of a kata. It is no fixture of the session, because pytest would put the
    specs into another order for the sake of such a parameter.
    """
    return _world(request.config, getattr(request, "param", 2))


@pytest.fixture
def worlds(request: pytest.FixtureRequest) -> Callable[[int], World]:
    """Real processes of several sizes in one spec: `worlds(4)`.

    All are on the same kind of device: what one has saved another loads.
    """
    largest = max(_sizes(request.session, request.path.parent))
    return functools.partial(_world, request.config, gpus=largest)


def ranks(config: pytest.Config) -> list[int]:
    """The processes of all worlds; they need not be children of this one."""
    return [pid for world in _of(config) for pid in world.pids]


def _of(config: pytest.Config) -> list[World]:
    return [*config.stash.get(_WORLDS, {}).values()]


def _world(config: pytest.Config, size: int, gpus: int = 0) -> World:
    # NCCL wants a GPU for each rank; where there are too few, the ranks run on the cpu.
    on_gpus = config.getoption("--device") == "cuda"
    enough = on_gpus and torch.cuda.device_count() >= max(size, gpus)
    where = "cuda" if enough else "cpu"
    return config.stash.setdefault(_WORLDS, {}).setdefault((size, where), World(size, where))


@functools.cache
def _sizes(session: pytest.Session, folder: Path) -> list[int]:
    """How large the worlds are that the specs in this folder ask for."""
    sizes: set[int] = set()
    for item in session.items:
        if item.path.parent == folder and needs_world(item):
            parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            named = {parameters[key] for key in ("saving", "loading") if key in parameters}
            sizes |= named or {parameters.get("world", 2)}
    return sorted(sizes)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the warm process import torch while other specs run."""
    if any(map(needs_world, session.items)) and not session.config.option.collectonly:
        forkserver.start()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Let the ranks of this kata meet while other specs run: after a pass, so not for a stub."""
    passed = call.when == "call" and call.excinfo is None and not item.session.testsfailed
    if passed and forkserver.is_warm() and not item.config.getoption("--helps", False):
        for size in _sizes(item.session, item.path.parent):
            _world(item.config, size).start()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks with the last spec of a kata: what they have imported and kept is theirs."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _close(item.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing outlives a run."""
    _close(config)
    forkserver.stop()


def _close(config: pytest.Config) -> None:
    for world in _of(config):
        world.close()
