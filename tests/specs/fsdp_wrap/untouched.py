"""What a call that is refused must leave: this rank's parts of weights, gradients and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.laws.checks import check


def local_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's parts of weights, gradients and optimizer state, by value."""
    state = {
        (number, name): _local(value)
        for number, p in enumerate(model.parameters())
        for name, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
    return {
        "weights": {name: _local(value) for name, value in model.state_dict().items()},
        "gradients": {n: _local(p.grad) for n, p in model.named_parameters()},
        "optimizer state": state,
    }


def check_untouched(before: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Fail if weights, gradients or optimizer state of this rank are others than before."""
    __tracebackhide__ = True
    now = local_state(model, optimizer)
    changed = [kind for kind, values in before.items() if not _same(values, now[kind])]
    check(
        not changed,
        expected=f"{', '.join(before)} as before the refused call",
        got=f"{' and '.join(changed)} changed",
        cause="the work has begun before everything was checked, on every rank",
    )


def _local(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    return (value.to_local() if hasattr(value, "to_local") else value).detach().clone()


def _same(one: dict[Any, Tensor | None], other: dict[Any, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(
        mine is other[key] if mine is None or other[key] is None else torch.equal(mine, other[key])
        for key, mine in one.items()
    )
