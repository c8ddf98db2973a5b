"""The simulated world and the dry run: what is refused, what is left behind, whose rank it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from kit.laws import draw
from kit.memory.account import account
from kit.memory.ruler import measure
from kit.ranks.collectives import Collective, collectives
from kit.ranks.simulated import dry_run, simulated_world
from selftest.stacks import BLOCKS, Stack, World, make_optimizer, shard

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 does not run on the cpu"
)

both_worlds = pytest.mark.parametrize("enter", [simulated_world, dry_run])


@pytest.fixture(autouse=True)
def _no_group_is_left_behind() -> Any:
    yield
    assert not dist.is_initialized()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert type(torch.ones(1)) is torch.Tensor


@both_worlds
@pytest.mark.parametrize("size", [1, 8, 1024])
def test_a_world_has_its_size_and_a_mesh_over_all_ranks(enter: World, size: int) -> None:
    with enter(size) as mesh:
        assert (mesh.size(), mesh.ndim, mesh.device_type) == (size, 1, "cpu")
        assert (dist.get_world_size(), dist.get_rank()) == (size, 0)


@both_worlds
@pytest.mark.parametrize(("size", "rank"), [(0, 0), (-3, 0), (8, 8), (8, -1)])
def test_sizes_and_ranks_that_cannot_be_are_refused(enter: Any, size: int, rank: int) -> None:
    wrong = size if size < 1 else rank
    with pytest.raises(ValueError, match=str(wrong)), enter(size, rank=rank):
        pass


@pytest.mark.parametrize("rank", [0, 2])
def test_the_other_ranks_are_as_this_one(rank: int) -> None:
    """An answer may compare its counts with those of all ranks, and refuse where they differ."""
    with simulated_world(4, rank=rank) as mesh:
        mine = torch.tensor([3, 5])
        every = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(every, mine, group=mesh.get_group())
        assert all(torch.equal(one, mine) for one in every)
        for op, times in ((dist.ReduceOp.SUM, 4), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.MIN, 1)):
            reduced = mine.clone()
            dist.all_reduce(reduced, op, group=mesh.get_group())
            assert torch.equal(reduced, times * mine)
        objects: list[Any] = [None] * 4
        dist.all_gather_object(objects, {"samples": 3})
        assert objects == [{"samples": 3}] * 4


@both_worlds
def test_a_world_inside_a_world_is_refused_and_leaves_the_outer_one_alone(enter: World) -> None:
    with simulated_world(8):
        with pytest.raises(RuntimeError, match="has a process group"), enter(64):
            pass
        assert dist.get_world_size() == 8


@both_worlds
def test_an_error_in_the_block_comes_out(enter: World) -> None:
    def block() -> None:
        with enter(8) as mesh:
            shard(Stack(), mesh)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()


@both_worlds
def test_the_block_may_destroy_its_group_itself(enter: World) -> None:
    with enter(8):
        dist.destroy_process_group()


@both_worlds
def test_a_rank_holds_its_own_rows_also_after_a_world_of_another_rank(enter: Any) -> None:
    rows = []
    for rank in (0, 7, 3, 7, 7):
        with enter(8, rank=rank) as mesh:
            weight = fully_shard(nn.Linear(5, 61, bias=False), mesh=mesh).weight.detach()
            # made by DTensor's cached shardings, which know the rank of the world they come from
            made = weight.new_zeros(weight.shape), (weight * 2).t().redistribute(mesh, [Shard(0)])
            assert [each.device_mesh.get_local_rank() for each in made] == [rank, rank]
            rows.append((len(weight.to_local()), len(made[0].to_local())))
    # 61 rows on 8 ranks: 8 each, and 5 for the last
    assert rows == [(8, 8), (5, 5), (8, 8), (5, 5), (5, 5)]


def test_a_second_dry_run_of_the_same_rank_calls_and_holds_the_same() -> None:
    def run() -> Any:
        with dry_run(8) as mesh, collectives() as calls:
            model = shard(Stack(), mesh)
            optimizer = make_optimizer(model)
            x = draw.randn(3, 61)

            def step() -> None:
                model(x).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

            books = account(step, model=model, optimizer=optimizer, known=[x])
            return books, calls

    assert run() == run() == run()


def test_a_dry_run_of_billions_of_parameters_holds_no_memory() -> None:
    d = 65_536

    def run() -> None:
        with dry_run(64) as mesh:
            model = nn.Sequential(nn.Linear(d, d, bias=False), nn.ReLU())
            fully_shard(model, mesh=mesh)
            optimizer = make_optimizer(model)
            x = draw.randn(3, d)

            def step() -> None:
                model(x).sum().backward()
                optimizer.step()

            books.append(account(step, model=model, optimizer=optimizer, known=[x]))

    books: list[Any] = []
    assert measure(run).peak < 100_000
    most, whole = books[0].most, 4 * d * d
    assert most["unsharded"] == whole
    # FSDP2 still holds the last gradient of a group when it reduces them; that of torch 2.15 not
    held = whole // 64 if torch.__version__ < "2.15" else 0
    assert most["gradients"] == whole + held
    assert most["shards"] == whole // 64
    assert most["optimizer state"] == 2 * whole // 64 + 512


@both_worlds
@pytest.mark.parametrize("first", ["collectives", "account"])
def test_collectives_and_account_nest_either_way_and_see_through_dtensors(
    enter: World, first: str
) -> None:
    calls: list[Collective] = []
    with enter(8) as mesh:
        model = shard(Stack(), mesh)
        optimizer = make_optimizer(model)
        x = draw.randn(3, 61)

        def step() -> None:
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        def inside() -> None:
            with collectives() as seen:
                step()
            calls.extend(seen)

        if first == "collectives":
            with collectives() as calls:
                books = account(step, model=model, optimizer=optimizer)
        else:
            books = account(inside, model=model, optimizer=optimizer)
    counts = Counter(call.kind for call in calls)
    # the norm of all gradients is summed over the ranks: one call by an operator on a DTensor
    assert counts == {"all_gather": 2 * BLOCKS, "reduce_scatter": BLOCKS, "all_reduce": 1}
    assert books.most["communication"] > 0
