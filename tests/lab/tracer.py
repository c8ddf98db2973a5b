"""A pytest plugin for `nox -s timeline`: one step of an answer, drawn beside the reference.

It calls the `timeline` of a kata as if it were a spec, so a syntax error, an unwritten part, an
endless loop and a dead process are told as of any spec.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.memory.ruler import human
from kit.memory.stack import highest, stacked, thin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--picture", help="where to, without a suffix")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Measure, draw, and keep the peaks as a bar without a limit."""
    from lab import draw  # matplotlib is not on the path of a spec

    names = pyfuncitem._fixtureinfo.argnames
    found = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    rows = {name: thin(stacked(books)) for name, books in found.items()}
    peaks = {name: sum(highest(stack).values()) for name, stack in rows.items()}
    title = pyfuncitem.module.TITLE
    figure = draw.stacked_timelines({f"{n}: {human(peaks[n])}": row for n, row in rows.items()})
    mine, theirs = peaks["yours"] / peaks["plain"], peaks["yours"] / peaks["reference"]
    finding = f"{title}: yours peaks at {mine:.2f} of the plain way, {theirs:.2f} of the reference"
    draw.save(figure, Path(pyfuncitem.config.getoption("--picture")), finding)
    bar = {"title": title, "formula": "", "limit": None, **peaks}
    pyfuncitem.user_properties.append(("bar", bar))
    return True
