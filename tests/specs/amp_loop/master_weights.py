"""A trainer beside plain float32 training of a twin, and the calls that both are put through."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check_equal
from kit.laws.sequences import for_all

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.003),
}
INF = math.inf
OVERFLOWS = (INF, -INF, math.nan)


def layer(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    """Weights of 1 and more, where 16 bits are coarse."""
    draw.seed(4)
    made = nn.Linear(5, 3)
    with torch.no_grad():
        made.weight += 1.0
    return made.to(device, dtype)


def tangled(device: torch.device) -> nn.Sequential:
    """A frozen float32 layer, two bfloat16 layers that share their weight, a float16 one."""
    draw.seed(4)
    frozen, one, other, last = nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
    frozen.requires_grad_(False)
    other.weight = one.weight
    return nn.Sequential(frozen, one.bfloat16(), other.bfloat16(), last.half()).to(device)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(trainer: Any, model: nn.Module, *gradients: float) -> list[bool]:
    """A step for each of these gradients; what step() said."""
    said = []
    for value in gradients:
        _backward(model, Call("backward", value))
        said.append(trainer.step())
    return said


@dataclass(frozen=True)
class Call:
    """One call; a backward pass leaves `value` everywhere, `bad` at one place, or nothing."""

    name: str
    value: float = 1.0
    bad: float | None = None
    missing: int | None = None
    loss_scale: float = 1.0

    def __str__(self) -> str:
        if self.name != "backward":
            return f"step({self.loss_scale:g})" if self.name == "step" else self.name
        bad = f", {self.bad} at the end of the last" if self.bad is not None else ""
        without = f", none for parameter {self.missing}" if self.missing is not None else ""
        return f"backward({self.value:g}{bad}{without})"


def calls(
    value: Sequence[float] = (1.0, -0.5, 2.0**-14, 3e4),
    bad: Sequence[float | None] = (None,),
    missing: Sequence[int | None] = (None,),
    loss_scale: Sequence[float] = (1.0, 8.0, 2.0**26, 2.0**-8),
    between: Sequence[str] = ("zero_grad", "reload"),
) -> st.SearchStrategy[list[Call]]:
    """Backward passes, each with a step after it, and perhaps one of `between`."""
    pick = st.sampled_from
    gradients = st.builds(Call, st.just("backward"), pick(value), pick(bad), pick(missing))
    step = st.builds(Call, st.just("step"), loss_scale=pick(loss_scale))
    more = st.lists(st.builds(Call, pick(between)), max_size=1)
    rounds = st.lists(st.tuples(gradients, step, more), min_size=1, max_size=6)
    return rounds.map(lambda made: [call for g, s, others in made for call in (g, s, *others)])


class Twin:
    """What the contract asks for: float32 copies, trained as if there were nothing else."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.weights = trainable(model)
        self.masters = [p.detach().float().requires_grad_() for p in self.weights]
        self.optimizer = make_optimizer(self.masters)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def step(self, loss_scale: float) -> bool:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float() / loss_scale
        gradients = [m.grad for m in self.masters if m.grad is not None]
        if not all(bool(g.isfinite().all()) for g in gradients):
            return False
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data = master.detach().to(weight.dtype)
        return True


def hold(
    answer: ModuleType,
    build: Callable[[], nn.Module],
    optimizer: str,
    sequences: st.SearchStrategy[list[Call]],
    cause: str,
) -> None:
    """Fail unless the trainer does as float32 training does, after each call of a sequence."""
    __tracebackhide__ = True
    for_all(sequences, lambda case: _agree(answer, build(), OPTIMIZERS[optimizer], case, cause))


def _agree(
    answer: ModuleType, model: nn.Module, make: MakeOptimizer, sequence: list[Call], cause: str
) -> None:
    __tracebackhide__ = True
    other = copy.deepcopy(model)
    mine, true = answer.MasterWeights(model, make), Twin(other, make)
    for number, call in enumerate(sequence, 1):
        so_far = "; ".join(map(str, sequence[:number]))
        if call.name == "backward":
            _backward(model, call)
            _backward(other, call)
        elif call.name == "reload":
            mine = reloaded(answer, mine, model, make)
        elif call.name == "new_rate":
            for trainer in (mine, true):
                trainer.optimizer.param_groups[0]["lr"] *= 0.5
        elif call.name == "zero_grad":
            mine.zero_grad()
            true.zero_grad()
        else:
            got, want = mine.step(call.loss_scale), true.step(call.loss_scale)
            check_equal(got, want, f"the result of step() after {so_far}", cause=cause)
        got, want = _seen(mine, model), _seen(true, other)
        check_equal(got, want, f"the trainer after {so_far}", cause=cause)


def reloaded(answer: ModuleType, trainer: Any, model: nn.Module, make: MakeOptimizer) -> Any:
    """A new trainer that goes on from a file, with a model whose weights are lost."""
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    file.seek(0)
    for weight in trainable(model):
        weight.data = weight.data * 2
    new = answer.MasterWeights(model, make)
    new.load_state_dict(torch.load(file, weights_only=True))
    return new


def _backward(model: nn.Module, call: Call) -> None:
    params = trainable(model)
    for number, p in enumerate(params):
        gradient = torch.full_like(p, call.value, dtype=torch.float32)
        p.grad = None if number == call.missing else gradient.to(p.dtype)
    last = params[-1].grad
    if call.bad is not None and last is not None:
        last.view(-1)[-1] = call.bad


def _seen(trainer: Any, model: nn.Module) -> dict[str, Any]:
    """Weights, 16-bit gradients, masters, and the state of their optimizer."""
    params = dict(model.named_parameters())
    gradients = {n: p.grad.nan_to_num(nan=7.0) for n, p in params.items() if p.grad is not None}
    return {
        "weights": {name: p.detach() for name, p in params.items()},
        "16-bit gradients": gradients,
        "masters": {n: master.detach() for n, master in enumerate(trainer.masters)},
        "optimizer": trainer.optimizer.state_dict(),
    }
