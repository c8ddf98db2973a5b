"""The script of a case, run by an answer on every rank, and by one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import SpecFailure, in_scenario
from kit.laws.toys import mse
from kit.ranks.rank import device
from kit.ranks.shards import gradients_of, mesh, meshes, named, weights
from kit.ranks.toys import FEATURES, OUTPUTS, Batch
from specs.fsdp_wrap.cases import CASES, EQUAL, PLANS, Case

Trace = dict[str, Any]  # what was seen, by name, in order


def batches(case: Case, number: int, rank: int, size: int) -> list[Batch]:
    """A rank's micro-batches for one entry of a script; no two have the same data."""
    event, plans = case.script[number], PLANS[size]
    plan = EQUAL if event == "plain" else plans[number % len(plans)]
    generator = draw.generator(10 * number + rank)
    found = []
    for micro, count in enumerate(plan[rank]):
        shape = (count, 4) if case.tokens else (count,)
        inputs = draw.randn(*shape, FEATURES, generator=generator) + micro / 2
        if case.tokens:
            inputs = draw.randint(11, shape, "cpu", generator)
        targets = draw.randn(*shape, OUTPUTS, generator=generator) - micro / 2
        found.append((inputs.to(device()), targets.to(device())))
    return found


class Play:
    """One script; a subclass trains, with an answer on all ranks or in one process."""

    optimizer: Optimizer

    def __init__(self, case: Case, rank: int, size: int) -> None:
        self.case, self.rank, self.size = case, rank, size
        self.members = [*range(size)]  # the ranks that share the model
        if case.half:
            half = size // 2
            self.members = [r for r in self.members if r // half == rank // half]
        self.model, self.types = case.shape()
        self.model.to(device())
        self.start = weights(self.model)
        self.runs: dict[str, int] = {}
        self.trace: Trace = {}
        for name, block in self.model.named_modules():
            if not name or isinstance(block, self.types):
                self._watch(name or "the model", block)

    def _watch(self, name: str, block: nn.Module) -> None:
        """Watch the layers of a unit: modules without children that are in no inner block."""
        inside = [m for m in block.modules() if m is not block and isinstance(m, self.types)]
        taken = {m for b in inside for m in b.modules()}
        first, *later = [m for m in block.modules() if not [*m.children()] and m not in taken]
        first.register_forward_pre_hook(lambda *_: self._ran(name))
        for module in (first, *later):
            module.register_forward_pre_hook(functools.partial(self._gets, name, module is first))

    def _ran(self, name: str, times: int = 1) -> None:
        self.runs[name] = self.runs.get(name, 0) + times

    def _gets(self, unit: str, is_first: bool, module: nn.Module, args: Any) -> None:
        """Fail where an input has another dtype: torch would not say which unit is to blame."""
        dtype = self.case.wrap.get("dtype", torch.float32)
        if not args[0].is_floating_point() or args[0].dtype == dtype:
            return
        cause = "the unit got it with this dtype, and has not cast it"
        if any(p.dtype != dtype for p in module.parameters()):
            cause = "its parameters have another dtype too: dtype is ignored, or autocast casts"
        elif not is_first:
            cause = "a block has returned it with this dtype: see output_dtype"
        expected = f"{dtype} into each layer of {unit}"
        raise SpecFailure(expected, str(args[0].dtype), cause, sure=True)

    def play(self) -> Trace:
        steps: list[object] = []
        state = self.model.state_dict()
        self.trace["names in the state dict"] = [*state]
        self.trace["dtype of shards"] = {name: value.dtype for name, value in state.items()}
        self.optimizer.register_step_post_hook(lambda *_: steps.append(_))
        for number, event in enumerate(self.case.script):
            label = f"step {number + 1}" + ", by hand" * (event == "plain")
            self.runs = {}
            getattr(self, event)(number, label)
            if self.runs and event in ("plain", "step"):
                self.trace[f"runs of blocks in {label}, recomputed ones too"] = dict(self.runs)
        self.trace["steps of the optimizer"] = len(steps)
        self.trace["weights"] = weights(self.model)
        return self.trace

    def note(self, label: str, parameters: Any, loss: Any = None, norm: Any = None) -> None:
        """With max_norm the norm comes first: a wrong norm explains wrong gradients."""
        found = {"loss": loss, "gradients": gradients_of(parameters), "grad_norm": norm}
        for key in ("loss", "grad_norm", "gradients") if "max_norm" in self.case.step else found:
            if found.get(key) is not None:
                self.trace[f"{key} of {label}"] = found[key]


class Alone(Play):
    """What an answer is compared with: one process that has the micro-batches of all ranks.

    contributions: of the first step; for each micro-batch: rank, number, samples, loss, gradients
    whole: the gradients of the first step before clipping
    """

    def __init__(self, case: Case, rank: int, size: int) -> None:
        super().__init__(case, rank, size)
        self.contributions: list[tuple[int, int, int, Tensor, Tensor]] = []
        self.parameters = named(self.model)
        self.optimizer = case.make_optimizer(self.model.parameters())
        first = next((n for n, event in enumerate(case.script) if event == "step"), -1)
        self.first = f"step {first + 1}"
        self.whole: dict[str, Tensor | None] = {}

    def _watch(self, name: str, block: nn.Module) -> None:
        """With a checkpoint a block runs again, if backward goes through it; the root does not."""

        def ran(module: nn.Module, args: Any, output: Tensor) -> None:
            again = block is not self.model and output.requires_grad
            self._ran(name, 1 + (again and self.case.wrap.get("checkpoint", False)))

        block.register_forward_hook(ran)

    def _passes(self, number: int) -> float:
        """Make the gradients of the mean over samples, and return the mean."""
        all_of = {r: batches(self.case, number, r, self.size) for r in self.members}
        total = sum(len(x) for window in all_of.values() for x, _ in window)
        mean, mine = 0.0, dict[str, int]()
        is_first = not self.contributions and self.case.script[number] == "step"
        for rank, window in all_of.items():
            draw.seed(8 + rank)
            self.runs = {}
            for micro, (inputs, targets) in enumerate(window):
                before = self._vector() if is_first else torch.zeros(())
                loss = mse(self.model(inputs), targets)
                (loss * (len(inputs) / total)).backward()
                mean += loss.item() * len(inputs) / total
                if is_first:
                    one = (self._vector() - before) * (total / len(inputs))
                    self.contributions.append((rank, micro, len(inputs), loss.detach().cpu(), one))
            if rank == self.rank:
                mine = dict(self.runs)
        self.runs = mine
        return mean

    def _vector(self) -> Tensor:
        return vector(gradients_of(self.parameters), self.parameters)

    def plain(self, number: int, label: str) -> None:
        self.optimizer.zero_grad()
        self._passes(number)
        self.trace[f"dtype of the output in {label}"] = torch.float32
        self.note(label, self.parameters)
        self.optimizer.step()

    def step(self, number: int, label: str) -> None:
        self.optimizer.zero_grad()
        mean = self._passes(number)
        self.whole = self.whole or gradients_of(self.parameters)
        distinct = {p for _, p in self.parameters}
        norms = [p.grad.norm() for p in distinct if p.grad is not None]
        norm = torch.stack(norms).norm()
        limit = self.case.step.get("max_norm")
        for p in distinct:
            if limit is not None and p.grad is not None and norm > limit:
                p.grad.mul_(limit / norm)
        kinds = ["Tensor torch.float32 ()"] * 2
        self.trace[f"kind of loss and grad_norm of {label}"] = kinds
        self.note(label, self.parameters, torch.tensor(mean), norm.cpu())
        self.optimizer.step()

    def stale(self, *_: Any) -> None:
        """They must not matter."""


class _Answer(Play):
    def __init__(self, answer: Any, case: Case, rank: int, size: int) -> None:
        super().__init__(case, rank, size)
        self.answer = answer
        over = meshes(size // 2)["shards"] if case.half else mesh()
        self.optimizer = answer.wrap(self.model, over, self.types, case.make_optimizer, **case.wrap)
        self.parameters = named(self.model)

    def plain(self, number: int, label: str) -> None:
        ((inputs, targets),) = batches(self.case, number, self.rank, self.size)
        draw.seed(8 + self.rank)
        self.optimizer.zero_grad()
        output = self.model(inputs)
        self.trace[f"dtype of the output in {label}"] = output.dtype
        mse(output, targets).backward()
        self.note(label, self.parameters)
        self.optimizer.step()

    def step(self, number: int, label: str) -> None:
        window = batches(self.case, number, self.rank, self.size)
        draw.seed(8 + self.rank)
        result = self.answer.train_step(
            self.model, tuple(window), mse, self.optimizer, **self.case.step
        )
        self.trace[f"kind of loss and grad_norm of {label}"] = [*map(_kind, result)]
        loss, norm = (torch.as_tensor(float(x)) for x in result)
        self.note(label, self.parameters, loss, norm)

    def stale(self, *_: Any) -> None:
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1000.0)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    graph = " with a graph" * value.requires_grad
    return f"{type(value).__name__} {value.dtype} {tuple(value.shape)}{graph}"


def seen(answer: Any, rank: int, name: str) -> Trace:
    """The trace of an answer; an error says in which scenario it was raised."""
    try:
        return _Answer(answer, CASES[name], rank, dist.get_world_size()).play()
    except BaseException as error:
        raise in_scenario(error, name) from error.__cause__


def vector(gradients: Any, parameters: Any) -> Tensor:
    """All gradients as one vector, with zeros for those that are None."""
    parts = []
    for name, p in parameters:
        grad = gradients.get(name)
        parts.append((torch.zeros_like(p) if grad is None else grad).detach().flatten().cpu())
    return torch.cat(parts).clone()


@functools.cache
def alone(name: str, rank: int, size: int) -> Alone:
    """The script run by one process, once for all answers."""
    found = Alone(CASES[name], rank, size)
    found.play()
    return found
