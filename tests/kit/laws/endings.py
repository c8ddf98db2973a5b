"""The ways in which a caller's function ends: it returns, it raises, Ctrl-C, sys.exit.

What next() raises at the end of the data passes through no generator as it is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from kit.laws.checks import SpecFailure, check_equal


class AnyError(KeyError, MemoryError, torch.OutOfMemoryError):
    """An error of the kinds that code likes to treat in a way of its own."""


ENDINGS = {
    "success": None,
    "error": AnyError("mine"),
    "assertion": AssertionError(),  # without a word
    "end_of_data": StopIteration("mine"),
    "ctrl_c": KeyboardInterrupt("mine"),
    "exit": SystemExit("mine"),
}


def check_ending(
    run: Callable[[Callable[[], object]], object], end: str, function: Callable[[], object]
) -> None:
    """Have `run` call a function that ends so: its error must come through, and not be kept."""
    __tracebackhide__ = True
    planted, came = ENDINGS[end], repr(None)
    there: list[ref[set[str]]] = []

    def ends() -> object:
        own = {end}  # lives as long as this frame, and so as long as the error's traceback
        there.append(ref(own))
        result = function()  # a graph that lies in the frame
        if planted:
            raise type(planted)(*planted.args)
        return result

    try:
        run(ends)
    except (NotImplementedError, SpecFailure):
        raise
    except BaseException as error:
        came = repr(error)
    cause = "an error or Ctrl-C is swallowed, or replaced by another error"
    check_equal(came, repr(planted), "the error that comes out", cause=cause)
    if alive(there):
        gc.collect()
    left = alive(there)
    cause = "the error is kept, and so are all tensors in the frames of its traceback"
    what = "frames of the failed call that are still alive"
    check_equal(left, 0, what, cause=cause, suspects={cause: left})


def alive(seen: Sequence[ref[Any]]) -> int:
    """How many are; on a GPU backward has a thread of its own, which lets go of an error late."""
    limit = time.monotonic() + (1.0 if torch.cuda.is_initialized() else 0.0)
    while (count := sum(it() is not None for it in seen)) and time.monotonic() < limit:
        time.sleep(0.01)
    return count
