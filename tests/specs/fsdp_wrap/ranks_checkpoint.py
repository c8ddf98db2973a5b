"""What runs on every rank: programs for the specs of save, load, save_whole and load_whole."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.rank import device
from kit.ruler import measure
from kit.verdict import check_equal, check_raises
from specs.fsdp_wrap.models import (
    Batch,
    Block,
    Model,
    Trained,
    adamw,
    data,
    full,
    gradients,
    mse,
    weights,
)
from specs.fsdp_wrap.ranks_build import init
from specs.fsdp_wrap.ranks_step import check_untouched, local_state, mesh, wrapped

# Tied and frozen parameters, and rows for which four ranks are too many.
MADE: dict[str, Any] = {
    "width": 7,
    "blocks": 2,
    "tied": True,
    "frozen": ["blocks.1.up", "head.bias"],
}
# Two blocks, and what differs from them.
SMALL: dict[str, Any] = {"width": 7, "blocks": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "one block less": {"blocks": 1},
    "one block more": {"blocks": 3},
    "another width": {"width": 8},
}


def mine(step: int) -> list[Batch]:
    """This rank's part of a step's four batches: on 1, 2 and 4 ranks the step is the same."""
    batches = data((3, 2, 4, 1), seed=step)[dist.get_rank() :: dist.get_world_size()]
    return [(inputs.to(device()), targets.to(device())) for inputs, targets in batches]


def steps(answer: Any, model: nn.Module, optimizer: Optimizer, *numbers: int) -> Trained:
    results = [answer.train_step(model, mine(n), mse, optimizer) for n in numbers]
    losses = [result.loss.item() for result in results]
    norms = [result.grad_norm.item() for result in results]
    return Trained(losses, norms, weights(model), gradients(model))


def state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, optimizer state and settings, whole, by name."""
    found: dict[str, Any] = dict(weights(model))
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{key} of {name}"] = full(torch.as_tensor(value))
    for number, group in enumerate(optimizer.param_groups):
        found[f"lr of group {number}"] = group["lr"]
    return found


def save_and_go_on(answer: Any, rank: int, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps."""
    model, optimizer = wrapped(answer, MADE, make_optimizer=adamw)
    steps(answer, model, optimizer, 0, 1)
    answer.save(folder, model, optimizer, 2)
    return {"saved": state(model, optimizer), "after": steps(answer, model, optimizer, 2, 3)}


def load_and_go_on(answer: Any, rank: int, folder: Path, how: str) -> dict[str, Any]:
    """The checkpoint into a model that has trained otherwise, or was just built; two more steps."""
    other = functools.partial(torch.optim.AdamW, lr=0.5)
    if how == "trained":
        model, optimizer = wrapped(answer, {**MADE, "seed": 9}, make_optimizer=other)
        steps(answer, model, optimizer, 8)
    else:
        model, optimizer = answer.build(_like_made, mesh(), Block, init, other)
    step = answer.load(folder, model, optimizer)
    return {
        "step": step,
        "gradients": [n for n, p in model.named_parameters() if p.grad is not None],
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
    model, optimizer = _small(answer)
    steps(answer, model, optimizer, 0)

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
    steps(answer, model, optimizer, 1)
    answer.save(folder, model, optimizer, 10)
    refuse(3, "for step 3, where the newest checkpoint is of step 10")
    return loaded(answer, folder)[0]


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def nothing_there(answer: Any, rank: int, folders: Sequence[Path]) -> None:
    """Folders without a checkpoint."""
    model, optimizer = _small(answer)
    steps(answer, model, optimizer, 0)
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
    model, optimizer = _small(answer)
    steps(answer, model, optimizer, 0)
    answer.save(folder, model, optimizer, 1)
    for what, made in OTHERS.items():
        model, optimizer = wrapped(answer, {**SMALL, **made, "seed": 9}, make_optimizer=adamw)
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


def save_twice(answer: Any, rank: int, folder: Path) -> list[int]:
    """Checkpoints 1 and 2; the bytes in the folder after each, as rank 0 sees them."""
    model, optimizer = _small(answer)
    found = []
    for number in (1, 2):
        steps(answer, model, optimizer, number)
        answer.save(folder, model, optimizer, number)
        dist.barrier()
        found.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        dist.barrier()
    return found


def _small(answer: Any, seed: int = 4) -> tuple[Model, Optimizer]:
    return wrapped(answer, {**SMALL, "seed": seed}, make_optimizer=adamw)


def loaded(answer: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The step and what `load` gives; in place of the step an error, where there is one."""
    model, optimizer = _small(answer, seed=9)
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


# Interrupted saves


_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")


class _Watch:
    """Calls `before` at each operation on files under `folder` that changes something."""

    def __init__(self) -> None:
        self.folder, self.before = "", lambda: None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or not self._writes(event, args):
            return
        folder, self.folder = self.folder, ""  # what `before` does is not looked at
        try:
            self.before()
        finally:
            self.folder = folder

    def _writes(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode, flags = args
            written = any(c in (mode or "") for c in "wax+") or bool(
                (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
        elif event in _WRITES:
            path, written = args[0], True
        else:
            return False
        if not written or not isinstance(path, (str, bytes, os.PathLike)):
            return False
        return os.fsdecode(path).startswith(self.folder)


@functools.cache  # it is for good
def _watch() -> _Watch:
    watch = _Watch()
    sys.addaudithook(watch)
    return watch


@contextmanager
def before_each_write(folder: Path, call: Callable[[], None]) -> Iterator[None]:
    watch = _watch()
    watch.folder, watch.before = str(folder), call
    try:
        yield
    finally:
        watch.folder = ""


def killed_saves(answer: Any, rank: int, folder: Path) -> list[tuple[int, list[str], Any]]:
    """One rank: what a kill would leave, before each operation on a file in a save of step 5.

    The folder is copied at each of these moments; then, from each copy, what `load` gives, and what
    it gives after a save of step 3 and another one of step 5.
    """
    model, optimizer = _small(answer)
    steps(answer, model, optimizer, 0)
    answer.save(folder / "run", model, optimizer, 1)
    saved = {1: state(model, optimizer)}
    steps(answer, model, optimizer, 1)
    copies: list[Path] = []

    def copy() -> None:
        copies.append(folder / f"copy{len(copies)}")
        shutil.copytree(folder / "run", copies[-1], symlinks=True)

    with before_each_write(folder / "run", copy):
        answer.save(folder / "run", model, optimizer, 5)
    copy()  # after the last
    saved[5] = state(model, optimizer)
    found = []
    for path in copies:
        step, values = loaded(answer, path)
        again = None
        if step == 1:
            answer.save(path, model, optimizer, 3)
            answer.save(path, model, optimizer, 5)
            step_again, values_again = loaded(answer, path)
            again = step_again, different(values_again, saved[5])
        found.append((step, different(values, saved.get(step, {})), again))
    return found


def different(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """The names under which there is something else."""
    return [
        name
        for name in {**got, **want}
        if name not in got or name not in want or not _equal(got[name], want[name])
    ]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def full_disk(answer: Any, rank: int, folder: Path, full_on: int) -> dict[str, Any]:
    """A save while one rank cannot write; then what `load` gives, before and after another save."""
    model, optimizer = _small(answer)
    steps(answer, model, optimizer, 0)
    answer.save(folder, model, optimizer, 1)
    saved = state(model, optimizer)
    steps(answer, model, optimizer, 1)
    raised = ""
    with _no_room() if rank == full_on else _room():
        try:
            answer.save(folder, model, optimizer, 2)
        except (NotImplementedError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # CheckpointException of torch is no Exception
            raised = type(error).__name__
    found: dict[str, Any] = {"raised": raised}
    if not all(_of_all(bool(raised))):
        return found
    step, values = loaded(answer, folder)
    found["before"] = step, different(values, saved)
    answer.save(folder, model, optimizer, 2)
    step, values = loaded(answer, folder)
    found["after"] = step, different(values, state(model, optimizer))
    return found


def _of_all(flag: bool) -> list[bool]:
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return flags


@contextmanager
def _no_room() -> Iterator[None]:
    """No file of this process may become longer than 200 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _room() -> Iterator[None]:
    yield


# The whole model in one file


def save_whole_after(answer: Any, rank: int, path: Path) -> dict[str, Any]:
    """The weights, and the names in the file as soon as the call has returned on this rank.

    On rank 0 nothing under the folder gets its name within a tenth of a second.
    """
    model, optimizer = wrapped(answer, MADE)
    steps(answer, model, optimizer, 0)
    with before_each_write(path.parent, lambda: time.sleep(0.1)):
        answer.save_whole(path, model)
    try:
        names = list(torch.load(path))
    except Exception as error:
        names = [type(error).__name__]
    return {"names": names, "weights": weights(model)}


def save_whole_without_room(answer: Any, rank: int, path: Path) -> str:
    model, _ = _small(answer)
    with _no_room():
        try:
            answer.save_whole(path, model)
        except NotImplementedError:
            raise
        except Exception as error:
            return type(error).__name__
    return ""


def peaks(answer: Any, rank: int, folder: Path, width: int, blocks: int) -> dict[str, int]:
    """Bytes above the baseline in each call; the model has trained with AdamW."""
    model, optimizer = wrapped(answer, {"width": width, "blocks": blocks}, make_optimizer=adamw)
    steps(answer, model, optimizer, 0)
    optimizer.zero_grad()
    calls = {
        "save": lambda: answer.save(folder / "run", model, optimizer, 1),
        "load": lambda: answer.load(folder / "run", model, optimizer),
        "save_whole": lambda: answer.save_whole(folder / "whole.pt", model),
    }
    return {
        name: measure(call, device(), known=[model, optimizer]).above_baseline
        for name, call in calls.items()
    }


def load_whole_into(answer: Any, rank: int, path: Path) -> dict[str, Tensor]:
    model, _ = wrapped(answer, {**MADE, "seed": 9})
    answer.load_whole(path, model)
    return weights(model)


def refuses_files(answer: Any, rank: int, files: Sequence[tuple[Path, str]]) -> None:
    """Files that are not of the model, each with the name that it is about."""
    model, optimizer = _small(answer, seed=9)
    before = local_state(model, optimizer)
    for path, name in files:
        check_raises(
            lambda path=path: answer.load_whole(path, model),
            ValueError,
            mentions=[name, path],
            when=f"for a file with {path.stem.replace('_', ' ')}",
        )
        check_untouched(before, model, optimizer)
