"""What ranks do for the specs of part 4: one file for the whole model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from kit.laws.checks import UNTOUCHED, check, check_equal
from kit.memory.account import Account, account
from kit.ranks.disk import Copies, before_each_write, load_file, slow
from kit.ranks.rank import device
from kit.ranks.shards import gradients, named, weights
from kit.ranks.toys import make
from specs.sharded_checkpoint.models import evaluate, momentum, other, sharded, small, tied, trained
from specs.sharded_checkpoint.ranks import on_rank_0, refuses


def save_whole_after(answer: Any, rank: int, path: Path) -> dict[str, Any]:
    """The weights of a model that computes in 16 bits, and was evaluated.

    File operations are slow, and the file must be there when the call returns on this rank.
    """
    model = sharded(tied(), torch.bfloat16)
    want = weights(model)  # no call after save_whole: a rank that hangs would take it for its own
    evaluate(model)
    with slow(path.parent):
        answer.save_whole(path, model)
    names, what = sorted(load_file(path)), f"names in the file when rank {rank} returns"
    cause = "a rank returns before rank 0 has written; or the file has no state dict of the model"
    check_equal(names, sorted(tied().state_dict()), what, cause=cause)
    return want


def load_whole_into(answer: Any, rank: int, path: Path) -> None:
    """Load the file of `tied` into a model that has gradients."""
    model = sharded(other())
    optimizer = momentum(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = gradients(model)
    answer.load_whole(str(path), model)
    cause = "a rank has not loaded its part of every weight"
    check_equal(weights(model), weights(tied()), "weights", cause=cause)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    replaced = [name for name, p in named(model) if p not in held]
    cause = "the parameters were replaced: the optimizer has the old ones"
    check_equal(replaced, [], "parameters that the optimizer does not have", cause=cause)
    cause = "load_whole loads weights: gradients stay"
    check_equal(gradients(model), before, "gradients", cause=cause, clause=UNTOUCHED)


def refuses_files(answer: Any, rank: int, folder: Path) -> None:
    """Files of another model, by what is changed in them, or missing (...)."""
    model = sharded(other())
    optimizer = momentum(model.parameters())
    state, name = tied().state_dict(), "blocks.0.up.weight"
    files: dict[str, dict[str, Any]] = {
        "a name too few": {name: ...},
        "a buffer too few": {"scale": ...},
        "a name too many": {f"{name}.more": torch.ones(3)},
        "a buffer of another shape": {"scale": torch.ones(1)},
        "a transposed weight": {name: state[name].T.clone()},
    }
    for what, changed in files.items():
        path = folder / f"{what}.pt"
        values = {n: value for n, value in {**state, **changed}.items() if value is not ...}
        on_rank_0(functools.partial(torch.save, values, path))
        words = [*changed, path]
        refuses(answer.load_whole, path, model, optimizer, words, f"the file has {what}")


def killed_save_whole(answer: Any, rank: int, folder: Path) -> None:
    """One rank: the file as a kill before each file operation of save_whole would leave it.

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
    cause = "another state dict, or another dtype, is saved"
    check_equal(load_file(path), new, "what is in the file", cause=cause)
    for when, copy in copies.made:
        names = sorted(load_file(copy / path.name))
        check(
            names in (["from before"], sorted(new)),
            expected=f"names of the file from before, or those of the model, {when}",
            got=names,
            cause="the file is written in place, as shutil.move() from another disk does too, "
            "or deleted before the new one is there",
        )


def books(answer: Any, rank: int, path: Path, is_plain: bool) -> Account:
    """The memory of one call on this rank; the model has trained with AdamW.

    gloo's threads may free what they sent a little late: the smallest of three counts.
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
