"""Training on many ranks, rehearsed: what one of them holds and sends, for each way to share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from kit.laws.toys import Block
from kit.memory.account import account
from kit.memory.stack import by_kind
from kit.ranks.collectives import Collective, collectives
from kit.ranks.simulated import dry_run
from lab.measure import solution
from lab.models import Gpt, next_token, parameters_of

WIDTH, WORDS, TOKENS = 2048, 4096, (1, 256)
STATES = ("shards", "unsharded", "gradients", "optimizer state")


class MasterAdam(Optimizer):
    """Adam for 16-bit parameters; its state is a float32 copy of each and two float32 moments.

    With weights and gradients that is 2 + 2 + 12 bytes a parameter, as ZeRO's paper counts.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; bias corrections are left out, for they change no bytes."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state["master"] = p.float()
                    state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(grad.square_(), 0.001)
                torch.add(state["square"].sqrt(), 1e-8, out=grad)
                state["master"].addcdiv_(state["mean"], grad, value=-group["lr"])
                p.copy_(state["master"])


adamw = partial(AdamW, foreach=True)


def _whole(model: nn.Module, mesh: Any, *, sharded_state: bool, dtype: torch.dtype) -> Optimizer:
    """Data parallelism: gradients of all ranks summed; ZeRO-1 by torch's own optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for module in model.modules():  # fake tensors refuse model.to()
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(p.detach().to(dtype)))
    make: Any = adamw if dtype == torch.float32 else MasterAdam
    if not sharded_state:
        found: Optimizer = make(model.parameters())
        return found
    return ZeroRedundancyOptimizer(model.parameters(), make)


def _wrapped(model: nn.Module, mesh: Any, **options: Any) -> Optimizer:
    optimizer: Optimizer = solution("fsdp_wrap").wrap(model, mesh, Block, adamw, **options)
    return optimizer


_HALF: dict[str, Any] = {"dtype": torch.bfloat16}
_FULL: dict[str, Any] = {"dtype": torch.float32}
# Each sets up a model on a mesh and returns its optimizer. FSDP keeps its shards and what they
# are updated with in float32, and gathers in `dtype`.
WAYS: dict[str, Callable[[nn.Module, Any], Optimizer]] = {
    "data parallel": partial(_whole, sharded_state=False, **_HALF),
    "ZeRO-1": partial(_whole, sharded_state=True, **_HALF),
    "ZeRO-2": partial(_wrapped, reshard_after_forward=False, **_HALF),
    "ZeRO-3": partial(_wrapped, **_HALF),
    "ZeRO-3, checkpointed": partial(_wrapped, checkpoint=True, **_HALF),
    "ZeRO-1, float32": partial(_whole, sharded_state=True, **_FULL),
    "ZeRO-2, float32": partial(_wrapped, reshard_after_forward=False, **_FULL),
    "ZeRO-3, float32": partial(_wrapped, **_FULL),
}


def formula(way: str, ranks: int) -> float:
    """Bytes a parameter of weights, gradients and Adam's state by ZeRO's paper."""
    weights, gradients, state = (4, 4, 8) if "float32" in way else (2, 2, 12)
    stage = int(way[5]) if way.startswith("ZeRO") else 0
    return sum(
        size / ranks if stage >= least else size
        for size, least in ((weights, 3), (gradients, 2), (state, 1))
    )


def rehearse(way: str, ranks: int, layers: int) -> dict[str, Any]:
    """The second step of rank 0 of so many, in bytes; `sent`: numbers and bytes, by a ring.

    `states` is the most of weights, gathered weights, gradients and optimizer state at one time,
    `rest` what is there of them between two steps.
    """
    with dry_run(ranks) as mesh:
        model = Gpt(layers, WIDTH, WORDS)
        parameters = parameters_of(model)
        optimizer = WAYS[way](model, mesh)
        tokens = torch.zeros(TOKENS, dtype=torch.int64)
        whole = partial(_sum_gradients, model) if "ZeRO-1" in way or "data" in way else None

        def step() -> None:
            optimizer.zero_grad()
            next_token(model(tokens).float(), tokens).backward()
            if whole is not None:
                whole()
            optimizer.step()

        step()  # it makes the optimizer's state
        owner = getattr(optimizer, "optim", optimizer)  # ZeRO's keeps its state in another
        with collectives() as calls:
            books = account(step, model=model, optimizer=owner, known=[tokens])
    now = most = 0
    for change in books.changes:
        now += change.delta if change.kind in STATES else 0
        most = max(most, now)
    return {
        "parameters": parameters,
        "states": most,
        "rest": sum(books.after[kind] for kind in STATES),
        "peak": books.peak,
        "kinds": by_kind(books),
        "sent": sum(_sent(c, ranks) for c in calls),
        "sent bytes": sum(_sent(c, ranks) * c.dtype.itemsize for c in calls),
    }


def _sum_gradients(model: nn.Module) -> None:
    import torch.distributed as dist

    for p in model.parameters():
        dist.all_reduce(p.grad)


def _sent(call: Collective, ranks: int) -> float:
    """Numbers that a rank sends in a ring; on average, for a broadcast."""
    if call.kind == "all_gather":
        return call.numel * (ranks - 1)  # its own part, and each of the others' but one
    twice = 2 if call.kind == "all_reduce" else 1  # a reduce-scatter, and an all-gather of it
    return twice * call.numel * (ranks - 1) / ranks
