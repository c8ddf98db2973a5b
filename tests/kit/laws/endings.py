"""The ways in which a caller's function ends: it returns, it raises, somebody presses Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable

from kit.laws.checks import SpecFailure, check_equal

ENDINGS = {"success": None, "error": KeyError("mine"), "ctrl_c": KeyboardInterrupt("mine")}


def check_ending(
    run: Callable[[Callable[[], object]], object], end: str, function: Callable[[], object]
) -> None:
    """Have `run` call a function that ends so: its error must come through, and be the same."""
    __tracebackhide__ = True
    planted, came = ENDINGS[end], None

    def ends() -> object:
        if planted:
            raise planted
        return function()

    try:
        run(ends)
    except (NotImplementedError, SpecFailure):
        raise
    except (Exception, KeyboardInterrupt) as error:
        came = error
    cause = "an error or Ctrl-C is kept from the caller, or another one made of it"
    check_equal(repr(came), repr(planted), "the error that comes out", cause=cause)
