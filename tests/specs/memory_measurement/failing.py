"""What a call leaves behind when its function ends in this way or that: nothing."""

from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import torch

from kit.laws.checks import check_equal
from kit.laws.endings import ENDINGS, alive, check_ending
from kit.memory.ruler import collector_paused


def check_leaves_nothing(run: Callable, end: str, device: torch.device) -> None:
    """Have `run` call functions that end so; an error may be an operation's own.

    The garbage collector has nothing to do.
    """
    __tracebackhide__ = True
    check_ending(run, end, torch.ones(12, device=device, requires_grad=True).exp)
    if end != "success":
        _check_frees(run, ENDINGS[end], device)
    if end == "error":
        _check_frees(run, None, device)


def _check_frees(run: Callable, planted: BaseException | None, device: torch.device) -> None:
    __tracebackhide__ = True
    there = []

    def fails() -> None:
        own = torch.ones(8, device=device)
        there.append(ref(own))
        if planted:
            raise type(planted)(*planted.args)
        own @ own[1:]

    with collector_paused():
        with suppress(Exception, KeyboardInterrupt, SystemExit):
            run(fails)
        left = alive(there)
    check_equal(len(there), 1, "calls of the function", cause="what failed is tried again")
    cause = "a local variable keeps the error, whose traceback holds that variable's frame: a cycle"
    what = "tensors of the failed call that wait for the garbage collector"
    check_equal(left, 0, what, cause=cause)
