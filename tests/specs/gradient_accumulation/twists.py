"""The worlds that accumulate is put into, each as a change of a plain one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.laws.precisions import default_dtype
from kit.laws.trace import Probe, World
from kit.laws.twists import Pair, Twist, loss_with_a_parameter, put

Row = tuple[Twist, ...]
Rows = Mapping[str, Row]


def regression(*sizes: int) -> World:
    """A small model, and micro-batches of so many samples; targets of number n lie around 2 n."""
    draw.seed(3)
    model = nn.Sequential(nn.Linear(7, 13), Probe(), nn.Tanh(), nn.Linear(13, 5))
    batches = [(draw.randn(size, 7), draw.randn(size, 5) + 2 * n) for n, size in enumerate(sizes)]
    return World(model, batches, sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1})


def sizes(*numbers: int) -> Twist:
    """Micro-batches of so many samples."""
    return lambda w: put(batches=regression(*numbers).batches)(w)


def only(*numbers: int) -> Twist:
    """These micro-batches only."""
    return lambda w: put(batches=[w.batches[n] for n in numbers])(w)


def tag(*names: str) -> Twist:
    return lambda w: w.tags.update(names)


def sequences(w: World) -> None:
    """Samples are sequences of several lengths; output and target cannot change places."""
    shapes = ((3, 2), (1, 9), (2, 4), (2, 3), (4, 1), (1, 5), (2, 2))[: len(w.batches)]
    w.batches = [
        (draw.randn(*shape, 7), draw.randn(*shape, 5) + 2 * n) for n, shape in enumerate(shapes)
    ]
    w.loss = lambda out, y: ((out - y).square() * y.abs()).flatten(1).mean(1).mean()


def repeated(w: World) -> None:
    """The last micro-batch three times, and not all in a row; the pair is the same object."""
    w.after.append(lambda w: put(batches=[w.batches[-1], *w.batches, w.batches[-1]])(w))


def norm_first(w: World) -> None:
    """Behind a layer with a bias, that bias would have a gradient of rounding errors."""
    assert isinstance(w.model, nn.Sequential)
    w.model.insert(0, nn.BatchNorm1d(7))


def pairs(w: World) -> None:
    """A tuple of micro-batches, in lists and named tuples in turn, as a DataLoader makes them."""
    makers = itertools.cycle([list, Pair._make])
    w.after.append(lambda w: put(batches=(*(next(makers)(b) for b in w.batches),))(w))


def in_float64(w: World) -> None:
    """The model, and data that are numbers of its kind."""
    w.model.double()
    w.batches = [[t.double() if t.is_floating_point() else t for t in b] for b in w.batches]
    w.tags.add("float64")


class OutOfMemory(torch.OutOfMemoryError):
    """As an allocator has it: known by its kind, or by its words."""

    def __str__(self) -> str:
        return "CUDA out of memory"


class Checkpointed(nn.Tanh):
    """Runs again in the backward pass, in the older way that libraries still have."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


def kept_losses(w: World) -> None:
    """The loss keeps what it returns, as one that logs does."""
    inner, kept = w.loss, list[Tensor]()

    def loss(*args: Tensor) -> Tensor:
        kept.append(inner(*args))
        return kept[-1]

    @contextmanager
    def outer() -> Iterator[None]:
        yield
        w.notes["losses that the loss function kept"] = [x.detach() for x in kept]

    w.loss = loss
    w.inside.append(outer)


def infinite_loss(w: World) -> None:
    """Of the second micro-batch."""
    inputs, targets = w.batches[1]
    w.batches[1] = (inputs, targets * math.inf)


def only_the_loss(w: World) -> None:
    """The model has nothing to train."""
    loss_with_a_parameter(w)
    inner, w.model = w.loss, nn.Sequential(Probe(), nn.Tanh())
    w.loss = lambda out, y: inner(out[:, :5], y)


def refilled(w: World) -> None:
    """The next window comes in the same tensors."""

    def visit(place: str) -> None:
        for tensor in itertools.chain(*w.batches) if place == "next window" else ():
            tensor[:, 1:] = tensor[:, :1]

    w.visits, w.tags = visit, {*w.tags, "twice"}


def with_autocast_off(w: World) -> None:
    """Inside whatever there is."""
    w.inside.append(lambda: torch.autocast(w.device.type, enabled=False))


def gradient_of_another(value: float = 1.0) -> Twist:
    """The model has a parameter of another optimizer, which is in the middle of a window."""

    def twist(w: World) -> None:
        theirs = w.model.theirs = nn.Parameter(torch.ones(3))
        theirs.grad, w.foreign = torch.full((3,), value), (*w.foreign, "theirs")

        @contextmanager
        def outer() -> Iterator[None]:
            yield
            w.notes["a gradient of another optimizer"] = theirs.grad

        w.inside.append(outer)

    return twist


def zero_gradients(w: World) -> None:
    """Every gradient is zero, which is not the same as none."""
    w.model.register_forward_hook(lambda _, args, out: out * 0)


def targets_in_bfloat16(w: World) -> None:
    w.batches = [(x, y.bfloat16()) for x, y in w.batches]


def transposed_weights(w: World) -> None:
    """Weights, and so their gradients, lie in memory by columns."""
    for p in w.model.parameters():
        p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data


def inputs_with_a_parameter(w: World) -> None:
    """The inputs are made with a parameter that the optimizer holds."""
    shift = w.extra["prompt"] = nn.Parameter(torch.zeros(7))
    w.after.append(lambda w: put(batches=[(x + shift, y) for x, y in w.batches])(w))


class Loss(nn.Module):
    """A loss with a mode of its own, and a buffer."""

    calls: Tensor

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss, self.dropout = loss, nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.loss(self.dropout(output), target)
        return result


def loss_in_mode(train: bool) -> Twist:
    """The loss is a module in this mode, and the model is in the other."""

    def twist(w: World) -> None:
        loss = Loss(w.loss_fn).train(train).to(w.device)
        w.model.train(not train)
        put(loss_fn=loss)(w)
        w.notes["loss calls in a buffer of the loss"] = loss.calls

    return lambda w: w.after.append(twist)


def runs_before_the_step(w: World) -> None:
    """A hook of the optimizer runs the model under autocast, as one that logs does."""

    def hook(*_: object) -> None:
        with torch.autocast(w.device.type, torch.bfloat16):
            w.model(w.batches[0][0])

    def watch(w: World) -> None:
        w.optimizer.register_step_pre_hook(hook)

    w.after.append(watch)


def in_default_dtype(dtype: torch.dtype) -> Twist:
    """The caller has another default dtype."""
    return lambda w: w.inside.append(lambda: default_dtype(dtype))
