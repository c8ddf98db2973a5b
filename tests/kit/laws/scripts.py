"""Scripts of calls such as "backward(inf); step(); update()": an answer beside a model.

    got, want = play(mine, script), play(true, script)

Both sides are objects with these methods, and with seen(), which shows what a caller can see.
"""

from __future__ import annotations

import math
from typing import Any

from kit.laws.equal import Raised


def play(side: Any, script: str) -> dict[str, Any]:
    """What each call of the script gave, and what is seen after it, by name and moment.

    Arguments are written as in Python, with the attributes of `side`, inf and nan by name.
    """
    seen: dict[str, Any] = {}
    calls = script.split("; ")
    for number, call in enumerate(calls, 1):
        names = {"inf": math.inf, "nan": math.nan, **vars(side)}
        after = f"after {'; '.join(calls[:number])}"
        seen[f"what comes {after}"] = _outcome(call, names | {"side": side})
        seen |= {f"{name} {after}": value for name, value in side.seen().items()}
    return seen


def _outcome(call: str, names: dict[str, Any]) -> Any:
    """What is returned; or the error, and whether it names the arguments."""
    try:
        return eval(f"side.{call}", names)
    except ValueError as error:
        arguments = call.partition("(")[2].rstrip(")")
        return f"ValueError, {'' if arguments in str(error) else 'not '}with {arguments!r} in it"
    except (RuntimeError, AssertionError) as error:
        if type(error) not in (RuntimeError, AssertionError):
            raise
        return Raised(error, "RuntimeError")  # GradScaler's for an update too early is another
