"""What `build` is given, what one process makes of it, and what likely mistakes do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.equal import same
from kit.ranks.rank import device
from kit.ranks.shapes import Deep, Outer, Twice
from kit.ranks.shards import full, mesh, weights
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Model
from specs.sharded_checkpoint.models import Thin, sharded

SEED, DRAWN = 6, 3


class Tricky(nn.Module):
    """Blocks in blocks, one of a subclass; frozen parameters, two precisions, both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))  # one row: only rank 0 has it
        self.register_buffer("scale", torch.ones(7, 1))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(OUTPUTS), persistent=False)
        self.register_buffer("unused", None)
        # Quantised. FSDP of torch 2.11 shards no integers, that of 2.13 does.
        codes = torch.zeros(3, 2, dtype=torch.int8 if torch.__version__ >= "2.13" else None)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.sum = nn.Conv1d(OUTPUTS, 1, 2)  # of it only rank 0 has rows
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.head.bias.requires_grad_(False)
        self.outer = nn.Sequential(Outer(WIDTH).requires_grad_(False), Deep(WIDTH))
        self.pruned = nn.Sequential()  # a block without parameters
        self.spare = Thin().to(torch.bfloat16)
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.again = nn.Linear(FEATURES, WIDTH, bias=False)  # where it is tied, it has nothing else
        self.eval().outer.train()


class Tied(Tricky):
    """The same with ties: of two modules, of two names in one, of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.offset_again = self.offset
        self.again.weight = self.embed.weight
        self.embed.register_buffer("ratio", self.scale)
        self.embed.register_buffer("steps", self.steps)
        self.embed.register_buffer("mask", self.mask, persistent=False)
        for block in self.outer:  # as rotary embeddings have a table
            block.register_buffer("table", self.scale)
        self.embed.eval()


UNTIED: dict[str, Any] = {"plain": Model, "tricky": Tricky, "with a block twice": Twice}
MODELS = {**UNTIED, "tied": Tied}


def init(module: nn.Module) -> None:
    """Random values for all that is the module's own: whoever is out of order gets other ones.

    Where there is nothing to set a number is drawn all the same: an `init` may do so. What has two
    names in one module it sets under each of them.
    """
    if not has_own(module):
        torch.empty(()).normal_()
    for p in module.parameters(recurse=False):
        if p.is_floating_point():
            nn.init.normal_(p, mean=0.02, std=0.15 if p.requires_grad else 0.3)
        else:
            p.data.fill_(7)
    if (again := getattr(module, "offset_again", None)) is not None:
        again.data.uniform_(1, 2)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
        else:
            buffer.fill_(3)


def begin(drawn: int = DRAWN) -> None:
    """The same random numbers from here on, and not from a seed on: some have been drawn."""
    draw.seed(SEED)
    draw.rand(drawn)


def has_own(module: nn.Module) -> bool:
    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])


def alone(
    kind: str,
    order: Callable[[nn.Module], Iterable[nn.Module]] = nn.Module.modules,
    drawn: int = DRAWN,
) -> nn.Module:
    """What one process has.

    To be called on a rank: `init` draws where the parameters are, and a GPU has other numbers.
    """
    with device():  # to() would cut the tie of a buffer
        model = MODELS[kind]()
    begin(drawn)
    for module in order(model):
        init(module)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, also the buffers that are not in the state dict."""
    saved, buffers = weights(model), full(dict(model.named_buffers(remove_duplicate=False)))
    others = {f"{n}, not persistent": b for n, b in buffers.items() if n not in model.state_dict()}
    return {**saved, **others}


@torch.no_grad()
def _drawn_first(kind: str) -> nn.Module:
    """As alone(), but what has been initialised once stays as it is."""
    drawn: dict[nn.Parameter, Tensor] = {}

    def modules(model: nn.Module) -> Iterable[nn.Module]:
        for module in model.modules():
            yield module  # and init is called on it
            for p in module.parameters(recurse=False):
                p.copy_(drawn.setdefault(p, p.clone()))

    return alone(kind, order=modules)


@torch.no_grad()
def _with_parameters_only(kind: str, got: dict[str, Tensor]) -> dict[str, Tensor]:
    """As alone(), but without the modules that have buffers only: these have what was in memory."""
    trained = lambda m: [x for x in m.modules() if [*x.parameters(recurse=False)]]  # noqa: E731
    model = alone(kind, order=trained)
    left = {m for m in model.modules() if m not in trained(model)}
    names = {
        f"{n}.{b}".lstrip(".")
        for n, m in model.named_modules()
        if m in left
        for b, _ in m.named_buffers(recurse=False)
    }
    return {
        n: got.get(n, v) if n.partition(",")[0] in names else v for n, v in values(model).items()
    }


@torch.no_grad()
def _in_default_dtype(kind: str) -> nn.Module:
    """As alone(), but parameters are float32 while init fills them."""

    def modules(model: nn.Module) -> Iterable[nn.Module]:
        for module in model.modules():
            own = [*module.parameters(recurse=False)]
            dtypes = [p.dtype for p in own]
            for p in own:
                p.data = p.data.float()
            yield module  # and init is called on it
            for p, dtype in zip(own, dtypes, strict=True):
                p.data = p.data.to(dtype)

    return alone(kind, order=modules)


@torch.no_grad()
def _with_plain_tensors(kind: str) -> nn.Module:
    """As alone(), but `init` sees nothing that requires a gradient."""

    def modules(model: nn.Module) -> Iterable[nn.Module]:
        for module in model.modules():
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            for p in trained:
                p.requires_grad_(False)
            yield module  # and init is called on it
            for p in trained:
                p.requires_grad_(True)

    return alone(kind, order=modules)


def _with_buffers_apart(kind: str) -> nn.Module:
    """As alone(), but a buffer of two modules has become two."""

    def modules(model: nn.Module) -> Iterable[nn.Module]:
        for module in model.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, name, buffer.clone())
        return model.modules()

    return alone(kind, order=modules)


def _may_be_drawn(value: Tensor) -> bool:
    """By `init`, whose numbers are neither zeros nor what was in memory."""
    sizes = value.double().abs()
    return bool(((sizes > 1e-12) & (sizes < 10)).all())


def guesses(kind: str, want: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, Any]:
    """What well-known mistakes give."""
    ranks, kept = mesh().size(), dict(alone(kind).named_parameters(remove_duplicate=False))
    if any(_may_be_drawn(got.get(n, want[n])) for n in kept):
        kept = {}
    found = {
        "modules are initialised from the inside out": values(
            alone(kind, order=lambda m: reversed([*m.modules()]))
        ),
        "modules without parameters and buffers are left out": values(
            alone(kind, order=lambda m: [x for x in m.modules() if has_own(x)])
        ),
        "modules without parameters are left out, also those with buffers": _with_parameters_only(
            kind, got
        ),
        "init fills tensors of the default dtype, not of the parameter's": values(
            _in_default_dtype(kind)
        ),
        "init sees tensors that require no gradient, and may treat them as frozen": values(
            _with_plain_tensors(kind)
        ),
        "a buffer that two modules share has become two": values(_with_buffers_apart(kind)),
        "a module whose parameters are all tied to modules before is left out": values(
            alone(kind, order=lambda m: [x for x in m.modules() if x is not getattr(m, "again", 0)])
        ),
        "the generator begins with its seed once more": values(alone(kind, drawn=0)),
        "of a tied parameter the first module's numbers count, not the last one's": values(
            _drawn_first(kind)
        ),
        "every rank takes the first rows": {
            name: torch.cat([value.chunk(ranks)[0]] * ranks)[: len(value)] if value.dim() else value
            for name, value in want.items()
        },
    }
    model = sharded(MODELS[kind]())
    begin()
    with torch.no_grad():
        for module in model.modules():
            init(module)
    found["init runs on shards, so every rank draws the same numbers for its own"] = values(model)
    nothing = {name: got.get(name, v) if name in kept else v for name, v in want.items()}
    found["nothing that init has drawn gets into the shards"] = nothing
    return {belief: value for belief, value in found.items() if not same(value, want)}
