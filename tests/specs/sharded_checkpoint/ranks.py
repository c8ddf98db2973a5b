"""What runs on every rank: programs for the specs of save and load."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from kit.laws.checks import check, check_close, check_equal, check_raises
from kit.memory.account import Account, account
from kit.memory.ruler import measure
from kit.ranks.disk import Copies, before_each_write, load_file, no_room, slow
from kit.ranks.rank import device
from kit.ranks.shards import check_untouched, gradients, local_state, named, weights
from kit.ranks.toys import make
from specs.sharded_checkpoint.models import (
    SETTINGS,
    Extra,
    Tiny,
    adamw,
    evaluate,
    momentum,
    move,
    other,
    sharded,
    small,
    state,
    step,
    tied,
    trained,
)

WIDE = 48  # rounding to 512 bytes is little of it


def on_rank_0(action: Callable[[], object]) -> None:
    """While the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def in_groups(parameters: Iterable[nn.Parameter], kind: Any, lr: float) -> Optimizer:
    """Two groups of parameters, and one of none; that of vectors has an own rate, a number.

    They alone have amsgrad: more state with Adam, and with others a setting that nobody knows.
    """
    every = [*parameters]
    vectors = [p for p in every if p.ndim == 1]
    optimizer: Optimizer = kind([p for p in every if p.ndim > 1], lr=lr)
    optimizer.add_param_group({"params": vectors, "lr": lr / 2, "amsgrad": True})
    optimizer.add_param_group({"params": [], "lr": lr / 4})
    return optimizer


def save_and_go_on(answer: Any, rank: int, folder: Path, kind: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps; the learning rates fall after each step."""
    model = sharded(tied())
    optimizer = in_groups(model.parameters(), kind, 0.01)
    up = model.blocks[0].up
    up.weight.grad = torch.ones_like(up.weight)  # it trained before it was frozen
    optimizer.step()
    for number in (0, 1):
        step(model, optimizer, number)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # as schedulers do
            group["lr"] = group["lr"] * 0.7
    evaluate(model)
    answer.save(str(folder), model, optimizer, 2)
    saved = state(model, optimizer)
    return {"saved": saved, "after": _goes_on(model, optimizer)}


def load_and_go_on(
    answer: Any, rank: int, folder: Path, kind: Any, is_new: bool, saved: dict[str, Any]
) -> None:
    """The checkpoint into a model that has trained otherwise, or that is new; two more steps."""
    model = sharded(other(tied(seed=9)))
    optimizer = in_groups(model.parameters(), kind, 0.5)
    if not is_new:
        _use_amsgrad(optimizer, 0)  # its state is there where none was saved, and the other way
        move(model, optimizer)  # all parameters: what is frozen has state and a gradient too
        _use_amsgrad(optimizer, 1)
    held = state(model, optimizer)
    if is_new:
        evaluate(model)  # last: a state dict would give back what stays gathered after it
    number = answer.load(str(folder), model, optimizer)
    cause = "load does not return the step that was given to save"
    check_equal(number, 2, "the step", cause=cause)
    cause = "not everything is saved, or loaded, in its dtype; or state of before is left"
    _check_loaded(model, optimizer, saved["saved"], cause, held)
    check_others(model)
    cause, after = "what trains afterwards is not what was loaded", _goes_on(model, optimizer)
    check_close(after, saved["after"], "losses of the next steps", cause=cause, rtol=1e-4)


def _goes_on(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    """The losses of two steps; between them all parameters move, which were frozen, too."""
    first = step(model, optimizer, 2)
    move(model, optimizer)
    return torch.tensor([first, step(model, optimizer, 3)])


def check_others(model: Any) -> None:
    """What was loaded into a model of `other` beside its tensors, and what was left alone."""
    cause = "extra state is not saved, or set_extra_state() is not called with it"
    check_equal(
        [model.note.found, model.blank.found], ["version 3", None], "extra state", cause=cause
    )
    found = [model.counts.found.tolist(), model.found.tolist()]
    check_equal(found, [[3, 4], [3.0, 2.0, 1.0]], "extra state that is a tensor", cause=cause)
    cause = "a buffer that is not persistent is not in the state dict: it keeps its values"
    check_equal(model.cache.tolist(), [7.0, 7.0], "the buffer cache", cause=cause)


def _use_amsgrad(optimizer: Optimizer, number: int) -> None:
    """In this group alone."""
    for n, group in enumerate(optimizer.param_groups):
        group["amsgrad"] = n == number


def _check_loaded(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], cause: str, before: Any = None
) -> None:
    __tracebackhide__ = True
    got, want = state(model, optimizer), {**saved}
    settings, own = got.pop(SETTINGS), want.pop(SETTINGS)
    check_equal(got, want, "what is loaded", cause=cause, before=before)
    cause = "settings, such as learning rates, are not saved or loaded for every group, or not anew"
    check_equal(settings, own, "settings", cause=cause)


def refuses_folders(answer: Any, rank: int, folder: Path) -> None:
    """Without a checkpoint, which one of them had; and one of another model."""
    model, optimizer = trained(make())
    for name in ("empty", "not_there", "cleared_away"):
        path = folder / name
        if name == "cleared_away":
            answer.save(path, model, optimizer, 1)
            on_rank_0(functools.partial(shutil.rmtree, path))
        refuses(answer.load, path, model, optimizer, [path], "the folder has no checkpoint")
    run = folder / "run"
    answer.save(run, model, optimizer, 1)
    turned, one_row = "a weight turned around", "a buffer of one row, which the saved number fills"
    more, less = "a buffer more", "a buffer less"
    others = {what: make() for what in (turned, one_row, more, less, "more extra state")}
    head = others[turned].head
    head.weight = nn.Parameter(torch.ones(head.weight.shape[::-1]))
    others[one_row].scale = torch.ones(1)
    others[more].register_buffer("more", torch.ones(2))
    del others[less].scale
    others["more extra state"].blank = Extra()
    for what, changed in {"one block less": make(blocks=0), **others}.items():
        optimizer = adamw(sharded(changed).parameters())
        refuses(answer.load, run, changed, optimizer, [run], f"the model has {what}")


def refuses(
    load: Any, path: Path, model: nn.Module, optimizer: Optimizer, words: list[Any], what: str
) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = local_state(model, optimizer)
    args = (optimizer,) if load.__name__ == "load" else ()
    call = lambda: ordinary(lambda: load(path, model, *args))  # noqa: E731
    unseen = f"{what}, and that is not seen: compare names and shapes, both ways"
    check_raises(call, ValueError, mentions=words, when=f"where {what}", cause=unseen)
    cause = "something is set, or dropped, before what is read has been checked"
    check_untouched(before, model, optimizer, call="the refused call", cause=cause)


def ordinary(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, but RuntimeError for torch's CheckpointException."""
    try:
        return call()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def error_of(call: Callable[[], object]) -> str:
    """What a call raises, in one line."""
    try:
        ordinary(call)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"
    return ""


def of_all(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def fails_on_one(answer: Any, rank: int, name: str, folder: Path, bad_rank: int, bad: str) -> str:
    """What a call raises where the path of one rank is another, as on a disk of its own.

    Or where a hook of its model raises, or its disk is full. A rank that never looks for itself may
    raise nothing, and loads what the others do. It ends there: a call more would meet that of a
    rank that waits, and hide that it does.
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
    if rank == bad_rank and bad == "no_room":
        room = no_room()
    elif rank == bad_rank and bad == "hook":
        loads, saves = model.register_load_state_dict_post_hook, model.register_state_dict_pre_hook
        (loads if "load" in name else saves)(lambda *_: 1 / 0)
    elif rank == bad_rank:
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


def check_alike(raised: list[str], what: str = "what they have found") -> None:
    """Both ranks raise, or neither does."""
    __tracebackhide__ = True
    cause = f"the ranks do not tell each other {what}"
    check_equal(bool(raised[0]), bool(raised[1]), "whether rank 0 raises, as 1", cause=cause)


def peak(answer: Any, rank: int, folder: Path, name: str) -> int:
    """Bytes above the baseline in a call; the model has trained with AdamW.

    gloo's threads may let go of what they have sent a little late: the least of three counts.
    """
    model = make(WIDE, 2)
    for number in range(5 if name == "save_whole" else 0):  # rank 0 alone needs a copy
        model.register_buffer(f"more{number}", torch.zeros_like(model.blocks[0].up.weight))
    model, optimizer = trained(model)
    optimizer.zero_grad()
    call = {
        "save": lambda: answer.save(folder / "run", model, optimizer, 1),
        "load": lambda: answer.load(folder / "run", model, optimizer),
        "save_whole": lambda: answer.save_whole(folder / "whole.pt", model),
    }[name]
    counts = range(3 if "whole" in name else 1)
    return min(measure(call, device(), known=[model, optimizer]).above_baseline for _ in counts)


def leaves_alone(answer: Any, rank: int, folder: Path) -> None:
    """Weights, gradients and optimizer state, where the model has been evaluated."""
    model, optimizer = small()
    before = local_state(model, optimizer)
    evaluate(model)
    answer.save(folder, model, optimizer, 1)
    cause = "whoever saves a checkpoint goes on training with what is there"
    check_untouched(before, model, optimizer, call="save", cause=cause)


def keeps_dtypes(answer: Any, rank: int, folder: Path) -> None:
    """One after the other in the same folder, which is cleared away in between.

    The first two have the same names and shapes; the next has the same optimizer, and another rate.
    """
    large = sharded(nn.Linear(1 << 18, 5, bias=False, dtype=torch.float64))  # 6 MiB a rank
    again = small()
    models = small(dtype=torch.float32), again, again, (large, momentum(large.parameters()))
    for number, (model, optimizer) in enumerate(models):
        optimizer.param_groups[0]["lr"] = 0.01 * number
        move(model, optimizer)
        saved = state(model, optimizer)
        answer.save(folder, model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.5
        move(model, optimizer)
        answer.load(folder, model, optimizer)
        cause = "what is saved in one dtype is written, or loaded, in another; or pieces are mixed"
        _check_loaded(model, optimizer, saved, cause)
        on_rank_0(functools.partial(shutil.rmtree, folder))


def drops_gradients(answer: Any, rank: int, folder: Path) -> None:
    """All have gradients, the optimizer has one parameter only, and the model was evaluated."""
    model, _ = small()
    (last,) = (p for name, p in named(model) if "model" in name)
    optimizer = adamw([last])
    optimizer.step()
    answer.save(folder, model, optimizer, 1)
    evaluate(model)
    next(model.parameters()).requires_grad_(False)
    answer.load(folder, model, adamw([last]))
    cause = "gradients of before are still there: of what is frozen now, or not in the optimizer"
    there = [name for name, p in named(model) if p.grad is not None]
    check_equal(there, [], "parameters with gradients", cause=cause)


def step_rules(answer: Any, rank: int, folder: Path) -> None:
    """Steps that are refused, before and after checkpoints; then the newest is loaded."""
    model, optimizer = small()

    def refuse(number: int, newest: int) -> None:
        before = _files(folder)
        save = lambda: answer.save(folder, model, optimizer, number)  # noqa: E731
        cause = f"step {number} is not compared with {newest + 1} as a number, or not at all"
        check_raises(save, ValueError, mentions=[number], when=f"for step {number}", cause=cause)
        cause = "the folder is written to before the step is checked"
        check_equal(_files(folder), before, "files in the folder", cause=cause)
        dist.barrier()

    refuse(0, 0)
    refuse(-1, 0)
    on_rank_0(lambda: _plant(folder))
    planted = _files(folder)
    for number in (2, 10, 999_999, 1_000_000):
        answer.save(folder, model, optimizer, number)
        on_rank_0(lambda: _turn_times(folder))
        if number in (10, 1_000_000):
            cause = "as texts, even with zeros in front, the last of 999999 and 1000000 is another"
            newest = answer.load(folder, model, optimizer)
            check_equal(newest, number, "step of the newest checkpoint", cause=cause)
            dist.barrier()
        for old in dict.fromkeys((number, number - 1, 2)):  # saved or not
            refuse(old, number)
    cause = "save takes away what is no checkpoint"
    gone = sorted(planted.keys() - _files(folder).keys())
    check_equal(gone, [], "files and folders that are gone", cause=cause)


def _plant(folder: Path) -> None:
    """Files of somebody else, in folders with likely names."""
    for name in ("tmp", ".tmp", "temp", "best-1", "data.part", "data.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").touch()


def _turn_times(folder: Path) -> None:
    """As a copy may have it: what was written first has the latest time."""
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    last = max(times.values())
    for path, time in times.items():
        os.utime(path, ns=(last, 2 * last - time - last // 1000))


def _files(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else "a folder"
        for path in folder.parent.rglob("*")
    }


def save_often(answer: Any, rank: int, folder: Path) -> None:
    """Checkpoints 1 to 3; the bytes in the folder after each."""
    model, optimizer = small()
    found = []
    for number in (1, 2, 3):
        answer.save(str(folder / "made"), model, optimizer, number)
        dist.barrier()
        found.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        dist.barrier()
    cause = "a checkpoint is written over one from before, or takes it away"
    kept = found[0] > 0 and found[2] > 2.7 * found[0]
    check_equal(kept, True, "whether three checkpoints take three times the bytes", cause=cause)


def save_whole_after(answer: Any, rank: int, path: Path, is_bare: bool = False) -> dict[str, Any]:
    """The weights; the file is there as soon as the call has returned on this rank.

    The model computes in 16 bits, and has been evaluated. On rank 0 nothing under the folder gets
    its name within a twentieth of a second. A path that `is_bare` is a name in the current folder.
    """
    model = sharded(tied(), torch.bfloat16)
    want = weights(model)  # no call after save_whole: a rank that waits would take it for another's
    evaluate(model)
    before = os.getcwd()
    os.chdir(path.parent)
    with slow(path.parent):
        answer.save_whole(path.name if is_bare else path, model)
    os.chdir(before)
    names, what = sorted(load_file(path)), f"names in the file when rank {rank} returns"
    cause = "a rank returns before rank 0 has written; or it is not the model's state dict"
    check_equal(names, sorted(tied().state_dict()), what, cause=cause)
    return want


def load_whole_into(answer: Any, rank: int, path: Path) -> None:
    """A model that has gradients, and has been evaluated, has all that is in the file of `tied`."""
    model = sharded(other(tied(seed=9)))
    optimizer = momentum(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = gradients(model)
    evaluate(model)
    (entry,) = os.scandir(path.parent)  # no str, and no Path
    with torch.set_grad_enabled(rank == 0):
        answer.load_whole(entry, model)
    cause = "a rank has not got its part of every weight"
    check_equal(weights(model), weights(tied()), "weights", cause=cause)
    check_others(model)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    replaced = [name for name, p in named(model) if p not in held]
    cause = "the parameters were replaced: those that the optimizer has are others"
    check_equal(replaced, [], "parameters that the optimizer does not have", cause=cause)
    cause = "load_whole is about weights: nobody has asked it to drop gradients"
    check_equal(gradients(model), before, "gradients", cause=cause)


def refuses_files(answer: Any, rank: int, folder: Path) -> None:
    """Files that are not of the model, by what is changed in them, or is gone (...)."""
    model = sharded(tied(seed=9))
    optimizer = momentum(model.parameters())
    state, name = tied().state_dict(), "blocks.0.up.weight"
    files: dict[str, dict[str, Any]] = {
        "a name too few": {name: ...},
        "a buffer too few": {"scale": ...},
        "a name too many": {f"{name}.more": torch.ones(3)},
        "no extra state": {"_extra_state": ...},
        "more extra state": {"head._extra_state": "more"},
        "a buffer of another shape": {"scale": torch.ones(1)},
        "a row for a number": {"seen": state["seen"].view(1)},
        "the shape turned": {name: state[name].T.clone()},
    }
    for what, changed in files.items():
        path = folder / f"{what}.pt"
        values = {n: value for n, value in {**state, **changed}.items() if value is not ...}
        on_rank_0(functools.partial(torch.save, values, path))
        words = [*changed, path]
        refuses(answer.load_whole, path, model, optimizer, words, f"the file has {what}")


def killed_save_whole(answer: Any, rank: int, folder: Path) -> None:
    """One rank: what is in the file if save_whole were killed at an operation on a file.

    The system's temporary folder is on another disk.
    """
    model, _ = small()
    copies = Copies(folder / "run-\u00e9")
    copies.folder.mkdir()
    path = copies.folder / "whole.pt"
    torch.save({"from before": torch.ones(3)}, path)
    with before_each_write(copies.folder, copies.before_a_write):
        answer.save_whole(path, model)
    new = weights(model)
    cause = "it is not the model's, or it is in another dtype"
    check_equal(load_file(path), new, "what is in the file", cause=cause)
    for when, copy in copies.made:
        names = sorted(load_file(copy / path.name))
        check(
            names in (["from before"], sorted(new)),
            expected=f"names of the file from before, or those of the model, {when}",
            got=names,
            cause="the file is written in place, as shutil.move() from another disk does too, "
            "or taken away before the new one is there",
        )


def books(answer: Any, rank: int, path: Path, is_plain: bool) -> Account:
    """What one call does to this rank's memory; the model has trained with AdamW.

    gloo's threads may let go of what they have sent a little late: the least of three counts.
    """
    model, optimizer = trained(make(256, 6))
    optimizer.zero_grad()

    def plain() -> None:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(whole, path)

    call = plain if is_plain else functools.partial(answer.save_whole, path, model)
    found = (account(call, device(), model=model, optimizer=optimizer) for _ in range(3))
    return min(found, key=lambda books: books.peak)
