"""What one process makes of the script of a case: what an answer is compared with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.toys import mse
from kit.private_torch import tree_leaves
from kit.ranks.shards import gradients_of, named
from specs.fsdp_wrap.cases import CASES, Case
from specs.fsdp_wrap.play import Play, batches


class Alone(Play):
    """What one process does, with the micro-batches of all ranks one after another.

    contributions: of the first step, for each micro-batch: rank, number, samples, loss, gradients
    whole: the gradients of the first step before clipping
    """

    def __init__(self, case: Case, rank: int, size: int) -> None:
        super().__init__(case, rank, size)
        self.contributions: list[tuple[int, int, int, Tensor, Tensor]] = []
        self.trace["names in the state dict"] = [*self.model.state_dict()]
        self.parameters = named(self.model)
        self.optimizer = case.make_optimizer(self.model.parameters())
        first = next((n for n, event in enumerate(case.script) if event == "step"), -1)
        self.first = f"step {first + 1}"
        self.whole: dict[str, Tensor | None] = {}

    def _watch(self, name: str, block: nn.Module) -> None:
        """With a checkpoint a block runs once more, if there is a backward through it; no model."""

        def ran(module: nn.Module, args: Any, output: Any) -> None:
            again = block is not self.model and any(x.requires_grad for x in tree_leaves(output))
            self._ran(name, 1 + (again and self.case.wrap.get("checkpoint", False)))

        block.register_forward_hook(ran)

    def _passes(self, number: int) -> float:
        """The gradients of a mean over samples; and the mean."""
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

    def plain(self, number: int, label: str, is_pending: bool) -> None:
        self.optimizer.zero_grad()
        self._passes(number)
        self.trace[f"dtype of the output in {label}"] = torch.float32
        self.note(label, self.parameters)
        if is_pending:
            self.trace[f"output between backward and {label}"] = self.look()
        self.optimizer.step()

    def step(self, number: int, label: str, _: bool) -> None:
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
        """Nothing is to be seen of it."""


def vector(gradients: Any, parameters: Any) -> Tensor:
    """All gradients as one vector; what has none has zeros."""
    parts = []
    for name, p in parameters:
        grad = gradients.get(name)
        parts.append((torch.zeros_like(p) if grad is None else grad).detach().flatten().cpu())
    return torch.cat(parts).clone()


@functools.cache
def alone(name: str, rank: int, size: int) -> Alone:
    """The script as one process plays it, once for all answers."""
    found = Alone(CASES[name], rank, size)
    found.play()
    return found
