"""What a call that fails leaves to the garbage collector: nothing."""

from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import torch

from kit.laws.checks import check_equal
from kit.laws.endings import ENDINGS
from kit.memory.ruler import collector_paused


def check_nothing_waits(run: Callable, end: str, device: torch.device) -> None:
    """Have `run` call a function that ends so: a tensor of its frame is gone with the error.

    What fails in Python, and what fails in one of torch's operations.
    """
    __tracebackhide__ = True
    planted, there = ENDINGS[end], []

    def ends() -> None:
        own = torch.ones(8, device=device)
        there.append(ref(own))
        if planted:
            raise type(planted)(*planted.args)

    def operates() -> None:
        own = torch.ones(8, device=device)
        there.append(ref(own))
        own @ own[1:]

    with collector_paused():
        for failing in (ends, operates):
            with suppress(KeyError, KeyboardInterrupt, SystemExit, RuntimeError):
                run(failing)
        alive = [own() is not None for own in there]
    check_equal(len(there), 2, "calls of two functions", cause="what failed is tried again")
    cause = "a local variable keeps the error, whose traceback holds that variable's frame: a cycle"
    what = "tensors of the failed call that wait for the garbage collector"
    check_equal(sum(alive), 0, what, cause=cause)
