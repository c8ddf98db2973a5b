"""Saves that fail: a full disk, state that cannot be pickled, Ctrl-C, a rename that goes wrong."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.laws.checks import fail

# The disk has room for so many quarters of the file; or what is raised while the state is pickled.
FAILURES = (0, 1, 2, 3, OSError, RuntimeError, KeyboardInterrupt, "rename")


class Unsavable(torch.Tensor):
    """A tensor whose pickling fails, when part of the file may have been written."""

    error: type[BaseException] = OSError

    def __reduce_ex__(self, protocol: object) -> str:
        raise self.error("no space left on device")


def _patch_renames(patch: pytest.MonkeyPatch, allow: Callable[[Any, Any], None]) -> None:
    """A file gets another name only where `allow` of both does not raise."""

    def renamed(rename: Any, source: Any, target: Any, **options: Any) -> Path:
        allow(source, target)
        rename(source, target, **options)
        return Path(target)

    for name in ("replace", "rename"):
        instead = partial(renamed, getattr(os, name))
        patch.setattr(os, name, instead)
        # In Python 3.10 a path has taken its own from os before.
        patch.setattr(Path, name, partialmethod(lambda path, how, to: how(path, to), instead))


def _never(source: object, target: object) -> None:
    raise OSError("no rename")


def _in_one_folder(source: Any, target: Any) -> None:
    if Path(target).resolve().parent not in Path(source).resolve().parents:
        raise OSError(errno.EXDEV, "a rename from one disk to another", source, None, target)


@contextmanager
def folders_apart() -> Iterator[None]:
    """Inside, each folder is on a disk of its own with what lies in it: no rename between two."""
    with pytest.MonkeyPatch.context() as patch:
        _patch_renames(patch, _in_one_folder)
        yield


@contextmanager
def failing(failure: object, model: nn.Module, size: int) -> Iterator[None]:
    """A save of the model inside, to a file of this size, fails; its error must come out."""
    __tracebackhide__ = True
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(failure, int):
            resource.setrlimit(resource.RLIMIT_FSIZE, (failure * size // 4, hard))
        elif isinstance(failure, type):
            patch.setattr(Unsavable, "error", failure)
            model.register_buffer("breaks", torch.zeros(5).as_subclass(Unsavable))
        else:
            _patch_renames(patch, _never)
        try:
            yield
        except (OSError, RuntimeError, KeyboardInterrupt):
            return
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            if hasattr(model, "breaks"):
                del model.breaks
    cause = "it is swallowed"
    if failure == "rename":
        cause += "; or what cannot be renamed is copied, and half a copy is left by an error in it"
    fail(expected=f"the error of a save ({failure})", got="no error", cause=cause)
