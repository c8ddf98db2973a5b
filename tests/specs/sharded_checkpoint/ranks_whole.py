"""What ranks do for the specs of part 4: one file for the whole model."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from kit.laws.checks import UNTOUCHED, check, check_equal
from kit.laws.equal import same
from kit.memory.account import Account, account
from kit.ranks.disk import Copies, before_each_write, load_file, slow
from kit.ranks.rank import device
from kit.ranks.shards import check_untouched, gradients, local_state, named, weights
from kit.ranks.toys import make
from specs.sharded_checkpoint.models import evaluate, momentum, other, sharded, small, tied, trained
from specs.sharded_checkpoint.ranks import EVALUATED, HOW, check_not_persistent, on_rank_0, refuses


def save_whole_after(answer: Any, rank: int, path: Path, is_bare: bool = False) -> dict[str, Any]:
    """The weights; the file is there as soon as the call has returned on this rank.

    The model computes in 16 bits, and has been evaluated. On rank 0 nothing under the folder gets
    its name within a twentieth of a second. A path that `is_bare` is a name in the current folder,
    and nothing is slow there.
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
    model = sharded(other())
    optimizer = momentum(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = gradients(model)
    old = weights(model)
    evaluate(model)
    with torch.set_grad_enabled(rank == 0):
        answer.load_whole(str(path), model)
    got, how = weights(model), {"cause": "a rank has not got its part of every weight"}
    if any(same(got[name], old[name]) for name, _ in named(model)):
        how = HOW[EVALUATED]
    check_equal(got, weights(tied()), "weights", **how)
    check_not_persistent(model)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    replaced = [name for name, p in named(model) if p not in held]
    cause = "the parameters were replaced: those that the optimizer has are others"
    check_equal(replaced, [], "parameters that the optimizer does not have", cause=cause)
    cause = "load_whole is about weights: nobody has asked it to drop gradients"
    check_equal(gradients(model), before, "gradients", cause=cause, clause=UNTOUCHED)


def refuses_files(answer: Any, rank: int, folder: Path) -> None:
    """Files that are not of the model, by what is changed in them, or is gone (...)."""
    model = sharded(other())
    optimizer = momentum(model.parameters())
    state, name = tied().state_dict(), "blocks.0.up.weight"
    files: dict[str, dict[str, Any]] = {
        "a name too few": {name: ...},
        "a buffer too few": {"scale": ...},
        "a name too many": {f"{name}.more": torch.ones(3)},
        "a buffer that is not persistent": {"cache": torch.ones(2)},
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
    model, optimizer = small()
    before = local_state(model, optimizer)
    copies = Copies(folder / "run-\u00e9")
    copies.folder.mkdir()
    path = copies.folder / "whole.pt"
    torch.save({"from before": torch.ones(3)}, path)
    with before_each_write(copies.folder, copies.before_a_write):
        answer.save_whole(path, model)
    cause = "what is not for the file is dropped, as to have its memory"
    check_untouched(before, model, optimizer, call="save_whole", cause=cause, clause=UNTOUCHED)
    new = weights(model)
    cause = "it is not the model's, or it is in another dtype"
    check_equal(load_file(path), new, "what is in the file", cause=cause)
    for when, copy in copies.made:
        file = copy / path.name
        names = sorted(load_file(file))
        check(
            names in (["from before"], sorted(new)),
            expected=f"names of the file from before, or those of the model, {when}",
            got=names,
            cause="the file is written in place, as shutil.move() from another disk does too, "
            "or taken away before the new one is there",
        )
        answer.save_whole(file, model)
        cause = "what a killed save has left is in the way of the next one"
        what = f"what is in the file after a new save, {when}"
        check_equal(load_file(file), new, what, cause=cause)


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
