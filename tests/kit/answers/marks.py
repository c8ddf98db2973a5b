"""What a spec is about: the mark of its group says it, or its class."""

from __future__ import annotations

from typing import Any

import pytest

from kit.answers.contract import Clause
from kit.catalog import GROUPS


def group_of(item: pytest.Item) -> str:
    """The one of GROUPS that it is marked with."""
    return next((group for group in GROUPS if item.get_closest_marker(group)), "")


def clause_of(item: pytest.Item) -> tuple[str, Clause]:
    """The function, such as "Scaler.update", and the clause of its contract if one is named."""
    mark = item.get_closest_marker(group_of(item))
    if mark and mark.args:
        return mark.args
    return getattr(getattr(item, "cls", None), "subject", ""), ""


def subject_of(spec: Any) -> tuple[str, Clause]:
    """The same of a function that is a spec: that of its own mark."""
    marks = [mark for mark in getattr(spec, "pytestmark", []) if mark.name in GROUPS]
    return next((mark.args for mark in marks if mark.args), ("", ""))
