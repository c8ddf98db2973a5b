"""What a user would pick instead of a reference solution, as steps to be measured beside it.

A pair makes the two steps in worlds of their own that are alike: model, data, optimizer and seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from kit.laws import draw
from kit.laws.toys import mlp, mse
from lab.measure import solution
from lab.models import gpt2

Step = Callable[[], object]
World = tuple[Step, list[object]]  # a step, and what is alive before it

# Many processors have no arithmetic of float16.
ROWS = {torch.float16: 64, torch.bfloat16: 2048}


@dataclass(frozen=True)
class Pair:
    """One reference against one peer; `reason` says why where the peer is better.

    `within` is a context in which both run: the process group of those that shard.
    """

    kata: str
    peer: str
    what: str
    ours: Callable[[], World]
    theirs: Callable[[], World]
    reason: str = ""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __str__(self) -> str:
        return f"{self.kata}-{self.peer}".replace(" ", "_")


def _mlp(rows: int = 2048) -> tuple[nn.Module, tuple[Tensor, Tensor], Adam]:
    draw.seed(0)
    model = mlp(*[512] * 7, 8)
    data = (draw.randn(rows, 512), draw.randn(rows, 8))
    return model, data, Adam(model.parameters(), foreach=True)


def _ours_amp(dtype: torch.dtype) -> World:
    kata = solution("amp_loop")
    model, data, optimizer = _mlp(ROWS[dtype])
    scaler = kata.LossScaler(init_scale=1024.0) if dtype == torch.float16 else None
    step = lambda: kata.train_step(model, data, mse, optimizer, scaler, dtype=dtype)  # noqa: E731
    return step, [model, optimizer, data]


def _by_hand(dtype: torch.dtype) -> World:
    """The loop of torch's own AMP recipe."""
    model, (x, y), optimizer = _mlp(ROWS[dtype])
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = mse(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        _norm(model)
        scaler.step(optimizer)
        scaler.update()

    return step, [model, optimizer, x, y]


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # all of a process share one
    return Accelerator(cpu=True, **options)


def _accelerate() -> World:
    accelerator = _accelerator(mixed_precision="bf16")
    model, data, optimizer = _mlp()
    prepared = accelerator.prepare(model, optimizer)
    return _library(*prepared, data, accelerator.autocast, accelerator.backward)


def _fabric() -> World:
    from lightning_fabric import Fabric

    model, data, optimizer = _mlp()
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    return _library(*fabric.setup(model, optimizer), data, nullcontext, fabric.backward)


def _library(model: Any, optimizer: Any, data: Any, autocast: Any, backward: Any) -> World:
    """The loop that a library's documents show."""
    x, y = data

    def step() -> None:
        optimizer.zero_grad()
        with autocast():
            loss = mse(model(x).float(), y)
        backward(loss)
        _norm(model)
        optimizer.step()

    return step, [model, optimizer.optimizer, x, y]


def _norm(model: nn.Module) -> None:
    """The reference returns it, so the others compute it too."""
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def _ours_window() -> World:
    model, (x, y), optimizer = _mlp()
    window = list(zip(x.chunk(8), y.chunk(8), strict=True))
    kata = solution("gradient_accumulation")
    return lambda: kata.accumulate(model, window, mse, optimizer), [model, optimizer, x, y]


def _window_by_hand() -> World:
    model, (x, y), optimizer = _mlp()
    window = list(zip(x.chunk(8), y.chunk(8), strict=True))

    def step() -> None:
        optimizer.zero_grad()
        for inputs, targets in window:
            (mse(model(inputs), targets) / len(window)).backward()
        optimizer.step()

    return step, [model, optimizer, x, y]


def _window_accelerate() -> World:
    accelerator = _accelerator(gradient_accumulation_steps=8)
    model, (x, y), optimizer = _mlp()
    model, optimizer = accelerator.prepare(model, optimizer)
    window = list(zip(x.chunk(8), y.chunk(8), strict=True))

    def step() -> None:
        for inputs, targets in window:
            with accelerator.accumulate(model):
                accelerator.backward(mse(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    return step, [model, optimizer.optimizer, x, y]


def _blocks(use_checkpoint: bool) -> tuple[Any, Tensor]:
    draw.seed(0)
    model = solution("checkpointed_model").LargeModel(12, 256, use_checkpoint=use_checkpoint)
    return model.train(), draw.randn(8, 128, 256)


def _ours_blocks() -> World:
    model, x = _blocks(use_checkpoint=True)
    return lambda: model(x).square().mean().backward(), [model, x]


def _torch_blocks() -> World:
    model, x = _blocks(use_checkpoint=False)

    def step() -> None:
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=False)
        y.square().mean().backward()

    return step, [model, x]


def _gpt2() -> tuple[Any, Tensor, Tensor]:
    draw.seed(0)
    model = gpt2(n_layer=6, n_embd=192, n_head=3, vocab_size=1024).train()
    ids = draw.randint(1024, (4, 128))
    return model, ids, ids.flatten()


def _ours_gpt2() -> World:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model, ids, targets = _gpt2()
    solution("checkpointed_model").checkpoint_blocks(model, GPT2Block)
    step = lambda: F.cross_entropy(model(ids).flatten(0, 1), targets).backward()  # noqa: E731
    return step, [model, ids]


def _transformers_gpt2() -> World:
    model, ids, targets = _gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step = lambda: F.cross_entropy(model(ids).flatten(0, 1), targets).backward()  # noqa: E731
    return step, [model, ids]


def _chain() -> tuple[list[nn.Module], Tensor]:
    draw.seed(0)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1)) for _ in range(16)
    ]
    return layers, draw.randn(512, 256, requires_grad=True)


def _ours_segments() -> World:
    layers, x = _chain()
    run = solution("segment_checkpointing").run_in_segments
    return lambda: run(layers, x, 4).square().mean().backward(), [*layers, x]


def _torch_segments(*, reentrant: bool) -> World:
    layers, x = _chain()
    run = lambda: checkpoint_sequential(layers, 4, x, use_reentrant=reentrant)  # noqa: E731
    return lambda: run().square().mean().backward(), [*layers, x]


@contextmanager
def quiet() -> Iterator[None]:
    """Peers warn of what they would like to have: a GPU, a logger, another option."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SMALL = "7 layers 512 wide, 2,048 samples"
GPT = "6 GPT-2 blocks 192 wide, 4 x 128 tokens"
CHAIN = "16 layers 256 wide in 4 segments, 512 samples"
BF16, FP16 = torch.bfloat16, torch.float16

PAIRS = [
    Pair("amp_loop", "by hand", f"bf16, {SMALL}", lambda: _ours_amp(BF16), lambda: _by_hand(BF16)),
    Pair(
        "amp_loop",
        "GradScaler",
        "fp16, 7 layers 512 wide, 64 samples",
        lambda: _ours_amp(FP16),
        lambda: _by_hand(FP16),
    ),
    Pair("amp_loop", "accelerate", f"bf16, {SMALL}", lambda: _ours_amp(BF16), _accelerate),
    Pair("amp_loop", "Fabric", f"bf16, {SMALL}", lambda: _ours_amp(BF16), _fabric),
    Pair(
        *("gradient_accumulation", "by hand", f"8 of 256, {SMALL}", _ours_window, _window_by_hand),
        reason="a few scalars more: the loss of the window, which the loop by hand does not return",
    ),
    Pair(
        "gradient_accumulation",
        "accelerate",
        f"8 of 256, {SMALL}",
        _ours_window,
        _window_accelerate,
    ),
    Pair(
        "checkpointed_model", "torch checkpoint", "12 blocks 256 wide", _ours_blocks, _torch_blocks
    ),
    Pair("checkpointed_model", "transformers", GPT, _ours_gpt2, _transformers_gpt2),
    Pair(
        *("segment_checkpointing", "checkpoint_sequential", CHAIN, _ours_segments),
        lambda: _torch_segments(reentrant=False),
    ),
    Pair(
        *("segment_checkpointing", "checkpoint_sequential reentrant", CHAIN, _ours_segments),
        lambda: _torch_segments(reentrant=True),
    ),
]
