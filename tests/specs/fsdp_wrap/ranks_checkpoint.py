"""What runs on every rank: programs for the specs of save and load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.laws.checks import check_equal, check_raises
from kit.memory.ruler import measure
from kit.ranks.rank import device
from specs.fsdp_wrap.models import (
    Batch,
    Block,
    Model,
    adamw,
    data,
    full,
    in_groups,
    mse,
    named,
    weights,
)
from specs.fsdp_wrap.ranks_build import init
from specs.fsdp_wrap.ranks_step import move, wrapped
from specs.fsdp_wrap.ranks_wrap import mesh
from specs.fsdp_wrap.shapes import tiny
from specs.fsdp_wrap.untouched import check_untouched, local_state

# Tied and frozen parameters, and rows for which four ranks are too many.
MADE: dict[str, Any] = {
    "width": 13,
    "blocks": 1,
    "tied": True,
    "frozen": ["blocks.0.up", "head.bias"],
}
# Two blocks, with what differs from them.
TWO: dict[str, Any] = {"width": 13, "blocks": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "one block less": {"blocks": 1},
    "one block more": {"blocks": 3},
    "another width": {"width": 14},
}


def of_all(step: int) -> list[Batch]:
    """Four batches: on 1, 2 and 4 ranks the step is the same."""
    return data((3, 2, 4, 1), seed=step)


def mine(step: int) -> list[Batch]:
    """This rank's part of them."""
    batches = of_all(step)[dist.get_rank() :: dist.get_world_size()]
    return [(inputs.to(device()), targets.to(device())) for inputs, targets in batches]


def steps(answer: Any, model: nn.Module, optimizer: Optimizer, *numbers: int) -> list[float]:
    """The losses."""
    results = [answer.train_step(model, mine(n), mse, optimizer) for n in numbers]
    return [result.loss.item() for result in results]


def state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, optimizer state and settings, whole, by name."""
    held = {
        f"{key} of {name}": torch.as_tensor(value)
        for name, p in named(model)
        for key, value in optimizer.state.get(p, {}).items()
    }
    found: dict[str, Any] = {**weights(model), **full(held)}
    for number, group in enumerate(optimizer.param_groups):
        found[f"lr of group {number}"] = group["lr"]
    return found


def save_and_go_on(answer: Any, rank: int, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps; the learning rates fall after each step.

    Blocks recompute, which those of the model that it is loaded into need not do.
    """
    make_optimizer = functools.partial(in_groups, make_optimizer=adamw)
    model, optimizer = wrapped(answer, MADE, make_optimizer=make_optimizer, checkpoint=True)
    for number in (0, 1):
        steps(answer, model, optimizer, number)
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    answer.save(str(folder), model, optimizer, 2)
    return {"saved": state(model, optimizer), "after": steps(answer, model, optimizer, 2, 3)}


def load_and_go_on(answer: Any, rank: int, folder: Path, how: str) -> dict[str, Any]:
    """The checkpoint into a model that has trained, or was just built; two more steps."""
    other = functools.partial(in_groups, make_optimizer=functools.partial(adamw, lr=0.5))
    if how == "trained":
        model, optimizer = wrapped(answer, {**MADE, "seed": 9}, make_optimizer=other)
        steps(answer, model, optimizer, 8)
    else:
        model, optimizer = answer.build(_like_made, mesh(), Block, init, other)
    step = answer.load(str(folder), model, optimizer)
    return {
        "step": step,
        "gradients": [n for n, p in named(model) if p.grad is not None],
        "loaded": state(model, optimizer),
        "after": steps(answer, model, optimizer, 2, 3),
    }


def _like_made() -> Model:
    model = Model(MADE["width"], MADE["blocks"], tied=True)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(MADE["frozen"])))
    return model


def step_rules(answer: Any, rank: int, folder: Path) -> int:
    """Steps that are refused, before and after a checkpoint of step 2; then one of step 3."""
    model, optimizer = small(answer)
    move(model, optimizer)

    def refuse(step: int, when: str) -> None:
        before = _files(folder)
        check_raises(
            lambda: answer.save(folder, model, optimizer, step),
            ValueError,
            mentions=[step],
            when=when,
        )
        cause = "the folder is written to before the step is checked"
        check_equal(_files(folder), before, "files in the folder", cause=cause)
        dist.barrier()

    refuse(0, "for step 0")
    answer.save(folder, model, optimizer, 2)
    dist.barrier()
    for step in (-1, 2, 1):
        refuse(step, f"for step {step}, where the newest checkpoint is of step 2")
    move(model, optimizer)
    answer.save(folder, model, optimizer, 10)
    refuse(3, "for step 3, where the newest checkpoint is of step 10")
    return loaded(answer, folder)[0]


def _files(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else "a folder"
        for path in folder.parent.rglob("*")
    }


def nothing_there(answer: Any, rank: int, folders: Sequence[Path]) -> None:
    """Folders without a checkpoint."""
    model, optimizer = small(answer)
    move(model, optimizer)
    before = _values(model, optimizer)
    for folder in folders:
        check_raises(
            lambda folder=folder: answer.load(folder, model, optimizer),
            ValueError,
            mentions=[folder],
            when="where the folder has no checkpoint",
        )
        check_untouched(before, model, optimizer)


def another_model(answer: Any, rank: int, folder: Path) -> None:
    """The checkpoint of a model with two blocks, for models that differ."""
    model, optimizer = wrapped(answer, TWO, make_optimizer=adamw)
    move(model, optimizer)
    answer.save(folder, model, optimizer, 1)
    for what, made in OTHERS.items():
        model, optimizer = wrapped(answer, {**TWO, **made, "seed": 9}, make_optimizer=adamw)
        before = _weights(model, optimizer)
        check_raises(
            lambda m=model, o=optimizer: _ordinary(lambda: answer.load(folder, m, o)),
            ValueError,
            mentions=[folder],
            when=f"where the model has {what}",
        )
        check_untouched(before, model, optimizer)


def _values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        key: value for key, value in local_state(model, optimizer).items() if key != "gradients"
    }


def _weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The weights only: a state of zeros may have been made to be loaded into."""
    return {"weights": local_state(model, optimizer)["weights"]}


def save_often(answer: Any, rank: int, folder: Path) -> list[int]:
    """Checkpoints 1 to 3; the bytes in the folder after each, as rank 0 sees them."""
    model, optimizer = small(answer)
    found = []
    move(model, optimizer)  # the optimizer has its state
    for number in (1, 2, 3):
        answer.save(folder, model, optimizer, number)
        dist.barrier()
        found.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        dist.barrier()
    return found


def small(answer: Any, seed: int = 4) -> tuple[nn.Module, Optimizer]:
    model = tiny(seed).to(device())
    return model, answer.wrap(model, mesh(), Block, adamw)


def loaded(answer: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The step and what `load` gives; in place of the step an error, where there is one."""
    model, optimizer = small(answer, seed=9)
    try:
        return _ordinary(lambda: answer.load(folder, model, optimizer)), state(model, optimizer)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}", {}


def _ordinary(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, but RuntimeError for torch's CheckpointException."""
    try:
        return call()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def different(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """The names under which there is something else."""
    return [
        name
        for name in {**got, **want}
        if name not in got or name not in want or not _equal(got[name], want[name])
    ]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def peaks(answer: Any, rank: int, folder: Path, width: int, blocks: int) -> dict[str, int]:
    """Bytes above the baseline in each call; the model has trained with AdamW."""
    model, optimizer = wrapped(answer, {"width": width, "blocks": blocks}, make_optimizer=adamw)
    move(model, optimizer)
    optimizer.zero_grad()
    calls = {
        "save": lambda: answer.save(folder / "run", model, optimizer, 1),
        "load": lambda: answer.load(folder / "run", model, optimizer),
        "save_whole": lambda: answer.save_whole(folder / "whole.pt", model),
    }

    def peak(name: str) -> int:
        return measure(calls[name], device(), known=[model, optimizer]).above_baseline

    # gloo's threads may let go of what they have sent a little late: the least of three counts.
    return {
        "save": peak("save"),
        "load": peak("load"),
        "save_whole": min(peak("save_whole") for _ in range(3)),
    }
