"""What runs on every rank: programs for the specs of save and load."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kit.laws.checks import ERRORS, UNTOUCHED, SpecFailure, check_close, check_equal, check_raises
from kit.laws.equal import same
from kit.memory.resident import resident
from kit.memory.ruler import measure
from kit.ranks.disk import no_room
from kit.ranks.rank import device
from kit.ranks.shards import check_untouched, local_state, named
from kit.ranks.toys import OUTPUTS, WIDTH, make
from specs.sharded_checkpoint.models import (
    SETTINGS,
    Thin,
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

WIDE = 48  # rounding to 512 bytes is little of it
LARGE = 400  # what a process takes besides, some MiB, is little of it
TRAINED, EVALUATED = "trained", "evaluated"  # what a checkpoint is loaded into
MANY = 5  # blocks, of which half are more than three times the largest parameter
ASIDE = "5000000"  # a step above all others
LACKS = "not everything is saved, or loaded, in its dtype; or state of before is left"
WHOLE = "after an evaluation parameters() are whole, and no shards, until reshard() or state_dict()"
HOW = {TRAINED: {"cause": LACKS}, EVALUATED: {"cause": WHOLE, "clause": EVALUATED}}


def on_rank_0(action: Callable[[], object]) -> None:
    """While the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def save_and_go_on(answer: Any, rank: int, folder: Path, kind: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps; the learning rates fall after each step."""
    model = sharded(tied())
    optimizer = in_groups(model.parameters(), kind, 0.01)
    for number in (0, 1):
        step(model, optimizer, number)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # as schedulers do
            group["lr"] = group["lr"] * 0.7
    answer.save(str(folder), model, optimizer, 2)
    return {"saved": state(model, optimizer), "after": _goes_on(model, optimizer)}


def load_and_go_on(
    answer: Any, rank: int, folder: Path, kind: Any, into: str, saved: dict[str, Any]
) -> None:
    """Into a model with gradients, and an optimizer with other settings; then two more steps."""
    model = sharded(other())
    optimizer = in_groups(model.parameters(), kind, 0.5)
    for group in optimizer.param_groups:
        others = {"betas": (0.5, 0.6), "momentum": 0.5, "foreach": False}
        group.update({key: value for key, value in others.items() if key in group})
    if into == TRAINED:
        step(model, optimizer, 0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    held = state(model, optimizer)
    if into == EVALUATED:
        evaluate(model)  # last: a state dict would give back what stays gathered after it
    number = answer.load(str(folder), model, optimizer)
    cause = "load does not return the step that was given to save"
    check_equal(number, 2, "the step", cause=cause)
    check_loaded(model, optimizer, saved["saved"], HOW[into], held)
    check_not_persistent(model)
    cause = "what trains afterwards is not what was loaded"
    after = _goes_on(model, optimizer)
    check_close(after, saved["after"], "losses of the next steps", cause=cause, rtol=1e-4)


def _goes_on(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    return torch.tensor([step(model, optimizer, number) for number in (2, 3)])


def check_not_persistent(model: Any) -> None:
    """A model of `other` has kept what no state dict has."""
    cause = "a buffer that is not persistent is not in the state dict: it keeps its values"
    check_equal(model.cache.tolist(), [7.0, 7.0], "the buffer cache", cause=cause)


def check_loaded(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], how: Any, before: Any = None
) -> None:
    """Step 2 was saved. `how` has the cause, and the clause, of what is otherwise."""
    __tracebackhide__ = True
    check_given_back(model)
    got, want = state(model, optimizer), {**saved}
    settings, own = got.pop(SETTINGS), want.pop(SETTINGS)
    steps = {n: torch.full_like(v, 2) for n, v in want.items() if n.startswith("step of ")}
    suspects = {"the step of training is put in place of the optimizer's own": want | steps}
    if how is HOW[EVALUATED]:
        kept = {n: v for n, v in (before or {}).items() if n in want and same(got.get(n), v)}
        suspects[WHOLE] = want | kept
    check_equal(got, want, "what is loaded", suspects=suspects, before=before, **how)
    cause = "settings, such as learning rates, are not saved or loaded for every group, or not all"
    cause += " of them, or not anew"
    lists = {"tuples have come back as lists, as from json": json.loads(json.dumps(own))}
    check_equal(settings, own, "settings", cause=cause, suspects=lists)


def check_given_back(model: nn.Module) -> None:
    """A state dict frees what an evaluation has gathered."""
    __tracebackhide__ = True
    error, cause = error_of(model.state_dict), "numpy() of what was gathered: it cannot be freed"
    check_equal(error, "", "an error of the model's state_dict()", cause=cause, clause=EVALUATED)


def refuses_folders(answer: Any, rank: int, folder: Path) -> None:
    for name in ("empty", "not_there"):
        path = folder / name
        refuses(answer.load, path, *trained(make()), [path], "the folder has no checkpoint")
    run = folder / "run"
    answer.save(run, *trained(make()), 1)
    changes: dict[str, Callable[[Any], object]] = {
        "one block less": lambda model: model.blocks.pop(0),
        "a weight turned around": lambda model: setattr(
            model.head, "weight", nn.Parameter(torch.ones(WIDTH, OUTPUTS))
        ),
        "a buffer of one row, which the saved number fills": lambda model: setattr(
            model, "scale", torch.ones(1)
        ),
        "a buffer more": lambda model: model.register_buffer("more", torch.ones(2)),
        "a buffer less": lambda model: delattr(model, "scale"),
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
    unseen = f"{what}, and that is not seen: compare names and shapes, both ways"
    check_raises(call, ValueError, mentions=words, when=f"where {what}", cause=unseen)
    cause = "something is set, or dropped, before what is read has been checked"
    check_untouched(before, model, optimizer, call="the refused call", cause=cause, clause=ERRORS)


def ordinary(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, but RuntimeError for torch's CheckpointException."""
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


def comes_back(answer: Any, rank: int, folder: Path, kind: str) -> None:
    """What has TRAINED, in two dtypes; or was EVALUATED, and one of its blocks is given back."""
    model, optimizer = small()
    if kind == EVALUATED:
        model = make()
        model.embed = nn.Sequential(Thin(), model.embed)
        model, optimizer = trained(model)
    saved, before = state(model, optimizer), local_state(model, optimizer)
    if kind == EVALUATED:
        evaluate(model)
    answer.save(folder, model, optimizer, 2)
    check_given_back(model)
    cause = "whoever saves a checkpoint goes on training with what is there"
    check_untouched(before, model, optimizer, call="save", cause=cause, clause=UNTOUCHED)
    move(model, optimizer)
    answer.load(folder, model, optimizer)
    check_loaded(model, optimizer, saved, HOW[kind])


def step_rules(answer: Any, rank: int, folder: Path) -> None:
    model, optimizer = small()

    def refuse(number: int, newest: int) -> None:
        before = _files(folder)
        dist.barrier()  # nobody looks while another one saves
        save = lambda: answer.save(folder, model, optimizer, number)  # noqa: E731
        cause = f"step {number} is not compared with {newest + 1} as a number, or not at all"
        check_raises(save, ValueError, mentions=[number], when=f"for step {number}", cause=cause)
        cause = "the folder is written to before the step is checked"
        check_equal(_files(folder), before, "files in the folder", cause=cause, clause=ERRORS)
        dist.barrier()

    refuse(0, 0)
    refuse(-1, 0)
    for number in (2, 10, 999_999, 1_000_000):
        answer.save(folder, model, optimizer, number)
        on_rank_0(lambda: _turn_times(folder))
        if number == 10:
            on_rank_0(lambda: _set_aside(folder))
        if number in (10, 1_000_000):
            cause = "as texts 2 comes after 10, a million has 7 digits; or times are compared, and "
            cause += "a copy has others"
            got = loaded(answer, folder, model, optimizer)
            if ASIDE in str(got):
                cause = "a name counts that only looks like a checkpoint's"
            check_equal(got, number, "step of the newest checkpoint", cause=cause)
            dist.barrier()
        for old in dict.fromkeys((number, number - 1, 2)):  # saved or not
            refuse(old, number)


def _set_aside(folder: Path) -> None:
    """Copies of what has 10 in its name: under a name that looks like a later checkpoint's."""
    for path in [*folder.glob("*10*")]:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name.replace("10", f"{ASIDE}-mine"))


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
    model, found = small()[0], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(1, 7):
        answer.save(str(folder / "made"), model, optimizer, number)
        dist.barrier()
        found.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        dist.barrier()
    cause = "a checkpoint is written over one from before, or takes it away"
    kept = found[0] > 0 and found[-1] > 5.4 * found[0]
    check_equal(kept, True, "whether six checkpoints take six times the bytes", cause=cause)


def fails_on_one(answer: Any, rank: int, name: str, folder: Path, bad_rank: int, bad: str) -> str:
    """What a call raises where the path of one rank is another, as on a disk of its own.

    Or where its model cannot give ("get") or take ("set") a state dict, or its disk is full. A rank
    that never looks for itself may raise nothing, and loads what the others do. No
    call comes after it: one would meet that of a rank that waits.
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
        elif bad == "get":
            model.register_state_dict_pre_hook(_fails)
        elif bad == "set":
            model.register_load_state_dict_pre_hook(_fails)
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


def _fails(*args: Any) -> None:
    raise RuntimeError("this rank cannot")


HOW_IT_ENDED = "how the last operation has ended"


def check_alike(raised: list[str], what: str = "what they have found", must: bool = False) -> None:
    """Both ranks raise, which they `must`, or neither does."""
    __tracebackhide__ = True
    found, cause = [bool(error) for error in raised], f"the ranks do not tell each other {what}"
    cause += "; or an error in writing is swallowed" if must else ""
    want = [must or any(found)] * 2
    check_equal(found, want, "whether each rank raises", cause=cause)


def peak(answer: Any, rank: int, folder: Path, name: str) -> tuple[int, int | None]:
    """Bytes above the baseline in a call, of tensors; and of the process, where Linux counts them.

    The model has trained with AdamW; it is loaded once more into an optimizer without state.
    gloo's threads may let go of what they have sent a little late: the least of eight counts.
    """
    model = make(WIDE, MANY) if name == "save_whole" else make(LARGE, 3)
    for number in range(5 if name == "save_whole" else 0):  # rank 0 alone needs a copy
        model.register_buffer(f"more{number}", torch.zeros_like(model.blocks[0].up.weight))
        model.blocks[number].again = model.blocks[number].up  # tied: a second name for each weight
    if name == "save_whole":  # several in one module
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


def drops_gradients(answer: Any, rank: int, folder: Path) -> None:
    model, _ = small()
    next(model.parameters()).requires_grad_(False)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    answer.save(folder, model, optimizer, 1)
    answer.load(folder, model, optimizer)
    cause = "gradients of before are there, of what is frozen or not in the optimizer; or zeros are"
    there = [name for name, p in named(model) if p.grad is not None]
    check_equal(there, [], "parameters with gradients", cause=cause)
