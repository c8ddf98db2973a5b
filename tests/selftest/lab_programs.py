"""Experiments for the tests of the lab: forks import them, so they stand in a module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from lab.measure import alternating
from lab.notebook import Lab, NotHere

CPU = torch.device("cpu")


def _log(lab: Lab, what: str, start: float) -> None:
    with (_folder(lab) / "log").open("a") as file:
        file.write(f"{lab.page.name} {what} {start} {time.monotonic()}\n")


def _folder(lab: Lab) -> Path:
    return Path(lab.page.question)


def times(lab: Lab) -> None:
    """Three timings, each logged with when it was made."""
    for number in range(3):
        lab.sample(f"before {number}", lambda: 0)

        def step() -> None:
            start = time.monotonic()
            time.sleep(0.1)
            _log(lab, "timing", start)

        lab.sample(f"time {number}", lambda step=step: alternating({"step": step}, CPU, 2))
    (_folder(lab) / f"{lab.page.name} is done").touch()


def counts_until_all_are_timed(lab: Lab) -> None:
    """Sample after sample, until the other two are done: nobody waits for a pause."""
    number = 0
    while not all((_folder(lab) / f"{name} is done").exists() for name in ("one", "two")):

        def count() -> int:
            start = time.monotonic()
            time.sleep(0.05)
            _log(lab, "count", start)
            return torch.get_num_threads()

        lab.sample(f"{number}", count)
        number += 1


def meets_another(lab: Lab) -> None:
    """A sample that ends only if another one is taken at the same time."""

    def wait() -> int:
        (_folder(lab) / lab.page.name).touch()
        while not all((_folder(lab) / name).exists() for name in ("one", "two")):
            time.sleep(0.01)
        return os.getpid()

    lab.sample("pid", wait)


def says(lab: Lab) -> None:
    """It ends well."""
    lab.say("The other one.")


def is_not_here(lab: Lab) -> None:
    """It needs what is not there."""
    raise NotHere("no such GPU")


def breaks_off(lab: Lab) -> None:
    """It has a fault."""
    raise ValueError("no shape")


def is_killed(lab: Lab) -> None:
    """As the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def never_ends(lab: Lab) -> None:
    """Until it is ended."""
    lab.sample("pid", os.getpid)
    time.sleep(3600)
