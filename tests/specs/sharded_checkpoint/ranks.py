"""What ranks do for the specs of save and load."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kit.laws.checks import ERRORS, UNTOUCHED, SpecFailure, check_close, check_equal, check_raises
from kit.memory.resident import resident
from kit.memory.ruler import measure
from kit.ranks.disk import no_room
from kit.ranks.rank import device
from kit.ranks.shards import check_untouched, local_state, named
from kit.ranks.toys import OUTPUTS, WIDTH, make
from specs.sharded_checkpoint.models import (
    SETTINGS,
    Tiny,
    adamw,
    evaluate,
    in_groups,
    move,
    other,
    sharded,
    small,
    state,
    step,
    tied,
    trained,
)

WIDE = 48  # so that rounding to 512 bytes matters little
LARGE = 400  # so that what else a process allocates, some MiB, matters little
MANY = 5  # blocks; half of them are more than three times the largest parameter
STEP = 7  # of training; the optimizer has made others
LACKS = "not everything is saved and loaded, in its dtype; or old state is left"
WHOLE = "after an evaluation parameters() are no shards, until reshard() or state_dict()"


def on_rank_0(action: Callable[[], object]) -> None:
    """The other ranks wait for it."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def save_and_go_on(answer: Any, rank: int, folder: Path, kind: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps; learning rates fall after the first two."""
    model = sharded(tied())
    optimizer = in_groups(model.parameters(), kind, 0.01)
    for train in (_first_step, functools.partial(step, number=1)):
        train(model, optimizer)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # as schedulers do
            group["lr"] = group["lr"] * 0.7
    answer.save(str(folder), model, optimizer, STEP)
    return {"saved": state(model, optimizer), "after": _goes_on(model, optimizer)}


def load_and_go_on(
    answer: Any, rank: int, folder: Path, kind: Any, has_trained: bool, saved: dict[str, Any]
) -> None:
    """Into a model with gradients and an optimizer with other settings; then two more steps."""
    model = sharded(other())
    optimizer = in_groups(model.parameters(), kind, 0.5)
    for group in optimizer.param_groups:
        others = {"betas": (0.5, 0.6), "momentum": 0.5, "foreach": False}
        group.update({key: value for key, value in others.items() if key in group})
    if has_trained:
        _first_step(model, optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    held = state(model, optimizer)
    number = answer.load(str(folder), model, optimizer)
    cause = "load does not return the step of the checkpoint"
    check_equal(number, STEP, "the step", cause=cause)
    check_loaded(model, optimizer, saved["saved"], held)
    there = [name for name, p in named(model) if p.grad is not None]
    cause = "load keeps gradients, perhaps those of parameters that the optimizer does not have"
    check_equal(there, [], "parameters with gradients", cause=cause)
    cause = "the model and optimizer that train are not those that were loaded"
    after = _goes_on(model, optimizer)
    check_close(after, saved["after"], "losses of the next steps", cause=cause, rtol=1e-4)


def _first_step(model: nn.Module, optimizer: Optimizer) -> None:
    """One weight is still frozen, as where layers are unfrozen one by one, and gets no state."""
    late = model.blocks[0].norm.weight.requires_grad_(False)
    move(model, optimizer)
    late.requires_grad_()


def _goes_on(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    return torch.tensor([step(model, optimizer, number) for number in (2, 3)])


def check_loaded(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], before: Any, cause: str = LACKS
) -> None:
    """Everything is as it was saved."""
    __tracebackhide__ = True
    got, want = state(model, optimizer), {**saved}
    settings, own = got.pop(SETTINGS), want.pop(SETTINGS)
    steps = {n: v for n, v in want.items() if n.startswith("step of ")}
    most = max(map(float, steps.values()), default=0)
    suspects = {
        f"{what} is loaded as the optimizer's step of every parameter": want
        | {name: torch.full_like(v, number) for name, v in steps.items()}
        for what, number in (("the step of training", STEP), ("one parameter's step", most))
    }
    check_equal(got, want, "what is loaded", suspects=suspects, before=before, cause=cause)
    cause = "settings, such as learning rates, are not saved and loaded for every group"
    check_equal(settings, own, "settings", cause=cause)


def refuses_folders(answer: Any, rank: int, folder: Path) -> None:
    for name in ("empty", "not_there"):
        path = folder / name
        refuses(answer.load, path, *trained(make()), [path], "the folder has no checkpoint")
    run = folder / "run"
    answer.save(run, *trained(make()), 1)
    changes: dict[str, Callable[[Any], object]] = {
        "one block less": lambda model: model.blocks.pop(0),
        "a transposed weight": lambda model: setattr(
            model.head, "weight", nn.Parameter(torch.ones(WIDTH, OUTPUTS))
        ),
        "a buffer of another shape": lambda model: setattr(model, "scale", torch.ones(1)),
        "a buffer more": lambda model: model.register_buffer("more", torch.ones(2)),
    }
    for what, change in changes.items():
        model = make()
        change(model)
        optimizer = adamw(sharded(model).parameters())
        refuses(answer.load, run, model, optimizer, [run], f"the model has {what}")


def refuses(
    load: Any, path: Path, model: nn.Module, optimizer: Optimizer, words: list[Any], what: str
) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = local_state(model, optimizer)
    args = (optimizer,) if load.__name__ == "load" else ()
    call = lambda: ordinary(lambda: load(path, model, *args))  # noqa: E731
    unseen = f"it is not noticed that {what}: compare names and shapes, both ways"
    check_raises(call, ValueError, mentions=words, when=f"where {what}", cause=unseen)
    cause = "something is loaded, or gradients are dropped, before everything is checked"
    check_untouched(before, model, optimizer, call="the refused call", cause=cause, clause=ERRORS)


def ordinary(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; RuntimeError for torch's CheckpointException."""
    try:
        return call()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def error_of(call: Callable[[], object], *through: type[Exception]) -> str:
    """What a call raises, in one line; errors of these types come through."""
    try:
        ordinary(call)
    except (NotImplementedError, SpecFailure, *through):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"
    return ""


def loaded(answer: Any, folder: Path, model: nn.Module, optimizer: Optimizer) -> Any:
    """The step that `load` returns; or what it raises, in one line, if that is about the files."""
    got: list[Any] = []
    slips = (AttributeError, NameError, TypeError)
    error = error_of(lambda: got.append(answer.load(folder, model, optimizer)), *slips)
    return got[0] if got else error


def comes_back(answer: Any, rank: int, folder: Path, is_evaluated: bool) -> None:
    """Save and load a model of two dtypes, or one that was just evaluated."""
    model, optimizer = trained(make(blocks=2)) if is_evaluated else small()
    saved, before = state(model, optimizer), local_state(model, optimizer)
    if is_evaluated:
        model.blocks[0].set_reshard_after_forward(False)  # it stays unsharded too
        evaluate(model)
    answer.save(folder, model, optimizer, STEP)
    cause = "numpy() of an unsharded parameter: FSDP cannot free it"
    check_equal(error_of(model.state_dict), "", "an error of the model's state_dict()", cause=cause)
    cause = "save changes weights, gradients or state, which training still needs"
    check_untouched(before, model, optimizer, call="save", cause=cause, clause=UNTOUCHED)
    move(model, optimizer)
    answer.load(folder, model, optimizer)
    check_loaded(model, optimizer, saved, None, WHOLE if is_evaluated else LACKS)


def step_rules(answer: Any, rank: int, folder: Path) -> None:
    model, optimizer = small()
    for number in (2, 10, 999_999, 1_000_000):
        answer.save(folder, model, optimizer, number)
        on_rank_0(lambda: _reverse_times(folder))
        if number in (10, 1_000_000):
            cause = "names are compared as text: 2 comes after 10, a million has 7 digits; or "
            cause += "times are compared, and a copy has others"
            got = loaded(answer, folder, model, optimizer)
            check_equal(got, number, "step of the newest checkpoint", cause=cause)
        for old in dict.fromkeys((number, number - 1, 2)):  # saved or not
            before = _files(folder)
            dist.barrier()  # every rank has looked before one writes
            save = functools.partial(answer.save, folder, model, optimizer, old)
            cause = f"step {old} is not compared with {number} as a number, or not at all"
            check_raises(save, ValueError, mentions=[old], when=f"for step {old}", cause=cause)
            dist.barrier()
            cause = "files are changed before the step is checked"
            check_equal(_files(folder), before, "files in the folder", cause=cause, clause=ERRORS)
            dist.barrier()


def _reverse_times(folder: Path) -> None:
    """As in a copy: the first file has the latest time."""
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    last = max(times.values())
    for path, time in times.items():
        os.utime(path, ns=(last, 2 * last - time - last // 1000))


def _files(folder: Path) -> dict[str, int]:
    """The time of each file."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def fails_on_one(answer: Any, rank: int, name: str, folder: Path, bad_rank: int, bad: str) -> str:
    """What a call raises if one rank has a full disk or another path, as with a local disk.

    A rank that never reads files itself may raise nothing, and loads what the others load. No call
    comes after this one: a rank that hangs would take it for its own.
    """
    model, optimizer = small()
    (folder / "file").touch()
    if name == "load":
        answer.save(folder / "good", model, optimizer, 1)
    if name == "load_whole":
        on_rank_0(lambda: torch.save(Tiny().state_dict(), folder / "good"))
    if bad == "newer":
        answer.save(folder / bad, model, optimizer, 9)
    path, room = folder / "good", nullcontext()
    if rank == bad_rank:
        if bad == "no_room":
            room = no_room()
        else:
            path = folder / bad
    args = {"load": (optimizer,), "save": (optimizer, 5)}.get(name, ())
    held = [p.detach().to_local() for p in model.parameters()]
    for weight in held:
        weight.fill_(math.nan)
    with room:
        error = error_of(lambda: getattr(answer, name)(path, model, *args))
    if "load" in name and not error:
        left = sum(int(weight.isnan().sum()) for weight in held)
        check_equal(left, 0, "weights that were not loaded", cause="an error is swallowed")
    return error


HOW_IT_ENDED = "how the last operation ended"


def check_alike(raised: list[str], what: str = "what they found", must: bool = False) -> None:
    """Both ranks raise or neither does; with `must`, both raise."""
    __tracebackhide__ = True
    found, cause = [bool(error) for error in raised], f"the ranks do not tell each other {what}"
    cause += "; or an error in writing is swallowed" if must else ""
    want = [must or any(found)] * 2
    check_equal(found, want, "whether each rank raises", cause=cause)


def peak(answer: Any, rank: int, folder: Path, name: str) -> tuple[int, int | None]:
    """Bytes above the baseline in a call: of tensors, and of the process where Linux counts them.

    The model has trained with AdamW; load also runs with an optimizer without state.
    gloo's threads may free what they sent a little late: the smallest of eight counts.
    """
    model = make(WIDE, MANY) if name == "save_whole" else make(LARGE, 3)
    if name == "save_whole":  # several large ones in one module
        model.own = nn.ParameterList(torch.zeros_like(model.blocks[0].up.weight) for _ in range(4))
    model, optimizer = trained(model)
    optimizer.zero_grad()
    call = {
        "save": lambda: answer.save(folder / "run", model, optimizer, 1),
        "load": lambda: answer.load(folder / "run", model, optimizer),
        "save_whole": lambda: answer.save_whole(folder / "whole.pt", model),
    }[name]

    def once() -> tuple[int, int | None]:
        with resident() as process:
            tensors = measure(call, device(), known=[model, optimizer]).above_baseline
        return tensors, process.growth if device().type == "cpu" else None

    found = min((once() for _ in range(8 if "whole" in name else 1)), key=lambda found: found[0])
    if name == "load":
        optimizer.state.clear()
        found = max(found[0], once()[0]), found[1]
    return found
