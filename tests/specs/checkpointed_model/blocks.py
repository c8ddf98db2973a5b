"""Blocks with state, and chains of them for a step to run through."""

import logging
import os
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from kit.laws import draw
from kit.laws.scenarios import once, scenarios
from kit.private_torch import DispatchMode, tree_leaves, tree_map
from specs.checkpointed_model.steps import SHAPE, WIDTH, Step, compared, meaning, see


class Noisy(nn.Module):
    """Dropout from its own generators, one per seed, and from torch's stream."""

    def __init__(self, *seeds, rate=0.25):
        super().__init__()
        self.up, self.rate, device = nn.Linear(WIDTH, WIDTH), rate, torch.get_default_device()
        self.first, self.second = None, None
        for name, seed in zip(("first", "second"), seeds, strict=False):
            setattr(self, name, Generator(device).manual_seed(seed))

    @property
    def generators(self):
        return [g for g in (self.first, self.second) if g is not None]

    def forward(self, x):
        y = torch.tanh(self.up(x))
        for generator in self.generators:
            y = y * (torch.rand(y.shape, generator=generator, device=y.device) < 0.75)
        return x + torch.tanh(F.dropout(y, self.rate, self.training))


class Counting(nn.Module):
    """Its result depends on buffers: one is written to, one replaced, one is None at first."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", None)

    def forward(self, x):
        y = torch.tanh(self.up(x - self.mean)) * 0.8 ** self.calls.float()
        y = y if self.last is None else y + 0.1 * self.last
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        self.last = y.detach().mean()
        return x + torch.tanh(y)


class Nest(nn.Module):
    """A block that holds others."""

    def __init__(self, *inner):
        super().__init__()
        self.up, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(*inner)

    def forward(self, x):
        # The last tanh needs its result, so that a recomputation cannot stop before `inner`.
        return x + torch.tanh(self.inner(torch.tanh(self.up(x))))


class Deeper(Nest):
    """A block of a derived class."""


class Normed(nn.Module):
    """A block with a nested norm, for inputs of (batch, WIDTH, ...)."""

    def __init__(self, norm):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.Sequential(norm)

    def forward(self, x):
        y = torch.tanh(self.up(x.transpose(1, -1))).transpose(1, -1)
        return x + torch.tanh(self.norm(y))


class Mixer(nn.Module):
    """A block that takes and returns all kinds of things, and records which arguments arrived."""

    def __init__(self):
        super().__init__()
        self.up, self.heard = nn.Linear(WIDTH, WIDTH), set()

    def forward(self, that, *more, name="", **rest):
        named = {f"argument_{number}" for number, _ in enumerate(more, 2)}
        self.heard = self.heard | {*named, *rest, *(["name"] if name else [])}
        hidden = F.dropout(torch.tanh(self.up(that)), 0.25, self.training)
        for part in tree_leaves((more, rest)):
            if isinstance(part, (Tensor, float)):
                hidden = torch.tanh(hidden * part)
        return that + torch.tanh(hidden), {"mean": hidden.mean(-1), "name": name, "nothing": None}


def mixers(count=2):
    return [Mixer() for _ in range(count)]


def noisy():
    return [Noisy(7, 8)]


def two_noisy():
    return [Noisy(), Noisy()]


def counting():
    return [Counting()]


def plain(function, /, *args, state=(), **kwargs):
    """A plain call that takes what recompute() takes."""
    return function(*args, **kwargs)


def call(run, block, x, /, *args, **kwargs):
    """How a chain calls a block; `run` is plain or recompute."""
    return run(block, x, *args, state=[block, *getattr(block, "generators", ())], **kwargs)


class Chain(nn.Module):
    """Blocks that are called in this order, wherever in the tree they are."""

    def __init__(self, order, tree=None):
        super().__init__()
        self.order, self.tree = order, tree or nn.ModuleList(order)


def chain(
    make,
    *args,  # of each block besides x; a dtype is a tensor with a gradient
    passes=1,
    shape=SHAPE,
    grad=True,  # of x
    tree=nn.ModuleList,
    prepared=lambda model: None,  # prepares the model before its blocks are checkpointed
    later=lambda model: None,  # the same after that; may return another model
    kinds=(),  # classes to checkpoint, if not that of the first block
    call=call,
    between=None,  # changes the model between the passes
    late=None,  # the same, between two backward passes
    step=None,
    **kwargs,
):
    """Blocks in a row, and a step through them."""

    def build(run, prepare, device):
        draw.seed(3)
        order = make()
        model = Chain(order, tree(order)).to(device)
        prepared(model)
        for kind in kinds or [type(order[0])]:
            prepare(model, kind)
        model = later(model) or model
        inputs = [draw.randn(*shape, device=device, requires_grad=grad) for _ in range(passes)]
        leaves = [*inputs]

        def made(part):
            if part == torch.int64:
                return torch.arange(WIDTH, device=device)
            if not isinstance(part, torch.dtype):
                return part
            leaves.append(draw.randn(WIDTH, dtype=part, device=device, requires_grad=True))
            return leaves[-1]

        given, named = tree_map(made, (args, kwargs))

        def forward():
            results = []
            for x in inputs:
                for block in model.order:
                    results.append(call(run, block, x, *given, **named))
                    x = results[-1][0] if isinstance(results[-1], tuple) else results[-1]
            return results

        inner = dict.fromkeys(m for block in model.order for m in block.modules())
        counted = [module.up for module in inner if hasattr(module, "up")]
        own = [g for m in model.modules() for g in getattr(m, "generators", ())]
        changes = {"between": between, "late": late}
        return Step(model, forward, counted, leaves, own, **changes, **step or {})

    return build


def stranger():
    """A step of GPT-2 of the transformers library, with random weights and three blocks."""

    def build(run, prepare, device):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        # The import takes over a second, so it waits for the first spec that needs it.
        library = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
        options = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 24, "vocab_size": 64}
        # On CUDA attention with dropout is one random operation, which `keep` may not have.
        options["attn_pdrop"] = 0.0 if device.type == "cuda" else 0.1
        draw.seed(5)
        config = library.GPT2Config(**options, bos_token_id=0, eos_token_id=0, use_cache=False)
        model = library.GPT2Model(config).to(device)
        x = draw.randint(64, (3, 24), device=device)
        blocks = list(model.train().h)
        prepare(model, library.GPT2Block)
        return Step(model, lambda: model(x).last_hidden_state, [block.ln_1 for block in blocks])

    return build


@scenarios("the step", meaning)
def recomputed(answer, device, name, build, runs=2):
    """A step with recompute() shows what it shows with plain calls."""
    mine = see(build(answer.recompute, nothing, device), device)
    true = once(name, lambda: see(build(plain, nothing, device), device))
    return compared(mine, true, runs)


@scenarios("the step", meaning)
def checkpointed(answer, device, name, build, counts, runs=2, keep=None):
    """A step shows what it showed before; `counts` are the returned numbers of blocks."""
    found, options = [], {} if keep is None else {"keep": keep}

    def checkpoint(model, kind):
        found.append(answer.checkpoint_blocks(model, kind, **options))

    mine = see(build(plain, checkpoint, device), device)
    true = once(name, lambda: see(build(plain, nothing, device), device))
    mine, true = compared(mine, true, runs)
    return {"number of blocks": found, **mine}, {"number of blocks": counts, **true}


class Calls(DispatchMode):
    """Counts the operators that run, by overload."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def of_keep(got, want):
    """What is kept wrongly or not kept, if it is only one of the two."""
    again, held = ([op for op in a if op not in b] for a, b in ((got, want), (want, got)))
    if again and not held:
        return f"in `keep`, but not held: {', '.join(again)}"
    return f"not in `keep`, but held: {', '.join(held)}" if held and not again else None


@scenarios("operators that run again", of_keep)
def again(answer, device, name, make, keep, looked_at, dtype=None):
    """Those that run more often than in the plain model, in forward and backward together."""
    counts = []
    for checkpoint in (False, True):
        draw.seed(3)
        model = nn.Sequential(*make()).to(device)
        if checkpoint:
            answer.checkpoint_blocks(model, type(model[0]), keep=keep)
        x = draw.randn(*SHAPE, device=device, requires_grad=True)
        with Calls() as calls:
            for _ in range(2):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    y = model(x)
                y.float().square().mean().backward()
        counts.append(calls.counts)
    before, now = counts
    return (
        [str(op) for op in looked_at if now[op] > before[op]],
        [str(op) for op in looked_at if before[op] and op not in keep],
    )


def nothing(*_):
    """A model is left as it is."""
