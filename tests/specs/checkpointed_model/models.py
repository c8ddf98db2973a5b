"""Models that somebody else wrote: toys with blocks of many kinds, and GPT-2 and ViT."""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_equal
from kit.laws.toys import Block
from kit.private_torch import DispatchMode
from specs.checkpointed_model.common import WIDTH, Runs

_PARTS = ["mean", "name", "nothing"]


class Mixer(nn.Module):
    """A block that takes and returns more than one tensor, with dropout that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(
        self, x: Tensor, scale: Tensor, *, extra: dict[str, Tensor] | None = None, name: str = ""
    ) -> tuple[Tensor, dict[str, Any]]:
        hidden = F.dropout(torch.tanh(self.up(x) * scale), 0.25, self.training)
        x = x + self.down(hidden)
        if extra is not None:
            x = x + extra["shift"]
        return x, {"mean": hidden.mean(-1), "name": name, "nothing": None}


class Host(nn.Module):
    """Blocks at several depths, called with positional and keyword arguments.

    Two of them are of the class `mixer`, one is of a class derived from it. The class is a new one,
    so that an answer that patches it spoils no other spec.
    """

    def __init__(self, mixer: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.mixer = mixer or type("Mixer", (Mixer,), {})
        self.wider = type("WiderMixer", (self.mixer,), {})
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stages = nn.ModuleDict(
            {
                "early": nn.ModuleList([self.mixer(), self.wider()]),
                "late": nn.ModuleDict({"only": nn.ModuleList([self.mixer()])}),
            }
        )
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.shift = nn.Parameter(torch.ones(WIDTH))

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.stages["early"], *self.stages["late"]["only"]]

    def forward(self, x: Tensor) -> Tensor:
        x, parts = self.stem(x), []
        for number, block in enumerate(self.blocks):
            extra = {"shift": self.shift} if number else None
            result = block(x, self.scale, extra=extra, name=str(number))
            check(
                isinstance(result, tuple) and len(result) == 2 and list(result[1]) == _PARTS,
                expected="a block that returns a tensor and a dict, as its forward does",
                got=type(result).__name__,
                cause="what the block returns is taken apart",
            )
            x, more = result
            check_equal(more["name"], str(number), "name", cause="only tensors are handed on")
            parts.append(more["mean"])
        return torch.cat([x, torch.stack(parts, dim=-1)], dim=-1)


class Nest(nn.Module):
    """A block that may hold another of its own kind."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(inner or nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        # The last tanh needs its result, so that a recomputation cannot stop before `inner`.
        return x + torch.tanh(self.inner(torch.tanh(self.up(x))))


class Named(nn.Module):
    """A block with keyword arguments of names that checkpoint() has too, or that nobody expects."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, that: Tensor, *, debug: float = 1.0, function: float = 1.0) -> Tensor:
        return that + torch.tanh(self.up(that)) * debug * function


class Normed(nn.Module):
    """A block with two kinds of batch normalisation, one of them further inside, for x of (batch,
    WIDTH, length)."""

    def __init__(self, momentum: float | None = 0.3, tracked: bool = True) -> None:
        super().__init__()
        options = {"momentum": momentum, "track_running_stats": tracked}
        self.up = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm1 = nn.BatchNorm1d(WIDTH, **options)
        self.norm2 = nn.Sequential(nn.BatchNorm2d(WIDTH, **options))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.up(x)))
        return x + self.norm2(y.unsqueeze(-1)).squeeze(-1).tanh()


def host(device: torch.device) -> tuple[Host, Tensor]:
    """A Host and its input."""
    return Host().to(device), draw.randn(3, 5, WIDTH, device=device)


def host_runs(model: Host) -> Runs:
    return Runs(block.up for block in model.blocks)


def transformer(device: torch.device, count: int = 6) -> tuple[nn.Sequential, Tensor]:
    """Transformer blocks, and an input beside which their weights weigh little."""
    model = nn.Sequential(*[Block(WIDTH, heads=2) for _ in range(count)]).to(device)
    rows, length = (5, 64) if device.type == "cpu" else (16, 512)
    x = draw.randn(rows, length, WIDTH, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)
    return model, x


class Calls(DispatchMode):
    """Counts the operators that run, by overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Stranger:
    """A model from the transformers library with random weights, its block class and its input."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.layers = name, 4
        # On cuda such attention is one operation that draws random numbers, and not to be kept.
        dropped = 0.1 if device.type == "cpu" else 0.0
        make, self.block_type, child = (_gpt2 if name == "gpt2" else _vit)(self.layers, dropped)
        self.child: str = child
        draw.seed(5)
        self.model = make().to(device).train()
        if name == "gpt2":
            self.x = draw.randint(64, (3, 48), device=device)
            self.hidden = draw.randn(3, 48, 32, device=device, requires_grad=True)
        else:
            self.x = draw.randn(3, 3, 48, 48, device=device)
            self.hidden = draw.randn(3, 37, 32, device=device, requires_grad=True)
        self.hidden.grad = torch.zeros_like(self.hidden)

    def forward(self, model: nn.Module) -> Tensor:
        output: Tensor = model(self.x).last_hidden_state
        return output

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, self.block_type)]

    def runs(self, model: nn.Module) -> Runs:
        return Runs(getattr(block, self.child) for block in self.blocks(model))


def _gpt2(layers: int, dropped: float) -> tuple[Callable[[], nn.Module], type[nn.Module], str]:
    modeling, config = _library("gpt2")
    options = config.GPT2Config(
        n_layer=layers,
        n_embd=32,
        n_head=2,
        attn_pdrop=dropped,
        n_positions=48,
        vocab_size=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return lambda: modeling.GPT2Model(options), modeling.GPT2Block, "ln_1"


def _vit(layers: int, dropped: float) -> tuple[Callable[[], nn.Module], type[nn.Module], str]:
    modeling, config = _library("vit")
    options = config.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=48,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=dropped,
    )
    return lambda: modeling.ViTModel(options), modeling.ViTLayer, "layernorm_before"


def _library(name: str) -> tuple[Any, Any]:
    """Two modules of the transformers library. The import takes over a second, so it waits for the
    first spec that needs it; where there is no library, that spec is skipped."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    package = f"transformers.models.{name}"
    try:
        return tuple(importlib.import_module(f"{package}.{kind}_{name}") for kind in _KINDS)
    except ImportError:
        pytest.skip("the transformers library is not installed")


_KINDS = ("modeling", "configuration")
