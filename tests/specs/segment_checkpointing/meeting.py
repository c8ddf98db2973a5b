"""What users combine in one call: what is given, comes back, is in force, and happens to it."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kit.laws.scenarios import scenarios
from specs.segment_checkpointing import worlds as w


@scenarios("the plain step", w.cause_of)
def nearly_as_plain(answer, device, name, step):
    """As plain; where a tensor has several gradients, they may be added up in another order.

    A checkpoint inside another is called again in the backward pass.
    """
    got, want = w.as_plain_judge(answer, device, name, step)
    got["results"] = {key: got["results"].get(key) for key in want["results"]}
    for key, true in want.items():
        mine = got[key]
        if key.startswith("gradient") and isinstance(mine, Tensor) and isinstance(true, Tensor):
            alike = mine.dtype == true.dtype and mine.shape == true.shape
            is_near = alike and bool((mine - true).norm() <= step.rounding * true.norm())
            got[key] = true if is_near else mine
    return got, want


def tensors_of(result):
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


def meeting(
    *,
    function=lambda model, weight, a, *_: model(a),
    given=lambda x: (x,),
    train=True,
    outer=nullcontext,
    way=lambda call, function, args: call(function, *args),
    change=lambda tensor: tensor,
    first=False,  # of several results this one alone is used
    between=lambda: None,
    again=False,
):
    """A step with a checkpoint, or several."""
    x, weight = w.leaf(6, 5), w.leaf(5)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.4), nn.Linear(7, 5)
    model = nn.Sequential(*layers).train(train)

    def step(call):
        with outer():
            results = way(call, partial(function, model, weight), given(x))
            parts = tensors_of(results)[: 1 if first else None]
            loss = sum(w.loss_of(change(part)) for part in parts)
        between()
        if again:
            loss.backward(retain_graph=True)
        return loss

    step.rounding = 1e-5 if outer is nullcontext else 2.0**-7
    return step


def _autocast(dtype, **options):
    return lambda: torch.autocast(torch.get_default_device().type, dtype, **options)


def _nested(call, function, args):
    return call(lambda *inner: call(function, *inner), *args)


def _twice(call, function, args):
    return (*tensors_of(call(function, *args)), *tensors_of(call(function, *args)))


# What is true of each alone is tried of each two together; what is plain comes first.
MEETING = (
    {
        "": {},
        "a leaf besides": {"function": lambda m, v, a, *_: (m(a) * v).sin()},
        "several results": {"function": lambda m, v, a, *_: (m(a), None, 3, (a * v).sin())},
        "a namedtuple": {"function": lambda m, v, a, *_: w.Pair(m(a), a.sin())},
        "a function that changes its own": {"function": lambda m, v, a, *_: m(a).mul_(2).add_(1)},
        "a view comes back": {"function": lambda m, v, a, *_: m(a)[1:]},
        "a function that draws": {"function": lambda m, v, a, *_: m(a) * F.dropout(a)},
    },
    {
        "": {},
        "a result is given": {"given": lambda x: (x * 1,)},
        "data are given": {"given": lambda x: (x.detach(),)},
        "a part is given": {"given": lambda x: ((x * 1)[1:],)},
        "other things are given too": {"given": lambda x: (x, torch.tensor([2, 0]), None, 0.5)},
        "a tensor is given twice": {"given": lambda x: (x, x)},
    },
    {"": {}, "in eval mode": {"train": False}},
    {
        "": {},
        "bfloat16": {"outer": _autocast(torch.bfloat16)},
        "float16": {"outer": _autocast(torch.float16)},
        "bfloat16 without cache": {"outer": _autocast(torch.bfloat16, cache_enabled=False)},
    },
    {"": {}, "nested": {"way": _nested}, "called twice": {"way": _twice}},
    {"": {}, "changed in place": {"change": lambda tensor: tensor.mul_(2)}},
    {"": {}, "the first result is used": {"first": True}},
    {"": {}, "numbers are drawn in between": {"between": lambda: F.dropout(torch.ones(3))}},
    {"": {}, "two backward passes": {"again": True}},
)
