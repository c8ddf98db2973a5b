"""One call of an answer in a world, and everything that can be seen of it from outside.

A world is all that an answer is given: a model, data, a loss, an optimizer, and what goes with
them. It is built afresh for each call, so that two calls can be compared: that of the answer and
that of the oracle, which is the contract as slow and obvious code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.answers.reset_torch import reset_torch
from kit.laws import draw
from kit.laws.toys import mse

Trace = dict[str, Any]  # the name of an observable, to what was seen of it


# What it most likely means where an observable is otherwise; the first that is, is shown.
MEANINGS = {
    "outcome": "no check refuses this input before it is used",
    "message": "the message does not say which value was wrong",
    "error of the next call": "an error leaves the scaler between unscale_ and update",
    "kept gradients": "the check comes too late: gradients are changed already",
    "number of results": "one for each batch",
    "optimizer steps": "a step too many, or none",
    "passes forward": "the model runs in another precision or mode, or more than once",
    "passes back": "backward() runs under autocast",
    "loss calls": "the loss runs in another precision, on 16 bits or other targets, or out of turn",
    "skipped": "see whether the optimizer stepped: no norm, loss or scale tells, and a fused "
    "one is called and skips inside, by its `found_inf`",
    "loss": "it is still scaled, the loss's own tensor and no copy, or with its graph",
    "grad_norm": "still scaled, clipped, of older gradients, or not over all that was trained",
    "gradients at": "they are still scaled, stale, or clipped differently",
    "rate": "the schedule is ahead of the steps, or behind",
    "weights": "another step was taken",
    "optimizer state": "another step was taken",
    "optimizer groups": "the schedule is ahead of the steps, or behind",
    "scaler": "update() is missing, or called too often",
    "schedule": "the schedule does not advance exactly with each step taken",
    "buffers": "the model runs more than once, or in another mode",
    "random state": "a seed is set, or random numbers are drawn",
}


class Planted(OSError):
    """An error that the scenario raises at a place; it must come through."""

    @property
    def words(self) -> str:
        return f"the error that this scenario raises in its {self}"


class PlantedInterrupt(KeyboardInterrupt):
    """A Ctrl-C that the scenario raises at a place."""

    @property
    def words(self) -> str:
        return f"the Ctrl-C of this scenario in its {self}"


class Probe(nn.Module):
    """Passes its input on, and notes each run forward and back."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[str] = []
        self.backwards: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        device, mode = x.device.type, "" if self.training else " in eval mode"
        self.forwards.append(f"{kind_of(x)}{autocast_on(device)}{mode}")
        if torch.is_grad_enabled() and x.requires_grad:
            x = x * 1
            x.register_hook(
                lambda grad: self.backwards.append(f"{shape_of(grad)}{autocast_on(device)}")
            )
        return x


def shape_of(tensor: Tensor) -> str:
    """As people write it: 9 x 13."""
    return " x ".join(map(str, tensor.shape)) or "a number"


def kind_of(tensor: Tensor) -> str:
    """Shape and dtype."""
    return f"{shape_of(tensor)} {str(tensor.dtype).removeprefix('torch.')}"


def autocast_on(device: str) -> str:
    """What autocast is in force, in words; nothing where none is."""
    if not torch.is_autocast_enabled(device):
        return ""
    return f" under autocast to {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"


def kept(value: Any) -> Any:
    """A copy of tensors in dicts, lists and tuples, by value; deepcopy takes five times as long."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(part) for part in value]
    return value


@dataclass
class World:
    """What an answer is given. A scenario changes it before `ready`."""

    model: nn.Module
    batches: list[Any]
    loss: Callable[..., Tensor] = mse
    extra: dict[str, nn.Parameter] = field(default_factory=dict)  # leaves outside the model
    foreign: tuple[str, ...] = ()  # names of leaves that the optimizer does not hold
    groups: bool = False  # a parameter group for each leaf
    sgd: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    adam: dict[str, Any] | None = None
    dtype: Any = torch.float32
    scaler: dict[str, Any] | None = None  # options
    gamma: float | None = None  # of the schedule
    options: dict[str, Any] = field(default_factory=dict)
    inside: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)  # of what
    mentions: tuple[object, ...] = ()  # what a refusal must name; of a tuple one is enough
    refused_at: int | None = None  # after how many steps it comes
    visits: Callable[[str], None] = lambda place: None  # hears of model, loss and step
    after: list[Callable[[World], None]] = field(default_factory=list)  # when all is there
    tags: set[str] = field(default_factory=set)  # what FREE asks for, such as "not finite"
    notes: Trace = field(default_factory=dict)  # what else of this kata's is seen

    def ready(self, device: torch.device) -> World:
        """Move everything to the device, and make optimizer, scaler and schedule."""
        self.device = device
        self.model.to(device)
        self.batches = [_moved(batch, device) for batch in self.batches]
        self.batch = self.batches[0] if self.batches else None
        for leaf in self.extra.values():
            leaf.data = leaf.data.to(device)
            leaf.grad = None if leaf.grad is None else leaf.grad.to(device)
        self.leaves = {**dict(self.model.named_parameters()), **self.extra}
        held = [p for name, p in self.leaves.items() if name not in self.foreign]
        params: Any = [{"params": [p]} for p in held] if self.groups else held
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(params, **self.sgd)
        if self.adam is not None:
            self.optimizer = torch.optim.Adam(params, **self.adam)
        self.grad_scaler: Any = GradScaler(device.type, **self.scaler) if self.scaler else None
        self.scheduler = None
        if self.gamma:
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, self.gamma)
        self.steps: list[Trace] = []
        self.losses: list[str] = []
        for twist in self.after:
            twist(self)
        self.optimizer.register_step_pre_hook(lambda *_: self._note_step())
        return self

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss, noting in what it was called."""
        self.visits("loss")
        on = autocast_on(output.device.type)
        self.losses.append(f"output {kind_of(output)}, target {kind_of(target)}{on}")
        return self.loss(output, target)

    def _note_step(self) -> None:
        gradients = {n: g for n, p in self.leaves.items() if (g := _gradient(p)) is not None}
        self.steps.append(
            {
                "gradients": {n: g for n, g in gradients.items() if n not in self.foreign},
                "rate": [group["lr"] for group in self.optimizer.param_groups],
            }
        )
        self.visits("step")

    def now(self) -> Trace:
        """What the world holds at this moment."""
        state = self.optimizer.state_dict()
        leaves = self.leaves.items()
        return {
            "weights": {name: p.detach().clone() for name, p in leaves},
            "optimizer state": kept(state["state"]),
            "optimizer groups": kept(state["param_groups"]),
            "kept gradients": {n: _gradient(p) for n, p in leaves},
            "buffers": {name: b.clone() for name, b in self.model.named_buffers()},
            "scaler": self.grad_scaler.state_dict() if self.grad_scaler else None,
            "schedule": self.scheduler.last_epoch if self.scheduler else None,
            "random state": _random_state(self.device),
        }


def _gradient(leaf: Tensor) -> Tensor | None:
    return None if leaf.grad is None else leaf.grad.clone()


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Of each stream what it gives next, for people to read, and then all of it."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    following = {f"the {k}: next numbers": draw.numbers_after(s, k) for k, s in states.items()}
    return {**following, **{f"the {kind}: all of it": state for kind, state in states.items()}}


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return _laid_out_on(device, batch)
    if isinstance(batch, (tuple, list)):
        parts = [_moved(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, dict):
        return {key: _moved(part, device) for key, part in batch.items()}
    return batch


def _laid_out_on(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on the device, with its strides: `to` makes a slice contiguous."""
    if tensor.device.type == device.type or tensor.requires_grad or 0 in tensor.stride():
        return tensor.to(device)
    place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return place.copy_(tensor)


def observe(
    call: Callable[[World], Any], build: Callable[[], World], device: torch.device
) -> Trace:
    """Run `call` in a new world and note everything that can be seen of it."""
    reset_torch()
    world = build().ready(device)
    result: Any = None
    error: BaseException | None = None
    with ExitStack() as callers:
        for enter in world.inside:
            callers.enter_context(enter())
        try:
            result = call(world)
        except BaseException as caught:  # a planted KeyboardInterrupt too
            error = caught
    probes = [m for m in world.model.modules() if isinstance(m, Probe)]
    seen: Trace = {
        "outcome": getattr(error, "words", type(error).__name__) if error else "returns",
        "passes forward": [run for p in probes for run in p.forwards],
        "passes back": [run for p in probes for run in p.backwards],
        "loss calls": world.losses,
        "optimizer steps": len(world.steps),
    }
    for number, step in enumerate(world.steps, 1):
        seen |= {f"{key} at step {number}": value for key, value in step.items()}
    seen |= results(result) | world.notes | world.now()
    return seen | {"_world": world, "_error": error}


def results(result: Any) -> Trace:
    """What was returned: a number, a row of named numbers, or a list of rows."""
    if hasattr(result, "_asdict"):
        return {name: described(value) for name, value in result._asdict().items()}
    if isinstance(result, list):
        seen: Trace = {"number of results": len(result)}
        for number, row in enumerate(result, 1):
            seen |= {f"{name} of result {number}": v for name, v in results(row).items()}
        return seen
    return {"result": described(result)}


@dataclass(frozen=True)
class Described:
    """A returned tensor: its value, and what it is."""

    value: Tensor
    kind: tuple[Any, ...]

    def __str__(self) -> str:
        dtype, shape, graph, held = self.kind
        more = ", with a graph" if graph else ""
        more += f", a view that keeps {held} bytes" if held else ""
        number = f"{self.value.flatten()[0].item():.6g}" if self.value.numel() else "nothing"
        return f"{number} ({str(dtype).removeprefix('torch.')}, shape {shape}{more})"


def described(value: Any) -> Any:
    """A returned value, by value."""
    if not isinstance(value, Tensor):
        return value
    # A part of something larger keeps all of it; one number more or less is no matter.
    held = value.untyped_storage().nbytes() if value.layout == torch.strided else 0
    held = held if held > value.nbytes + 512 else 0
    kind = value.dtype, tuple(value.shape), value.requires_grad, held
    return Described(value.detach().clone(), kind)
