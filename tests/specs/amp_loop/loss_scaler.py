"""A scaler with optimizers beside torch's own, and the calls that both are put through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.laws.checks import check_close, check_equal

SIZES = (7, 4, 5)  # of the parameters of one optimizer, in two groups
OVERFLOWS = (math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Call:
    """One call; `optimizer` is the number of one."""

    name: str
    optimizer: int = 0
    value: float = 0.75  # of the true gradients
    bad: float | None = None  # the value of one element of one of them
    at: tuple[int, int] = (0, 0)  # parameter and element of it
    missing: int | None = None  # the parameter that gets no gradient

    def __str__(self) -> str:
        if self.name == "backward":
            what = f"{self.bad} at {self.at}" if self.bad is not None else f"{self.value:g}"
            without = f", none for parameter {self.missing}" if self.missing is not None else ""
            return f"backward {self.optimizer} ({what}{without})"
        alone = self.name in ("update", "reload")
        return self.name if alone else f"{self.name} {self.optimizer}"


@dataclass
class Side:
    """A scaler, and the optimizers that it is called with."""

    scaler: Any
    device: torch.device
    count: int = 1
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaler.scale(torch.zeros((), device=self.device))  # GradScaler makes its scale here
        for _ in range(self.count):
            params = [nn.Parameter(torch.ones(n, device=self.device)) for n in SIZES]
            groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.25}]
            self.optimizers.append(torch.optim.SGD(groups, lr=0.125, momentum=0.5))

    def params(self, number: int) -> list[Tensor]:
        groups = self.optimizers[number].param_groups
        return [p for group in groups for p in group["params"]]

    def do(self, call: Call, fresh: Callable[[], Any]) -> str:
        """The name of the error, or nothing. `fresh` makes the scaler that a reload goes on with."""
        try:
            if call.name == "backward":
                self._backward(call)
            elif call.name == "update":
                self.scaler.update()
            elif call.name == "reload":
                state, self.scaler = self.scaler.state_dict(), fresh()
                self.scaler.load_state_dict(state)
                self.scaler.scale(torch.zeros((), device=self.device))
            else:
                getattr(self.scaler, call.name)(self.optimizers[call.optimizer])
        except (RuntimeError, AssertionError) as error:
            if type(error) not in (RuntimeError, AssertionError):
                raise  # an AssertionError is GradScaler's, for an update with nothing to go by
            return "RuntimeError"
        return ""

    def _backward(self, call: Call) -> None:
        scale = self.scaler.get_scale()
        for number, p in enumerate(self.params(call.optimizer)):
            p.grad = None if number == call.missing else torch.full_like(p, call.value * scale)
            if call.bad is not None and number == call.at[0] and p.grad is not None:
                p.grad[call.at[1]] = call.bad


def backward(**kinds: Any) -> st.SearchStrategy[Call]:
    """A backward pass that leaves gradients; `kinds` are strategies for the fields of Call."""
    return st.builds(Call, st.just("backward"), **kinds)


OVERFLOW_ANYWHERE = {
    "bad": st.sampled_from((None, *OVERFLOWS)),
    "at": st.sampled_from([(n, e) for n, size in enumerate(SIZES) for e in range(size)]),
}


def rounds(*before: st.SearchStrategy[Call]) -> st.SearchStrategy[list[Call]]:
    """Rounds of such calls, with an update at the end of each."""
    one = st.tuples(*before, st.just(Call("update")))
    return st.lists(one, min_size=1, max_size=6).map(
        lambda r: [call for part in r for call in part]
    )


def agree(
    answer: ModuleType,
    device: torch.device,
    calls: list[Call],
    *,
    cause: str,
    count: int = 1,
    **options: Any,
) -> None:
    """Fail unless the answer's scaler does as GradScaler does, after every one of the calls."""
    __tracebackhide__ = True
    mine = Side(answer.LossScaler(**options), device, count)
    true = Side(GradScaler(device.type, **options), device, count)
    for number, call in enumerate(calls, 1):
        so_far = "after " + "; ".join(map(str, calls[:number]))
        want = true.do(call, partial(GradScaler, device.type))
        got = mine.do(call, answer.LossScaler)
        check_equal(got or "no error", want or "no error", f"the last call {so_far}", cause=cause)
        scales = mine.scaler.get_scale(), true.scaler.get_scale()
        if scales[0] != scales[1]:
            check_close(*scales, f"scale {so_far}", rtol=1e-6, cause=cause)
        for optimizer in range(count):
            _same_weights(mine, true, optimizer, so_far, cause)
    check_equal(mine.scaler.state_dict(), true.scaler.state_dict(), f"state {so_far}", cause=cause)


def _same_weights(mine: Side, true: Side, optimizer: int, so_far: str, cause: str) -> None:
    __tracebackhide__ = True
    both = zip(mine.params(optimizer), true.params(optimizer), strict=True)
    for number, (p, q) in enumerate(both):
        what = f"parameter {number} of optimizer {optimizer} {so_far}"
        if not torch.equal(p, q):
            check_close(p, q, what, rtol=1e-6, cause=cause)
        if p.grad is None or q.grad is None or torch.equal(p.grad, q.grad):
            continue
        if bool(q.grad.isfinite().all()):
            check_close(p.grad, q.grad, f"gradient of {what}", rtol=1e-6, cause=cause)
