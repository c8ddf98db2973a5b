"""What runs on every rank: programs for the specs of accumulate_on_ranks."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from kit.laws.mentions import missing
from kit.laws.trace import observe
from kit.ranks.collectives import collectives
from specs.gradient_accumulation import memory
from specs.gradient_accumulation.plans import CPU, NAMED, PLANS, scenario
from specs.gradient_accumulation.tokens import UNEQUAL, labelled, language_model


def observed(answer, rank, name):
    """Everything seen of a call on this rank; an unexpected error is raised."""
    plan = PLANS[name]

    def call(world):
        group = _groups_of_one(dist.get_world_size())[rank] if plan.own_group else None
        model = DDP(world.model, process_group=group)
        given = model, world.batches, world.optimizer
        return answer.accumulate_on_ranks(*given, **world.options)

    seen = observe(call, lambda: scenario(name, rank), CPU)
    world, error = seen.pop("_world"), seen.pop("_error")
    if error is not None and (not isinstance(error, ValueError) or world.refused_at is None):
        raise error
    is_named = not missing(error, world.mentions)
    return seen | {"message": NAMED if is_named else f"{error}"[:100]}


@functools.cache  # and so never destroyed: the end of a gloo group sometimes hangs
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


def sent(answer, rank):
    """What a rank sends in the third window, and how much of it DDP's backward pass sends.

    In the second window DDP also rebuilds its buckets.
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
    window = labelled([*UNEQUAL, *UNEQUAL][rank : rank + 4], seed=rank)
    window[-2] = window[-1]  # the same micro-batch twice: the last is not known by identity
    for _ in range(3):
        buckets.clear()
        order.clear()
        with collectives() as calls:
            answer.accumulate_on_ranks(model, window, optimizer)
    return {
        "bytes": sum(call.numel * call.dtype.itemsize for call in calls),
        "small": [call.numel <= 8 for call in calls],
        "by DDP": sum(buckets),
        "order": order,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def peak(answer, rank, case):
    """Bytes above the baseline of a rank's second window."""
    made = memory.of_tokens(case, CPU)
    model = DDP(made.model)

    def call(module, of, optimizer):
        return module.accumulate_on_ranks(model, of.batches, optimizer)

    memory.peak(made, call, answer)
    made.model.zero_grad()
    return memory.peak(made, call, answer)
