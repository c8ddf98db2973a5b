"""After an error the same call again: it must do what it would have done without the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.laws.trace import Planted, PlantedInterrupt, World, results


def retried(step: Callable[[], Any], w: World) -> Any:
    """A step, in some worlds after one more; after a planted error the world is noted, and the step
    is tried once more.
    """
    if "twice" in w.tags:
        step()
    try:
        return step()
    except (Planted, PlantedInterrupt):
        w.notes |= {f"{name} after the error": value for name, value in w.now().items()}
        try:
            again = results(step())
            w.notes |= {f"{name} of the next call": value for name, value in again.items()}
        except RuntimeError as error:
            w.notes["error of the next call"] = str(error)
        raise
