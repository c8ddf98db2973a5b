"""What users combine: of LargeModels, and of blocks of others; what is plain comes first."""

import copy
from functools import partial

import torch
from torch import nn

from specs.checkpointed_model.blocks import Counting, Nest, Noisy, Normed, chain, mixers, others
from specs.checkpointed_model.steps import SHAPE, WIDTH, autocast, twice


def in_blocks(numbers, name):
    return name.startswith(tuple(f"layers.{n}." for n in numbers))


def _frozen(*numbers):
    return {"frozen": partial(in_blocks, numbers)}


def copied(steps, model):
    """A copy, with other weights, of a model that has made some steps."""
    for _ in range(steps):
        stepped(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    return twin


def then(train=None, **values):
    """Changes after a step."""

    def before(model):
        stepped(model)
        for name, value in values.items():
            setattr(model, name, value)
        return model if train is None else model.train(train)

    return before


def stepped(model):
    device = next(model.parameters()).device
    model(torch.ones(SHAPE, device=device, requires_grad=True)).sum().backward()
    model.zero_grad()


LARGE_MODELS = (
    {"": {}, "segments of 2": {"size": 2}, "one segment": {"size": 3}},
    {"": {}, "eval mode": {"train": False}, "switched off": {"use": False}},
    {"": {}, "no dropout": {"dropout": 0.0}, "one row": {"rows": 1}},
    {
        "": {},
        "a mask": {"masks": 1},
        "two passes, one with a mask": {"passes": 2, "masks": 1},
        "two passes with a mask each": {"passes": 2, "masks": 2},
    },
    {"": {}, "x without gradient": {"grad": False}},
    {
        "": {},
        "frozen biases": {"frozen": lambda name: name.endswith("bias")},
        "a frozen first block": _frozen(0),
        "a frozen last block": _frozen(2),
        "frozen blocks": _frozen(0, 1, 2),
    },
    {
        "": {},
        "autocast to bfloat16": {"outer": autocast(torch.bfloat16)},
        "autocast to float16": {"outer": autocast(torch.float16)},
        "no_grad": {"outer": torch.no_grad},
    },
    {
        "": {},
        "a copy": {"before": partial(copied, 0)},
        "a copy after a step": {"before": partial(copied, 1)},
        "a size of 1 set later": {"before": then(segment_size=1)},
        "switched on later": {"before": then(use_checkpoint=True)},
    },
    {"": {}, "two backward passes": {"backward": twice}},
    {
        "": {},
        "another size by then": {"spoil": lambda model, *_: setattr(model, "segment_size", 1)},
        "switched off by then": {
            "spoil": lambda model, *_: setattr(model, "use_checkpoint", False)
        },
    },
)


def met(*, given=(), keywords=None, **options):
    """A chain whose blocks take these besides x."""
    return chain(options.pop("make"), *given, **options, **(keywords or {}))


def wrapped(run, block, x, /, *args, **kwargs):
    """A block is called in a function, and its state is told by an iterator."""
    state = iter([block, *getattr(block, "generators", ())])
    return run(lambda *args, **kwargs: block(*args, **kwargs), x, *args, state=state, **kwargs)


_TENSOR = torch.float32
BLOCKS = (
    {
        "generators": {"make": lambda: [Noisy(7, 8), Noisy(9)]},
        "counters": {"make": lambda: [Counting(), Counting()]},
        "counters further inside": {"make": lambda: [Nest(Counting(), Noisy()), Nest(Noisy())]},
        "batch norms": {
            "make": lambda: [Normed(nn.BatchNorm1d(WIDTH)), Normed(nn.BatchNorm1d(WIDTH).eval())],
            "shape": (4, WIDTH, 3),
        },
        "arguments of every kind": {
            "make": mixers,
            "given": (_TENSOR, (_TENSOR, 2.5, None), torch.int64),
            "keywords": {"name": "late", "debug": {"b": [_TENSOR]}},
        },
    },
    {"": {}, "two passes": {"passes": 2}, "three passes": {"passes": 3}},
    {"": {}, "x without gradient": {"grad": False}},
    {
        "": {},
        "autocast to bfloat16": {"step": {"outer": autocast(torch.bfloat16)}},
        "autocast to float16": {"step": {"outer": autocast(torch.float16)}},
        "no_grad": {"step": {"outer": torch.no_grad}},
        "two backward passes": {"step": {"backward": twice}},
        "two backward passes, autocast": {
            "step": {"outer": autocast(torch.bfloat16), "backward": twice}
        },
    },
    {
        "": {},
        "in eval mode by then": {"spoil": lambda model, *_: model.eval()},
        "other buffers by then": {"spoil": others},
    },
)
