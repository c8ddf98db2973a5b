"""What real users' worlds have, each as a change of a plain one: `twisted(base, frozen, stale)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.precisions import PRECISIONS, SCALE
from kit.laws.toys import mse
from kit.laws.trace import Planted, World

Twist = Callable[[World], object]


def twisted(base: Callable[[], World], *twists: Twist) -> Callable[[], World]:
    """A world as `base` builds it, changed by each twist in turn."""

    def build() -> World:
        world = base()
        for twist in twists:
            twist(world)
        return world

    return build


def in_precision(name: str) -> Twist:
    """Compute in fp32, bf16 or fp16; the last with a scaler."""
    scaler = {"init_scale": SCALE} if name == "fp16" else None
    return put(dtype=PRECISIONS[name], scaler=scaler)


def put(**values: Any) -> Twist:
    """Set attributes of the world."""
    return lambda w: vars(w).update(values)


def option(**values: Any) -> Twist:
    """Set keyword arguments of the call."""
    return lambda w: w.options.update(values)


def insert(
    layer: Callable[[], nn.Module], *, train: bool = True, layer_train: bool | None = None
) -> Twist:
    """Put a layer behind the first, with the model in train or eval mode, or only the layer."""

    def twist(w: World) -> None:
        assert isinstance(w.model, nn.Sequential)
        w.model.insert(1, layer())
        w.model.train(train)
        if layer_train is not None:
            w.model[1].train(layer_train)

    return twist


def frozen(w: World) -> None:
    """The first parameter is not trained."""
    next(w.model.parameters()).requires_grad_(False)


def unused(w: World) -> None:
    """The optimizer holds a parameter that gets no gradient, and has a stale one."""
    w.extra["unused"] = nn.Parameter(torch.ones(3))
    w.extra["unused"].grad = torch.ones(3)


def foreign(w: World) -> None:
    """The optimizer does not hold the last weight."""
    w.foreign = ([*dict(w.model.named_parameters())][-2],)


def stale(w: World) -> None:
    """Gradients from before."""
    for p in [*w.model.parameters(), *w.extra.values()]:
        p.grad = torch.full_like(p, 1000.0)


def loss_with_parameters(w: World) -> None:
    """The loss has two, which the optimizer holds. Autograd gives both the same tensor."""
    shift, offset = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    w.extra |= {"shift": shift, "offset": offset}
    for leaf in (shift, offset):
        leaf.grad = torch.full_like(leaf, 1000.0)
    w.loss = lambda out, y: mse(out + (shift + offset), y)


def loss_with_a_matrix_product(w: World) -> None:
    """The loss ends in a matrix product, which autocast computes in 16 bits."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        error = (out - y).square().reshape(1, -1)
        return (torch.ones_like(error) @ error.T).sum() / error.numel()

    w.loss = loss


def large_inputs(w: World) -> None:
    """Inputs of 2**20 are infinite in float16; the model itself brings them down."""
    w.model.register_forward_pre_hook(lambda _, inputs: inputs[0] * 2.0**-20)
    w.batches = [(x * 2.0**20, y) for x, y in w.batches]


def token_ids(w: World) -> None:
    """Inputs and targets are integers."""
    assert isinstance(w.model, nn.Sequential)
    w.model.insert(0, nn.Embedding(11, 7))
    ids = [[draw.randint(high, (len(x),)) for high in (11, 5)] for x, _ in w.batches]
    w.batches, w.loss = [(x, y) for x, y in ids], F.cross_entropy


def in_lists(w: World) -> None:
    """Batches as a DataLoader makes them."""
    w.batches = [[*batch] for batch in w.batches]


def scaled(**options: float) -> Twist:
    """Options of the scaler, where there is one."""
    return lambda w: w.scaler and put(scaler={**w.scaler, **options})(w)


def tied(w: World) -> None:
    """Two layers share one weight."""
    assert isinstance(w.model, nn.Sequential)
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    w.tags = {*w.tags, "tied"}
    w.model.append(first)
    w.model.append(second)


def trained_before(w: World) -> None:
    """Gradients and momentum as in the middle of training."""

    def twist(w: World) -> None:
        for number, p in enumerate(w.leaves.values()):
            p.grad = torch.full_like(p, 0.1 * number)
        w.optimizer.step()

    w.after.append(twist)


def huge(value: float) -> Twist:
    """Two gradients of this size, whose squares are no float32."""

    def twist(w: World) -> None:
        leaf = w.extra["huge"] = nn.Parameter(torch.zeros(2))
        w.loss = lambda out, y: mse(out, y) + leaf.sum() * value
        w.sgd = {"lr": 1e-25}

    return twist


def gradient(value: float, at: int = 1) -> Twist:
    """One element of one gradient has this value, in the backward pass number `at`."""

    def twist(w: World) -> None:
        runs = []

        def hook(grad: Tensor) -> Tensor:
            runs.append(grad)
            spoiled = grad.clone()
            spoiled[-1] = value
            return spoiled if len(runs) == at else grad

        assert isinstance(w.model, nn.Sequential)
        bias = w.model[-1].bias
        assert isinstance(bias, Tensor)
        bias.register_hook(hook)
        if not math.isfinite(value):
            w.tags = {*w.tags, "not finite"}

    return twist


def fails(
    place: str,
    at: int = 1,
    error: type[BaseException] = Planted,
) -> Twist:
    """The model, the loss, the backward pass or the step raises at its visit number `at`."""

    def twist(w: World) -> None:
        counts: dict[str, int] = {}

        def visit(where: str) -> None:
            counts[where] = counts.get(where, 0) + 1
            if where == place and counts[where] == at:
                raise error(place)

        w.visits, w.tags = visit, {*w.tags, "planted"}
        w.model.register_forward_pre_hook(lambda *_: visit("model"))
        [*w.model.parameters()][-1].register_hook(lambda _: visit("backward"))

    return twist


def refused(*twists: Twist, mentions: Iterable[object] = ()) -> tuple[Twist, ...]:
    """A call that is refused with such words, in the middle of training."""
    return (put(mentions=tuple(mentions), refused_at=0), *twists, trained_before)


# Pairs of wrong lengths, each with what a message must name.
BAD_PAIRS: tuple[tuple[Any, ...], ...] = (
    ("no samples", (torch.ones(0, 7), torch.ones(0, 5)), 0),
    ("6 inputs and 1 target", (torch.ones(6, 7), torch.ones(1, 5)), (6, 1)),
    ("1 input and 6 targets", (torch.ones(1, 7), torch.ones(6, 5)), (1, 6)),
)


def bad_batches() -> Iterator[tuple[Any, ...]]:
    """Scenarios with a first batch that is no pair of tensors of one length."""
    ones = torch.ones
    for name, batch, *mentions in (
        *BAD_PAIRS,
        ("three tensors", (ones(2, 7), ones(2, 5), ones(2))),
        ("inputs without targets", (ones(2, 7),)),
        ("one tensor of two rows", ones(2, 7)),
        ("lists of numbers", ([1.0, 2.0], [1.0, 2.0])),
        ("tuples of numbers", ((1.0, 2.0), (1.0, 2.0))),
        ("a tensor and None", (ones(2, 7), None)),
        ("a dict", {"x": ones(2, 7), "y": ones(2, 5)}),
    ):
        yield f"a batch of {name}", *refused(_first_batch(batch), mentions=mentions)


def _first_batch(batch: object) -> Twist:
    return lambda w: w.batches.__setitem__(0, batch)
