"""MasterWeights beside plain float32 training: models, optimizers, and scripts that both play."""

from __future__ import annotations

import io
from functools import partial
from math import nan

import torch
from torch import nn

from kit.laws import draw
from kit.laws.equal import same
from kit.laws.scenarios import scenarios
from kit.laws.scripts import play
from kit.laws.trace import kept
from specs.amp_loop.laws import held, laid_otherwise

SGD = partial(torch.optim.SGD, lr=0.125, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.003)
SMALL = partial(torch.optim.SGD, lr=2.0**-12)
GROUPS = lambda masters: SGD([{"params": masters[1:]}, {"params": masters[:1], "lr": 0.5}])  # noqa: E731


def layer(dtype=torch.bfloat16):
    """Weights of 1 and more, where 16 bits are coarse."""
    draw.seed(4)
    (made := nn.Linear(5, 3)).weight.data += 1.0
    return made.to(dtype)


def tangled():
    """A frozen float32 layer with a NaN gradient, two tied bfloat16 layers, a float16 one."""
    draw.seed(4)
    frozen, one, other, last = nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
    frozen.requires_grad_(False).weight.grad = torch.full((5,), nan)
    other.weight = one.weight
    made = nn.Sequential(frozen, one.bfloat16(), other.bfloat16(), last.half())
    made.number = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    made.base = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    return made


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


class Twin:
    """The oracle: float32 copies, trained as if there were no 16-bit weights."""

    def __init__(self, model, make_optimizer):
        self.weights = trainable(model)
        self.masters = [p.detach().float().requires_grad_() for p in self.weights]
        self.optimizer = make_optimizer(self.masters)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self, scale=1.0):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float() / scale
        if not all(m.grad.isfinite().all() for m in self.masters if m.grad is not None):
            return False
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data.copy_(master.detach())
        return True


class Side:
    """A model with its trainer, and what scripts call."""

    def __init__(self, make, build, optimizer):
        self.model = build()
        # What others that share the memory see, such as a flat buffer or a CUDA graph.
        self.views = [p.detach() for p in trainable(self.model)]
        self.make = partial(make, self.model, optimizer)
        self.trainer = self.make()

    def __getattr__(self, name):  # masters, optimizer, step, zero_grad
        return getattr(self.trainer, name)

    def backward(self, value=1.0, bad=None, missing=None, at=-1):
        """Gradients of `value`; one parameter's ends with `bad`, and another has none."""
        for number, p in enumerate(trainable(self.model)):
            grad = laid_otherwise(torch.full_like(p, value))
            p.grad = None if number == missing else grad
        if bad is not None:
            grad = trainable(self.model)[at].grad
            grad[(-1,) * grad.dim()] = bad

    def reload(self):
        """A new trainer continues from a file; the model's weights are lost."""
        if isinstance(self.trainer, Twin):
            return
        torch.save(self.state_dict(), file := io.BytesIO())
        file.seek(0)
        for weight in trainable(self.model):
            weight.data.mul_(2)
        self.trainer = self.make()
        self.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def seen(self):
        plain, params = isinstance(self.trainer, Twin), dict(self.model.named_parameters())
        grads = {n: p.grad for n, p in params.items() if p.requires_grad and p.grad is not None}
        seen = {
            "weights": {name: p.detach() for name, p in params.items()},
            "16-bit gradients": {name: g.nan_to_num(nan=7.0) for name, g in grads.items()},
            "masters": [master.detach() for master in self.masters],
            "requires_grad": [(m.is_leaf, m.requires_grad) for m in self.masters],
            "masters in the optimizer": [*map(id, held(self.optimizer))]
            == [*map(id, self.masters)],
            "float32 gradients kept": [m.grad is not None and not plain for m in self.masters],
            "optimizer": self.optimizer.state_dict(),
            "views of the weights": self.views,
        }
        return kept(seen)


# What a difference means if nothing above it in this table differs.
MEANS = {
    "16-bit gradients": "`step` changes or drops the 16-bit gradients: they stay until zero_grad()",
    "masters in the optimizer": "`masters` are not the optimizer's tensors, in the model's order",
    "masters": None,
    "weights": "the masters are right, and the model's weights are not these, rounded",
    "float32 gradients kept": "the masters keep their gradients, 4 bytes a parameter",
}


def first_wrong(got, want):
    """What the first difference means, in the order of MEANS."""
    wrong = [name for name, value in want.items() if not same(got.get(name), value)]
    first = next(iter(wrong), "")
    kind, _, after = first.partition(" after ")
    if kind in ("weights", "masters") and want[f"what comes after {after}"] is False:
        return "a step is not skipped as a whole: one infinite or NaN gradient skips all of it"
    return next((MEANS[kind] for kind in MEANS if any(n.startswith(kind) for n in wrong)), None)


@scenarios("MasterWeights", first_wrong, clauses={"float32 gradients kept": "memory"})
def agrees(answer, device, name, script, optimizer=SGD, build=layer):
    sides = (Side(make, build, optimizer) for make in (answer.MasterWeights, Twin))
    return tuple(play(side, script) for side in sides)
