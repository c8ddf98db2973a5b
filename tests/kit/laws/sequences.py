"""Rules over time: what holds after any sequence of calls, tried by hypothesis against a model.

    for_all(lists(sampled_from(CALLS)), lambda calls: agree(mine, true, calls))

The sequences are the same in every run. Of those that fail, the check sees the shortest last, so
that its message shows that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy

Case = TypeVar("Case")

_SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=[*HealthCheck],
    verbosity=Verbosity.quiet,
)


def for_all(cases: SearchStrategy[Case], check: Callable[[Case], None], examples: int = 25) -> None:
    """Run `check` on this many cases; its error for the smallest case that fails comes through."""
    __tracebackhide__ = True

    @settings(_SETTINGS, max_examples=examples)
    @given(cases)
    def run(case: Case) -> None:
        __tracebackhide__ = True
        check(case)

    run()
