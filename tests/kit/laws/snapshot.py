"""What training has changed: copies of weights, gradients and optimizer state to compare with."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from kit.laws.checks import check
from kit.laws.equal import same
from kit.laws.trace import kept


class Snapshot:
    """Weights, gradients and optimizer state at one moment, by value."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.before = self._now()

    def check_unchanged(self, when: str, *, cause: str, clause: str = "") -> None:
        """Fail if weights, gradients or optimizer state are others now."""
        __tracebackhide__ = True
        now = self._now()
        changed = [kind for kind in now if not same(self.before[kind], now[kind])]
        check(
            not changed,
            expected=f"weights, gradients and optimizer state as before {when}",
            got=f"{' and '.join(changed)} changed",
            cause=cause,
            clause=clause,
        )

    def _now(self) -> dict[str, Any]:
        return {
            "weights": {k: v.detach().clone() for k, v in self.model.state_dict().items()},
            "gradients": [
                None if p.grad is None else p.grad.clone() for p in self.model.parameters()
            ],
            "optimizer state": kept(self.optimizer.state_dict()),
        }
