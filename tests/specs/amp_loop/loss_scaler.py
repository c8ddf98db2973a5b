"""A scaler with optimizers beside torch's own, and the calls that both are put through."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.laws.checks import check_close, check_equal, same
from kit.laws.sequences import for_all

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

    def do(self, call: Call, fresh: Callable[[], Any]) -> str:
        """What was raised. `fresh` makes the scaler that a reload goes on with."""
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
        return "nothing"

    def seen(self) -> dict[str, Any]:
        """The scale, and of each optimizer weights and finite gradients."""
        seen: dict[str, Any] = {"scale": self.scaler.get_scale()}
        for number, optimizer in enumerate(self.optimizers):
            for place, p in enumerate(_params(optimizer)):
                what = f"parameter {place} of optimizer {number}"
                seen[what] = p.detach()
                if p.grad is not None and bool(p.grad.isfinite().all()):
                    seen[f"gradient of {what}"] = p.grad
        return seen

    def _backward(self, call: Call) -> None:
        scale = self.scaler.get_scale()
        for number, p in enumerate(_params(self.optimizers[call.optimizer])):
            p.grad = None if number == call.missing else torch.full_like(p, call.value * scale)
            if call.bad is not None and number == call.at[0] and p.grad is not None:
                p.grad[call.at[1]] = call.bad


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


Calls = st.SearchStrategy[list[Call]]
EITHER = st.sampled_from((None, math.inf))
ANYWHERE = st.sampled_from([(n, e) for n, size in enumerate(SIZES) for e in range(size)])


def backward(**kinds: Any) -> st.SearchStrategy[Call]:
    """A backward pass that leaves gradients; `kinds` are strategies for the fields of Call."""
    return st.builds(Call, st.just("backward"), **kinds)


def rounds(*parts: Calls | st.SearchStrategy[Call]) -> Calls:
    """One to five rounds of these calls, with an update at the end of each."""
    lists = [part.map(lambda made: made if isinstance(made, list) else [made]) for part in parts]
    one = st.tuples(*lists, st.just([Call("update")])).map(_joined)
    return st.lists(one, min_size=1, max_size=4).map(_joined)


def _joined(lists: Iterable[list[Call]]) -> list[Call]:
    return [*itertools.chain.from_iterable(lists)]


def hold(
    answer: ModuleType, device: torch.device, calls: Calls, cause: str, **options: Any
) -> None:
    """Fail unless the answer's scaler does as GradScaler does, through sequences of such calls."""
    __tracebackhide__ = True
    for_all(calls, lambda case: agree(answer, device, case, cause, **options))


def agree(
    answer: ModuleType,
    device: torch.device,
    calls: list[Call],
    cause: str,
    count: int = 1,
    **options: Any,
) -> None:
    """The same for one sequence, with `count` optimizers, and after every one of its calls."""
    __tracebackhide__ = True
    options = {"init_scale": 8.0, "growth_interval": 2} | options
    torchs = partial(GradScaler, device.type)
    mine = Side(answer.LossScaler(**options), device, count)
    true = Side(torchs(**options), device, count)
    for number, call in enumerate(calls, 1):
        want, got = true.do(call, torchs), mine.do(call, answer.LossScaler)
        so_far = "; ".join(map(str, calls[:number]))
        check_equal(got, want, f"what the last call raised: {so_far}", cause=cause)
        here, there = mine.seen(), true.seen()
        for name, value in there.items():
            if name not in here or not same(here[name], value):
                other = here.get(name, torch.nan)
                check_close(other, value, f"{name} after {so_far}", rtol=1e-6, cause=cause)
    states = mine.scaler.state_dict(), true.scaler.state_dict()
    check_equal(*states, f"state after {'; '.join(map(str, calls))}", cause=cause)
