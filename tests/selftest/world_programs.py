"""What the tests of the real world run in its ranks, and an answer that goes wrong in many ways."""

from __future__ import annotations

import os
import pickle

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kit.laws import draw
from kit.laws.checks import SpecFailure, check_bar
from kit.ranks.collectives import Collective, collectives

ANSWER = """\
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

IMPORTED_IN = os.getpid()


class Pair(NamedTuple):
    low: int
    high: int


class OwnError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.second = second


def double(pair):
    return Pair(2 * pair.low, 2 * pair.high)


def leave_on():
    torch.set_default_dtype(torch.float64)
    torch.autocast("cpu").__enter__()
    torch.set_grad_enabled(False)


def speak(rank):
    print("one\\ntwo", rank)
    print("no end", end="")


def tells_of_another(rank):
    if rank == 1:
        torch.load("no/such/file")
    raise ValueError("another rank has failed")


def value_error(rank):
    raise ValueError(f"bad {rank}")


def own_error():
    raise OwnError("this", "that")


def local_error():
    class Local(ValueError):
        def __reduce__(self):
            raise TypeError("no")

    raise Local("of its own")


def recursion():
    return recursion()


def todo():
    raise NotImplementedError


def reduce(numbers, group=None):
    dist.all_reduce(numbers, group=group)


def begin(numbers):
    dist.all_reduce(numbers, async_op=True)


def endless():
    while True:
        pass


def vanish():
    os._exit(3)
"""


def pickled(answer, rank):
    return pickle.dumps(answer.Pair(3, 4))


def unpickled(answer, rank, data):
    return pickle.loads(data)


def who(answer, rank, *given):
    return rank, os.getpid(), answer.IMPORTED_IN, given


def world_size(answer, rank):
    numbers = torch.ones(1)
    dist.all_reduce(numbers)
    return dist.get_world_size(), numbers.item(), os.getppid()


def double(answer, rank, pair):
    assert isinstance(pair, answer.Pair)
    return answer.double(pair), torch.full((2,), rank)


def state(answer, rank, spoil):
    fresh = torch.is_grad_enabled(), torch.ones(1).dtype, draw.rand(1).item()
    if spoil:
        answer.leave_on()
    return fresh


def speak(answer, rank):
    answer.speak(rank)


def bar(answer, rank):
    check_bar("peak", 100 + rank, 200, formula="2 * 100", cause="none")


def call(answer, rank, name, *given, ranks=(0, 1), others=None):
    """`answer.name(*given)` on some ranks; the others call something else, or nothing."""
    if rank in ranks:
        getattr(answer, name)(*given)
    elif others:
        getattr(answer, others)(torch.ones(2))


def on_rank_1(answer, rank, name, *given):
    call(answer, rank, name, *given, ranks=(1,))


def on_rank_0(answer, rank, name, *given):
    call(answer, rank, name, *given, ranks=(0,))


def on_rank_1_while_0_reduces(answer, rank, name, *given):
    call(answer, rank, name, *given, ranks=(1,), others="reduce")


def one_tells_of_another(answer, rank):
    answer.tells_of_another(rank)


def value_errors(answer, rank):
    answer.value_error(rank)


def spec_failure(answer, rank, name):
    """Rank 1 fails over what the answer raises."""
    try:
        call(answer, rank, name, ranks=(1,))
    except Exception as error:
        found = SpecFailure("two", "three", "miscounted")
        raise found from error


def destroy(answer, rank):
    dist.destroy_process_group()


def fit_badly(answer, rank):
    answer.reduce(torch.ones(7 if rank else 100_000))


def in_two_groups(answer, rank):
    """Each rank reduces in another group of both, and none ever meets the other."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    answer.reduce(torch.ones(2), groups[rank])


def counts(answer, rank):
    """What is counted in each of these."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    x = torch.ones(4, 3)

    def unsynced():
        with model.no_sync():
            model(x).sum().backward()

    cases = {
        "no_sync": unsynced,
        "sync": lambda: model(x).sum().backward(),
        "all_reduce": lambda: dist.all_reduce(x),
        "async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "functional": lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
        "all_gather": lambda: dist.all_gather([torch.empty(4, 3), torch.empty(4, 3)], x),
        "broadcast": lambda: dist.broadcast(x.double(), 0),
        "reduce": lambda: dist.reduce(x, 0),
        "two": lambda: (dist.all_reduce(x[0]), dist.barrier()),
        "none": lambda: x + 1,
    }
    seen: dict[str, list[Collective]] = {}
    for name, make in cases.items():
        with collectives() as seen[name]:
            make()
    return seen
