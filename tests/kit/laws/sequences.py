"""Rules over time: what holds after any sequence of calls, tried by hypothesis against a model.

    for_all(lambda st: st.lists(st.sampled_from(CALLS)), lambda calls: agree(mine, true, calls))

The sequences are the same in every run. Of those that fail, the check sees the shortest last, so
that its message shows that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def for_all(cases: Callable[[Any], Any], check: Callable[[Any], None], examples: int = 25) -> None:
    """Run `check` on this many cases; its error for the smallest case that fails comes through.

    `cases` makes a strategy with the module hypothesis.strategies.
    """
    __tracebackhide__ = True
    # Only here: it takes a quarter of a second, which nobody else should wait for.
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
        verbosity=Verbosity.quiet,
    )
    @given(cases(strategies))
    def run(case: Any) -> None:
        __tracebackhide__ = True
        check(case)

    run()
