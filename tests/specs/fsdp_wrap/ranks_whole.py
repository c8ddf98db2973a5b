"""What runs on every rank: programs for the specs of save_whole and load_whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.laws.checks import check_raises
from specs.fsdp_wrap.models import weights
from specs.fsdp_wrap.ranks_checkpoint import MADE, small, steps
from specs.fsdp_wrap.ranks_step import wrapped
from specs.fsdp_wrap.trouble import before_each_write, no_room
from specs.fsdp_wrap.untouched import check_untouched, local_state


def save_whole_after(answer: Any, rank: int, path: Path) -> dict[str, Any]:
    """The weights, and the names in the file as soon as the call has returned on this rank.

    On rank 0 nothing under the folder gets its name within a twentieth of a second.
    """
    model, optimizer = wrapped(answer, MADE)
    steps(answer, model, optimizer, 0)
    want = weights(model)  # no call after save_whole: a rank that waits would take it for another's
    with before_each_write(path.parent, lambda _: time.sleep(0.05)):
        answer.save_whole(str(path), model)
    try:
        names = list(torch.load(path))
    except Exception as error:
        names = [type(error).__name__]
    return {"names": names, "weights": want}


def save_whole_without_room(answer: Any, rank: int, path: Path) -> str:
    model, _ = small(answer)
    with no_room():
        try:
            answer.save_whole(path, model)
        except NotImplementedError:
            raise
        except Exception as error:
            return type(error).__name__
    return ""


def load_whole_into(answer: Any, rank: int, path: Path) -> list[dict[str, Tensor]]:
    """The weights that were loaded, and those after a step."""
    model, optimizer = wrapped(answer, {**MADE, "seed": 9})
    answer.load_whole(str(path), model)
    loaded = weights(model)
    steps(answer, model, optimizer, 0)
    return [loaded, weights(model)]


def refuses_files(answer: Any, rank: int, files: Sequence[tuple[Path, str]]) -> None:
    """Files that are not of the model, each with the name that it is about."""
    model, optimizer = small(answer, seed=9)
    before = local_state(model, optimizer)
    for path, name in files:
        check_raises(
            lambda path=path: answer.load_whole(path, model),
            ValueError,
            mentions=[name, path],
            when=f"for a file with {path.stem.replace('_', ' ')}",
        )
        check_untouched(before, model, optimizer)
