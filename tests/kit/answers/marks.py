"""What a pytest item is: a spec of a group, about a clause, in some case, run with an answer."""

from __future__ import annotations

from typing import Any

import pytest

from kit.answers.contract import Clause
from kit.answers.loading import Answer
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


def answer_of(item: pytest.Item) -> Answer | None:
    """The answer that it judges, if it is a spec."""
    callspec = getattr(item, "callspec", None)
    answer = callspec.params.get("answer") if callspec else None
    return answer if isinstance(answer, Answer) else None


def name_of(item: pytest.Item) -> str:
    """The name of its function."""
    return str(getattr(item, "originalname", item.name))


def case_of(item: pytest.Item) -> str:
    """The id of its case, without that of the answer."""
    callspec = getattr(item, "callspec", None)
    ids = callspec._idlist if callspec else []
    return "-".join(id for id in ids if id != str(answer_of(item)))


def subject_of(spec: Any) -> tuple[str, Clause]:
    """The same of a function that is a spec: that of its own mark."""
    marks = [mark for mark in getattr(spec, "pytestmark", []) if mark.name in GROUPS]
    return next((mark.args for mark in marks if mark.args), ("", ""))
