"""What runs on every rank: train_step with tokens, with blocks of any signature, after an error."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check_raises
from kit.ranks.rank import device
from specs.fsdp_wrap.models import OUTPUTS, Batch, Block, Trained, gradients, momentum, mse
from specs.fsdp_wrap.ranks_step import Plan, batches, wrapped
from specs.fsdp_wrap.ranks_wrap import mesh
from specs.fsdp_wrap.shapes import SHAPES

# For each rank the micro-batches: samples, and how long they are.
TEXTS = [[(3, 2), (1, 7)], [(2, 5), (4, 1)]]


def reader() -> nn.Module:
    """From tokens (samples, length) to (samples, length, 3)."""
    draw.seed(4)
    return nn.Sequential(nn.Embedding(11, 13), Block(13), nn.Linear(13, OUTPUTS))


def texts(rank: int) -> list[Batch]:
    generator = draw.generator(rank)
    return [
        (
            draw.randint(11, shape, device(), generator),
            draw.randn(*shape, OUTPUTS, device=device(), generator=generator),
        )
        for shape in TEXTS[rank]
    ]


def reads(answer: Any, rank: int) -> Trained:
    """A step on tokens; the micro-batches are a tuple."""
    model = reader().to(device())
    optimizer = answer.wrap(model, mesh(), Block, momentum)
    result = answer.train_step(model, tuple(texts(rank)), mse, optimizer)
    return Trained([result.loss.item()], [result.grad_norm.item()], {}, gradients(model))


def recomputed(answer: Any, rank: int, plan: Plan, shape: str) -> list[dict[str, Any]]:
    """The gradients of a step without checkpoints and with them."""
    found = []
    for checkpoint in (False, True):
        model, types = SHAPES[shape]()
        model.to(device())
        optimizer = answer.wrap(model, mesh(), types, momentum, checkpoint=checkpoint)
        answer.train_step(model, batches(plan, 0, rank), mse, optimizer)
        found.append(gradients(model))
    return found


def step_after_an_error(answer: Any, rank: int, plan: Plan) -> Trained:
    """The loss function raises, where forward has left the whole model gathered; then a step."""
    model, optimizer = wrapped(answer, reshard_after_forward=False)

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError("no loss")

    window = batches(plan, 0, rank)
    check_raises(
        lambda: answer.train_step(model, window, loss_fn, optimizer),
        ArithmeticError,
        when="where loss_fn has raised it",
    )
    result = answer.train_step(model, window, mse, optimizer)
    return Trained([result.loss.item()], [result.grad_norm.item()], {}, gradients(model))
