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
    names = pyfuncitem._fixtureinfo.argnames
    found = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    rows = {name: thin(stacked(books)) for name, books in found.items()}
    peaks = {name: sum(highest(stack).values()) for name, stack in rows.items()}
    title = pyfuncitem.module.TITLE
    path = Path(pyfuncitem.config.getoption("--picture"))
    _draw(rows, peaks, title, path)
    bar = {"title": title, "formula": "", "limit": None, **peaks}
    pyfuncitem.user_properties.append(("bar", bar))
    return True


def _draw(
    rows: dict[str, list[dict[str, int]]], peaks: dict[str, int], title: str, path: Path
) -> None:
    from lab import draw  # matplotlib is not on the path of a spec

    most = max(peaks.values())
    figure, panels = draw.figure(columns=len(rows), height=3.4)
    for panel, (name, stack) in zip(panels, rows.items(), strict=True):
        draw.stacked_timeline(panel, stack, most)
        panel.set_title(f"{name}: {human(peaks[name])}", fontsize=9)
        panel.set_ylabel("" if panel is not panels[0] else panel.get_ylabel())
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    mine, theirs = peaks["yours"] / peaks["plain"], peaks["yours"] / peaks["reference"]
    finding = f"{title}: yours peaks at {mine:.2f} of the plain way, {theirs:.2f} of the reference"
    draw.save(figure, path, finding)
