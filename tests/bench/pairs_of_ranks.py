"""Peers of the katas about shards and of the ruler: see bench.pairs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile

from bench.pairs import Pair, World
from kit.laws import draw
from kit.laws.toys import mlp
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import FEATURES, Block, Model
from lab.measure import solution

RANKS = 8
adam = partial(torch.optim.AdamW, foreach=True)


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _model() -> tuple[Any, Any]:
    draw.seed(0)
    return Model(256, blocks=8), draw.randn(64, FEATURES)


def _trains(model: Any, optimizer: Any, x: Any) -> World:
    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, [model, optimizer, x]


def _ours_wrap() -> World:
    model, x = _model()
    return _trains(model, solution("fsdp_wrap").wrap(model, _mesh(), Block, adam), x)


def _fully_shard() -> World:
    model, x = _model()
    mesh = _mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trains(model, adam(model.parameters()), x)


def _fsdp1() -> World:
    model, x = _model()
    policy = ModuleWrapPolicy({Block})
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    return _trains(sharded, adam(sharded.parameters()), x)


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _saves() -> tuple[Any, Any, Path]:
    model, x = _model()
    step, (_, optimizer, _) = _trains(model, adam(model.parameters()), x)
    step()
    return model, optimizer, Path(tempfile.mkdtemp(prefix="peers-"))


def _ours_save() -> World:
    model, optimizer, folder = _saves()
    numbers, save = itertools.count(1), solution("sharded_checkpoint").save
    return lambda: save(folder, model, optimizer, next(numbers)), [model, optimizer]


def _dcp_save() -> World:
    model, optimizer, folder = _saves()
    numbers = itertools.count(1)

    def step() -> None:
        state, optimized = get_state_dict(model, optimizer)
        parts = {"model": state, "optimizer": optimized}
        dcp.save(parts, checkpoint_id=folder / str(next(numbers)))

    return step, [model, optimizer]


def _measured() -> tuple[Any, list[Any]]:
    draw.seed(0)
    model, x = mlp(*[256] * 9), draw.randn(512, 256)
    return lambda: model(x).square().mean().backward(), [model, x]


def _ours_ruler() -> World:
    step, known = _measured()
    existing: list[Any] = [*known[0].parameters(), known[1]]
    peak = solution("memory_measurement").peak_memory
    return lambda: peak(step, "cpu", existing), known


def _profiler() -> World:
    step, known = _measured()

    def measured() -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
        found.events()

    return measured, known


def _mem_tracker() -> World:
    from torch.distributed._tools.mem_tracker import MemTracker

    step, known = _measured()

    def measured() -> None:
        tracker = MemTracker()
        tracker.track_external(*known)
        with tracker:
            step()
        tracker.get_tracker_snapshot("peak")

    return measured, known


RANK = f"rank 0 of {RANKS}, 8 blocks 256 wide"
WITHIN = partial(simulated_world, RANKS)
PAIRS_OF_RANKS = [
    Pair("fsdp_wrap", "fully_shard", RANK, _ours_wrap, _fully_shard, within=WITHIN),
    Pair(
        *("fsdp_wrap", "FSDP1", RANK, _ours_wrap, _fsdp1),
        reason="FSDP1 makes one flat parameter of a unit and copies nothing around its calls; with "
        "FSDP2 each parameter stays itself, frozen, of its dtype and with its name",
        within=WITHIN,
    ),
    Pair(
        "sharded_checkpoint",
        "dcp.save",
        "8 blocks 256 wide",
        _ours_save,
        _dcp_save,
        within=one_rank,
    ),
    Pair("memory_measurement", "torch.profiler", "8 layers 256 wide", _ours_ruler, _profiler),
    Pair("memory_measurement", "MemTracker", "8 layers 256 wide", _ours_ruler, _mem_tracker),
]
