"""A pytest plugin for a dry run: calls the `plan` of a kata as if it were a spec.

So a syntax error, an unwritten part, an endless loop and a dead process are told as of any spec.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from desk.explain import last_file, place_in


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", action="append", default=[], help="NAME=NUMBER")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call it and keep the table; ValueError of its own says that these sizes do not fit."""
    pairs = (text.partition("=") for text in pyfuncitem.config.getoption("--size"))
    sizes = {name: int(number) for name, _, number in pairs}
    answer: Any = pyfuncitem.funcargs["answer"]
    try:
        plan = pyfuncitem.obj(answer, **sizes)
    except ValueError as error:
        is_own = last_file(error) == str(pyfuncitem.path)
        if is_own and place_in(error, Path(str(answer.__file__))) is None:
            pytest.skip(str(error))
        raise
    pyfuncitem.user_properties.append(("plan", dataclasses.asdict(plan)))
    return True
