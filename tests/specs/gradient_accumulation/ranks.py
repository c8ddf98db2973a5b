"""What runs on every rank: programs for the specs of accumulate_on_ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

from kit.laws.checks import check, check_equal, check_raises
from kit.laws.snapshot import Snapshot
from kit.memory.ruler import measure
from kit.ranks.collectives import collectives
from specs.gradient_accumulation.common import (
    Batch,
    check_vector,
    count_steps,
    gradient,
    gradient_in,
)
from specs.gradient_accumulation.tokens import (
    labelled,
    language_model,
    many_tokens,
    wide_model,
    window_loss,
)

# For each rank the micro-batches of its window: samples, length, labelled tokens.
Plan = Sequence[Sequence[tuple[int, int, int]]]

CPU = torch.device("cpu")


def windows(plan: Plan, number: int, ignore_index: int = -100) -> list[list[Batch]]:
    """The window with this number, for each rank; no two ranks or windows have the same data."""
    return [
        labelled(shapes, CPU, ignore_index, seed=10 * number + rank)
        for rank, shapes in enumerate(plan)
    ]


def joined(plan: Plan, number: int, ignore_index: int = -100) -> list[Batch]:
    """The micro-batches of all ranks' windows."""
    return [batch for window in windows(plan, number, ignore_index) for batch in window]


def train(
    answer: Any, rank: int, plan: Plan, count: int = 3, ignore_index: int = -100
) -> dict[str, Any]:
    """So many windows with momentum; losses, last gradients, weights and steps."""
    model = DDP(language_model(CPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps, losses = count_steps(optimizer), []
    for number in range(count):
        window = windows(plan, number, ignore_index)[rank]
        losses.append(
            answer.accumulate_on_ranks(model, window, optimizer, ignore_index=ignore_index)
        )
    return {
        "losses": losses,
        "gradient": gradient_in(model),
        "weights": parameters_to_vector(model.parameters()).detach(),
        "steps": len(steps),
    }


def sent(answer: Any, rank: int, plan: Plan) -> dict[str, Any]:
    """What a rank sends in the third window, and how much of it DDP's backward pass sends.

    In the second window DDP also arranges its buckets anew.
    """
    inner = language_model(CPU)
    inner[2].bias.requires_grad_(False)
    model = DDP(inner)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    buckets: list[int] = []

    def hook(group, bucket):  # DDP refuses annotations that are strings
        buckets.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)
    for number in range(2):
        answer.accumulate_on_ranks(model, windows(plan, number)[rank], optimizer)
    window = windows(plan, 2)[rank]
    buckets.clear()
    with collectives() as calls:
        answer.accumulate_on_ranks(model, window, optimizer)
    return {
        "sizes": [call.numel for call in calls],
        "bytes": sum(call.numel * call.dtype.itemsize for call in calls),
        "by DDP": sum(buckets),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def peak(answer: Any, rank: int, count: int) -> int:
    """Bytes above the baseline of the second window of `count` micro-batches, all counted."""
    model = DDP(wide_model(CPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    answer.accumulate_on_ranks(model, many_tokens(CPU, 2), optimizer)
    window = many_tokens(CPU, count)
    reading = measure(
        lambda: answer.accumulate_on_ranks(model, window, optimizer),
        known=[model, optimizer, window],
    )
    return reading.above_baseline


def refused(
    answer: Any, rank: int, bad: Sequence[list[Batch]], mentions: Sequence[Sequence[str]], when: str
) -> None:
    """A good window, and one that every rank must refuse without a trace.

    It ends there: a call more would meet that of a rank that waits, and hide that it does.
    """
    _refuse(answer, rank, bad, mentions[rank], when)


def refused_then_good(answer: Any, rank: int, bad: Sequence[list[Batch]], when: str) -> Tensor:
    """The gradient of a good window after one that was refused."""
    model, optimizer = _refuse(answer, rank, bad, [], when)
    answer.accumulate_on_ranks(model, windows(GOOD, 1)[rank], optimizer)
    return gradient_in(model)


GOOD: Plan = [[(2, 5, 6), (1, 4, 2)], [(4, 3, 1), (2, 2, 2)]]


def _refuse(
    answer: Any, rank: int, bad: Sequence[list[Batch]], mentions: Sequence[str], when: str
) -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(language_model(CPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    answer.accumulate_on_ranks(model, windows(GOOD, 0)[rank], optimizer)
    before = Snapshot(model, optimizer)
    check_raises(
        lambda: answer.accumulate_on_ranks(model, bad[rank], optimizer),
        ValueError,
        mentions=mentions,
        when=when,
    )
    cause = "this rank has begun its window before it knew of the others"
    before.check_unchanged("the refused call", cause=cause)
    return model, optimizer


def starts_clean(answer: Any, rank: int, plan: Plan) -> None:
    """Stale gradients of 1000 in the model, and of 1 in a parameter that gets none; eval mode."""
    model = DDP(language_model(CPU)).eval()
    want = gradient(model, window_loss(model.module, joined(plan, 0)))
    unused = nn.Parameter(torch.ones(3))
    unused.grad = torch.ones_like(unused)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1000.0)
    groups = [{"params": list(model.parameters())}, {"params": [unused]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
    answer.accumulate_on_ranks(model, windows(plan, 0)[rank], optimizer)
    check_vector(
        gradient_in(model),
        want,
        "gradient of the window",
        guesses={"gradients from before the window are in it": want + 1000},
        otherwise="gradients are cleared at another place than before the first micro-batch",
    )
    cause = "the gradients of all that the optimizer holds are to be dropped, not zeroed"
    check_equal(unused.detach(), torch.ones(3), "unused weight", cause=cause)
    cause = "train() is called: whether dropout is on is the caller's business"
    check_equal(model.training, False, "model.training afterwards", cause=cause)


def then_plain(answer: Any, rank: int, plan: Plan) -> Tensor:
    """A window, and then an ordinary step of DDP, each rank with data of its own."""
    model = DDP(language_model(CPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer.accumulate_on_ranks(model, windows(plan, 0)[rank], optimizer)
    optimizer.zero_grad()
    model(torch.full((2, 3), rank)).square().mean().backward()
    return gradient_in(model)


@functools.cache  # and so never given back: the end of a gloo group waits for ever at times
def _groups_of_one(size: int) -> list[dist.ProcessGroup]:
    return [dist.new_group([number]) for number in range(size)]


def in_groups_of_one(answer: Any, rank: int, plan: Plan) -> None:
    """Each rank trains a model of its own: its process group has that rank only."""
    model = DDP(language_model(CPU), process_group=_groups_of_one(len(plan))[rank])
    window = windows(plan, 0)[rank]
    loss = window_loss(model.module, window).detach()
    want = gradient(model, window_loss(model.module, window))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    got = answer.accumulate_on_ranks(model, window, optimizer)
    check(
        abs(got.item() - loss.item()) < 1e-4,
        expected=f"loss = {loss.item():.6g}: its process group has one rank, this one",
        got=got.item(),
        cause="all ranks of the job are counted, not those of model.process_group",
    )
    otherwise = "the world's size is taken for that of model.process_group"
    check_vector(gradient_in(model), want, "gradient", guesses={}, otherwise=otherwise)
