"""What runs on every rank: programs for the specs of accumulate_on_ranks."""

import functools
from collections import UserList
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from kit.laws.mentions import missing
from kit.laws.trace import Planted, observe
from kit.private_torch import data_version
from kit.ranks.collectives import collectives
from kit.ranks.simulated import simulated_world
from specs.gradient_accumulation import memory, oracle
from specs.gradient_accumulation.plans import CPU, NAMED, PLANS, UNREADABLE, scenario
from specs.gradient_accumulation.tokens import UNEQUAL, labelled, language_model


class Window(UserList):
    """Micro-batches that are read when somebody asks for them, or for their number."""

    def __len__(self):
        if self.data[:1] == [UNREADABLE]:
            raise Planted("the disk is broken")
        return len(self.data)

    def __getitem__(self, at):
        if self.data[at] is UNREADABLE:
            raise Planted("the disk is broken")
        return self.data[at]


def observed(answer, rank, name):
    """All that is seen of a call on this rank; an error that nobody wants is raised."""
    plan = PLANS[name]

    def call(world):
        group = _groups_of_one(dist.get_world_size())[rank] if plan.own_group else None
        model = DDP(world.model, process_group=group, gradient_as_bucket_view=plan.bucket_view)
        window = Window(world.batches)
        tensors = [t for batch in world.batches for t in batch if isinstance(t, Tensor)]
        before = [data_version(t) for t in tensors]
        world.notes["synchronises"] = True

        def once():
            try:
                return answer.accumulate_on_ranks(model, window, world.optimizer, **world.options)
            finally:
                world.notes["training flags"] = [m.training for m in world.model.modules()]
                world.notes["data untouched"] = [data_version(t) for t in tensors] == before
                world.notes["synchronises"] &= model.require_backward_grad_sync

        return oracle.retried(once, world)

    seen = observe(call, lambda: scenario(name, rank), CPU)
    world, error = seen.pop("_world"), seen.pop("_error")
    if error is not None:
        if not isinstance(error, (ValueError, Planted)) or world.refused_at is None:
            raise error
        seen["outcome"] = "ValueError"  # or that which was met when the window was read
    is_named = not missing(error, world.mentions)
    return seen | {"message": NAMED if is_named else f"{error}"[:100]}


@functools.cache  # and so never given back: the end of a gloo group waits for ever at times
def _groups_of_one(size):
    return [dist.new_group([number]) for number in range(size)]


def step_by_hand(answer, rank):
    """The share of the loss and the weight after one step from logits of 0."""
    model = torch.nn.Embedding(2, 2)
    torch.nn.init.zeros_(model.weight)
    labels = torch.tensor([[[0, 0, 0]], [[1, -100, -100]]])[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    batches = [(torch.full((1, 3), rank), labels)]
    share = answer.accumulate_on_ranks(DDP(model), batches, optimizer)
    return torch.as_tensor(share).detach(), model.weight.detach()


def averages(answer, rank):
    """What DDP makes of gradients of 1 and of 3, after a window and after one that fails."""
    model, window = DDP(language_model()), labelled(UNEQUAL, seed=rank)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for shift in (0, 8):  # there are 8 tokens
        with suppress(IndexError):
            answer.accumulate_on_ranks(model, [(x + shift, y) for x, y in window], optimizer)
        optimizer.zero_grad()
        own = sum(p.sum() for p in model.parameters()) * (1 + 2 * rank)
        (model(window[0][0]).sum() * 0 + own).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        seen.append(torch.cat(gradients).unique().tolist())
    return seen


def sent(answer, rank):
    """What a rank sends in the fourth window, and how much of it DDP's backward pass sends.

    In the second window DDP also arranges its buckets anew. In the third rank 1 has no label.
    """
    inner = language_model()
    inner[3].bias.requires_grad_(False)
    model = DDP(inner)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    order, buckets = [], []

    def hook(group, bucket):  # DDP refuses annotations that are strings
        buckets.append(bucket.buffer().numel())
        order.append("gradients")
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)
    model.register_forward_pre_hook(lambda *_: order.append("forward"))
    shapes = [*UNEQUAL, *UNEQUAL][rank : rank + 4]
    *first, idle, last = [labelled(shapes, seed=10 * n + rank) for n in range(4)]
    for _, targets in idle if rank else ():
        targets.fill_(-100)
    last[-2:] = [last[-1]] * len(last[-2:])  # the same micro-batch twice, which is not known by it
    for window in first:
        answer.accumulate_on_ranks(model, window, optimizer)
    with collectives() as without_labels:
        answer.accumulate_on_ranks(model, idle, optimizer)
    buckets.clear()
    order.clear()
    with collectives() as calls:
        answer.accumulate_on_ranks(model, last, optimizer)
    return {
        "bytes": sum(call.numel * call.dtype.itemsize for call in calls),
        "small": [call.numel <= 8 for call in [*without_labels, *calls]],
        "by DDP": sum(buckets),
        "order": order,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def as_it_is(group, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def sent_first_of_many(answer):
    """How many numbers each call sends that one of 16 ranks makes before its first forward pass."""
    with simulated_world(16, CPU), collectives() as calls:
        inner = language_model()
        model, before, seen = DDP(inner), len(calls), []
        model.register_comm_hook(None, as_it_is)  # a simulated call has no result for DDP
        model.register_forward_pre_hook(lambda *_: seen.append([*calls[before:]]))
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        answer.accumulate_on_ranks(model, labelled(UNEQUAL), optimizer)
    return [call.numel for call in seen[0]]


def peak(answer, rank, case):
    """Bytes above the baseline of a rank's second window."""
    made = memory.of_tokens(case, CPU)
    model = DDP(made.model)

    def call(module, of, optimizer):
        return module.accumulate_on_ranks(model, of.batches, optimizer)

    memory.peak(made, call, answer)
    made.model.zero_grad()
    return memory.peak(made, call, answer)
