"""What runs on every rank: programs for the specs of save_whole and load_whole."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from kit.laws.checks import check, check_close, check_equal
from kit.memory.account import Account, account
from kit.ranks.disk import Copies, before_each_write, load_file, no_room, slow
from kit.ranks.rank import device
from kit.ranks.shards import gradients, weights
from kit.ranks.toys import make
from specs.sharded_checkpoint.models import (
    adamw,
    evaluate,
    momentum,
    move,
    other,
    sharded,
    small,
    step,
    tied,
)
from specs.sharded_checkpoint.ranks import check_others, error_of, on_rank_0, refuses


def save_whole_after(answer: Any, rank: int, path: Path, is_bare: bool = False) -> dict[str, Any]:
    """The weights, and the names in the file as soon as the call has returned on this rank.

    The model computes in 16 bits, and has been evaluated.

    On rank 0 nothing under the folder gets its name within a twentieth of a second. Where the path
    `is_bare` it is only a name in the current folder.
    """
    model = sharded(tied(), torch.bfloat16)
    want = weights(model)  # no call after save_whole: a rank that waits would take it for another's
    evaluate(model)
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with slow(path.parent):
            answer.save_whole(path.name if is_bare else path, model)
    finally:
        os.chdir(before)
    return {"names": sorted(load_file(path)), "weights": want}


def load_whole_into(answer: Any, rank: int, path: Path) -> None:
    """The weights that were loaded, and the losses of two steps, as in one process."""
    one, model = tied().to(device()), sharded(other(tied(seed=9)))
    own, optimizer = momentum(one.parameters()), momentum(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = gradients(model)
    evaluate(model)
    (entry,) = os.scandir(path.parent)  # no str, and no Path
    with torch.set_grad_enabled(rank == 0):
        answer.load_whole(entry, model)
    cause = "a rank has not got its part of every weight"
    check_equal(weights(model), weights(one), "weights", cause=cause)
    check_others(model)
    after = gradients(model)
    cause = "the parameters were replaced: those that the optimizer has are others"
    for number in (0, 1):
        want, got = step(one, own, number, is_alone=True), step(model, optimizer, number)
        check_close(got, want, f"loss of step {number + 1}", cause=cause, rtol=1e-4)
    cause = "load_whole is about weights: nobody has asked it to drop gradients"
    check_equal(after, before, "gradients", cause=cause)


def refuses_files(answer: Any, rank: int, folder: Path) -> None:
    """Files that are not of the model, each with the name that it is about."""
    model = sharded(tied(seed=9))
    optimizer = momentum(model.parameters())
    state, name, more = tied().state_dict(), "blocks.0.up.weight", "head._extra_state"
    files: dict[str, tuple[str, dict[str, Any]]] = {
        "a name too few": (name, _without(state, name)),
        "a buffer too few": ("scale", _without(state, "scale")),
        "a name too many": (f"{name}.more", {**state, f"{name}.more": torch.ones(3)}),
        "no extra state": ("_extra_state", _without(state, "_extra_state")),
        "more extra state": (more, {**state, more: "more"}),
        "a buffer of another shape": ("scale", {**state, "scale": torch.ones(1)}),
        "a row for a number": ("seen", {**state, "seen": state["seen"].view(1)}),
        "the shape turned": (name, {**state, name: state[name].T.clone()}),
    }
    for what, (word, values) in files.items():
        path = folder / f"{what}.pt"
        on_rank_0(functools.partial(torch.save, values, path))
        words = [word, path]
        refuses(answer.load_whole, path, model, optimizer, words, f"the file has {what}")


def _without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {n: value for n, value in state.items() if n != name}


def save_whole_without_room(answer: Any, rank: int, path: Path) -> str:
    """What each rank raises where the disk is full for rank 0."""
    model, _ = small()
    with no_room() if rank == 0 else nullcontext():
        return error_of(lambda: answer.save_whole(path, model))


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
    model = sharded(make(256, 6))
    optimizer = adamw(model.parameters())
    move(model, optimizer)
    optimizer.zero_grad()

    def plain() -> None:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(whole, path)

    call = plain if is_plain else functools.partial(answer.save_whole, path, model)
    found = (account(call, device(), model=model, optimizer=optimizer) for _ in range(3))
    return min(found, key=lambda books: books.peak)
