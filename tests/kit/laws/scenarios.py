"""One law over several scenarios: the first that breaks it is shown, and the cause is computed.

    class Sharing:
        def tied_weights(device): ...
        def gradients_in_one_flat_buffer(device): ...

    check_scenarios(answer, judge, Sharing, "bytes", cause="a guess")

A scenario is a named function that builds a world; those of one law stand in one class, or in a
dictionary. `judge(answer, scenario)` says what the answer gave in it and what it should give. Where
a mistake of the catalogue gives the same in every scenario, its belief is the cause.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kit.answers.loading import load, sources
from kit.catalog import find_kata
from kit.laws.checks import check_equal

Judge = Callable[[ModuleType, Any], tuple[object, object]]


def check_scenarios(
    answer: ModuleType, judge: Judge, law: type | Mapping[str, Any], what: str, *, cause: str
) -> None:
    """Fail if the answer does not give what it should in each scenario."""
    __tracebackhide__ = True
    table = vars(law) if isinstance(law, type) else law
    scenarios = {name: one for name, one in table.items() if not name.startswith("_")}
    given: dict[str, tuple[object, object]] = {}
    error: Exception | None = None
    for name, scenario in scenarios.items():
        try:
            given[name] = judge(answer, scenario)
        except Exception as raised:
            error = raised
            break
    broken = [name for name, (got, want) in given.items() if _differ(got, want)]
    if not broken:
        if error:
            raise error
        return
    got, want = given[broken[0]]
    name = broken[0].replace("_", " ") if isinstance(law, type) else broken[0]
    where = name if len(scenarios) == 1 else f"{name}; {len(broken)} of {len(scenarios)} scenarios"
    believed = [] if error else [b for b, m in _mistakes() if _gives(m, judge, scenarios, given)]
    suspects = dict.fromkeys(believed[:1], got)
    check_equal(got, want, f"{what} ({where})", cause=cause, suspects=suspects)


def _differ(got: object, want: object) -> bool:
    return type(got) is not type(want) or got != want


def _gives(
    mistake: ModuleType,
    judge: Judge,
    scenarios: Mapping[str, Any],
    given: Mapping[str, tuple[object, object]],
) -> bool:
    """Whether the mistake gives in every scenario what the answer has given."""
    with suppress(Exception):
        return all(judge(mistake, scenarios[name])[0] == got for name, (got, _) in given.items())
    return False


def _mistakes() -> list[tuple[str, ModuleType]]:
    """The mistakes that the spec which runs now must catch: their beliefs, and the answers."""
    path, *_, spec = os.environ["PYTEST_CURRENT_TEST"].partition(" (")[0].split("::")
    return _caught_by(Path(path).parent.name, spec.partition("[")[0])


@cache
def _caught_by(kata: str, spec: str) -> list[tuple[str, ModuleType]]:
    try:
        mistakes = [
            (answer.mistake, answer.path) for answer in sources(find_kata(kata), "mistakes")
        ]
    except (OSError, ValueError):  # the proof complains of it, not a verdict
        return []
    mine = [(m, path) for m, path in mistakes if m and m.caught_by.partition("[")[0] == spec]
    return [(f"{m.name.replace('_', ' ')}: {m.belief}", load(path)) for m, path in mine]
