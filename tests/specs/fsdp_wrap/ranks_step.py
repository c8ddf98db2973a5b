"""What runs on every rank: programs for the specs of train_step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from kit.laws import draw
from kit.laws.checks import check, check_raises
from kit.ranks.rank import device
from specs.fsdp_wrap.models import (
    Batch,
    Block,
    Model,
    Trained,
    data,
    gradients,
    make,
    momentum,
    mse,
    weights,
)
from specs.fsdp_wrap.ranks_wrap import mesh, meshes
from specs.fsdp_wrap.untouched import check_untouched, local_state

# For each rank the samples of its micro-batches.
Plan = Sequence[Sequence[int]]

# One more batch than a step has, for what comes after a step.
AFTER = 77


def batches(plan: Plan, step: int, rank: int) -> list[Batch]:
    """A rank's micro-batches in a step; no two ranks or steps have the same data."""
    return [
        (inputs.to(device()), targets.to(device()))
        for inputs, targets in data(plan[rank], seed=10 * step + rank)
    ]


def of_all(plan: Plan, step: int) -> list[Batch]:
    return [batch for rank in range(len(plan)) for batch in batches(plan, step, rank)]


def wrapped(
    answer: Any,
    made: Mapping[str, Any] | None = None,
    over: DeviceMesh | None = None,
    make_optimizer: Callable[..., Optimizer] = momentum,
    **options: Any,
) -> tuple[Model, Optimizer]:
    """A model of `make`, wrapped, and its optimizer."""
    model = make(**(made or {})).to(device())
    return model, answer.wrap(model, over or mesh(), Block, make_optimizer, **options)


def train(
    answer: Any,
    rank: int,
    plan: Plan,
    steps: int = 1,
    made: Mapping[str, Any] | None = None,
    wrap: Mapping[str, Any] | None = None,
    step: Mapping[str, Any] | None = None,
) -> Trained:
    """So many steps; `made`, `wrap` and `step` are options of `make`, `wrap` and `train_step`."""
    model, optimizer = wrapped(answer, made, **(wrap or {}))
    results = [
        answer.train_step(model, batches(plan, number, rank), mse, optimizer, **(step or {}))
        for number in range(steps)
    ]
    losses = [result.loss.item() for result in results]
    norms = [result.grad_norm.item() for result in results]
    return Trained(losses, norms, weights(model), gradients(model))


def result_of_a_step(answer: Any, rank: int, plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """What a step returns: of loss and norm the type, the dtype, and so on, and the numbers."""
    model, optimizer = wrapped(answer, dtype=dtype)
    result = answer.train_step(model, batches(plan, 0, rank), mse, optimizer)
    shown = {}
    for name in ("loss", "grad_norm"):
        value = getattr(result, name)
        shown[name] = type(value).__name__
        if isinstance(value, Tensor):
            shown[name] += f" {value.dtype} {tuple(value.shape)} graph={value.requires_grad}"
    shown["numbers"] = torch.stack([torch.as_tensor(float(x)) for x in result])
    return shown


def in_pairs(answer: Any, rank: int, plan: Plan) -> Trained:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another."""
    model, optimizer = wrapped(answer, over=meshes(2)["shards"])
    result = answer.train_step(model, batches(plan, 0, rank), mse, optimizer)
    return Trained([result.loss.item()], [result.grad_norm.item()], {}, gradients(model))


def infinite(answer: Any, rank: int, plan: Plan) -> Trained:
    """A step without max_norm in which the head's bias gets an infinite gradient.

    The optimizer moves nothing, so that there are weights and gradients to compare afterwards.
    """
    model, optimizer = wrapped(answer, make_optimizer=functools.partial(torch.optim.SGD, lr=0.0))

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return _InfiniteBack.apply(mse(output, targets), model.head.bias)

    result = answer.train_step(model, batches(plan, 0, rank), loss_fn, optimizer)
    return Trained([result.loss.item()], [result.grad_norm.item()], {}, gradients(model))


class _InfiniteBack(torch.autograd.Function):
    """The loss as it is; backward gives the parameter an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, parameter: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = parameter.shape, parameter.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.full(ctx.shape, torch.inf, dtype=ctx.dtype, device=grad.device)


def checkpointed(answer: Any, rank: int, plan: Plan, checkpoint: bool) -> dict[str, Any]:
    """A step with dropout: gradients, how often each block's forward ran, and the next number."""
    model = make(blocks=2, drop=0.4).to(device())
    runs = [0] * len(model.blocks)

    def count(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            runs[number] += 1

        return hook

    for number, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(count(number))  # it begins every forward of the block
    optimizer = answer.wrap(model, mesh(), Block, momentum, checkpoint=checkpoint)
    draw.seed(8 + rank)
    answer.train_step(model, batches(plan, 0, rank), mse, optimizer)
    return {"gradients": gradients(model), "runs": runs, "names": list(model.state_dict())}


def starts_clean(answer: Any, rank: int, plan: Plan) -> Trained:
    """Gradients of 1000 are there before the step."""
    model, optimizer = wrapped(answer)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1000.0)
    result = answer.train_step(model, batches(plan, 0, rank), mse, optimizer)
    return Trained([result.loss.item()], [result.grad_norm.item()], {}, gradients(model))


def then_plain(answer: Any, rank: int, plan: Plan, sync: str) -> Trained:
    """A step, and then an ordinary backward pass, each rank with data of its own."""
    model, optimizer = wrapped(answer, make_optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    answer.train_step(model, batches(plan, 0, rank), mse, optimizer, sync=sync)
    return _plain(model, optimizer, plan, rank)


def plain_after_an_error(answer: Any, rank: int, plan: Plan) -> Trained:
    """The loss function raises in the first micro-batch; then an ordinary backward pass."""
    model, optimizer = wrapped(answer)

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError("no loss")

    window = batches(plan, 0, rank)
    when = "where loss_fn has raised it"
    check_raises(
        lambda: answer.train_step(model, window, loss_fn, optimizer, sync="last"),
        ArithmeticError,
        when=when,
    )
    return _plain(model, optimizer, plan, rank)


def _plain(model: nn.Module, optimizer: Optimizer, plan: Plan, rank: int) -> Trained:
    optimizer.zero_grad()
    ((inputs, targets),) = batches([[4]] * len(plan), AFTER, rank)
    loss = mse(model(inputs), targets)
    loss.backward()
    return Trained([loss.item()], [], {}, gradients(model))


def refused(
    answer: Any, rank: int, bad: Sequence[list[Batch]], mentions: Sequence[Sequence[str]], when: str
) -> None:
    """A step that every rank must refuse without a trace.

    It ends there: a call more would meet that of a rank that waits, and hide that it does.
    """
    _refuse(answer, *_begun(answer), bad[rank], mentions[rank], when)


def refused_then_good(answer: Any, rank: int, bad: Sequence[list[Batch]], when: str) -> Trained:
    """A good step, one that is refused, and a good one: what `train` has after two steps."""
    model, optimizer = wrapped(answer)
    first = answer.train_step(model, batches(GOOD, 0, rank), mse, optimizer)
    _refuse(answer, model, optimizer, bad[rank], [], when)
    second = answer.train_step(model, batches(GOOD, 1, rank), mse, optimizer)
    results = (first, second)
    losses = [result.loss.item() for result in results]
    norms = [result.grad_norm.item() for result in results]
    return Trained(losses, norms, weights(model), gradients(model))


GOOD: Plan = [[3, 2], [1, 6]]


def _refuse(
    answer: Any,
    model: Model,
    optimizer: Optimizer,
    bad: list[Batch],
    mentions: Sequence[str],
    when: str,
) -> None:
    before = local_state(model, optimizer)
    check_raises(
        lambda: answer.train_step(model, bad, mse, optimizer),
        ValueError,
        mentions=mentions,
        when=when,
    )
    check_untouched(before, model, optimizer)


def move(model: nn.Module, optimizer: Optimizer) -> None:
    """Other weights and a state of the optimizer, as after a step, without its calls."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _begun(answer: Any) -> tuple[Model, Optimizer]:
    model, optimizer = wrapped(answer)
    move(model, optimizer)
    return model, optimizer


def refuses_arguments(answer: Any, rank: int) -> None:
    """Options that are not there, norms that are none, and a model that is not wrapped."""
    model, optimizer = _begun(answer)
    window = batches(GOOD, 0, rank)
    before = local_state(model, optimizer)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync": "first"}, "first"),
        ({"sync": None}, "None"),
        ({"max_norm": 0.0}, "0"),
        ({"max_norm": -1.5}, "-1.5"),
        ({"max_norm": float("nan")}, "nan"),
    ]
    for options, word in cases:
        check_raises(
            functools.partial(answer.train_step, model, window, mse, optimizer, **options),
            ValueError,
            mentions=[word],
            when=f"where {' and '.join(f'{k}={v!r}' for k, v in options.items())}",
        )
        check_untouched(before, model, optimizer)
    plain = make().to(device())
    start = plain.head.bias.detach().clone()
    check_raises(
        lambda: answer.train_step(plain, window, mse, momentum(plain.parameters())),
        ValueError,
        when="where the model is not wrapped",
    )
    check(
        torch.equal(plain.head.bias.detach(), start),
        expected="a model that is refused as it was",
        got="weights that moved",
        cause="the model is looked at after the step",
    )
