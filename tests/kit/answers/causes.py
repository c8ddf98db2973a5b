"""How often a spec that catches a mistake names its cause: a plugin of pytest.

It hears of every mistake by its report, so the processes of a run may share the work.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.answers.catalogue import Entry, catalogue
from kit.answers.marks import clause_of
from kit.catalog import find_kata
from kit.laws.checks import notes_of

LEAST = 80  # percent
_WHOLE = 0.9  # of the entries, for some need a GPU; fewer are a choice of somebody's


def note(item: pytest.Item, kata: str, mistake: Entry, error: Exception) -> None:
    """A spec has caught a mistake: note whether it names the cause, if it says what it is about."""
    if clause_of(item)[1]:
        words = mistake.says and mistake.says in getattr(error, "cause", "")
        is_named = bool(getattr(error, "sure", False) or words or notes_of(error).cause)
        item.user_properties.append(("cause", (kata, mistake.name, is_named)))


class Causes:
    """Counts, and fails a proof of all mistakes of a kata with too few causes."""

    def __init__(self) -> None:
        self._named: dict[str, dict[str, bool]] = {}
        self._complaints: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Where several cases catch a mistake, each must name the cause."""
        caught: Any = dict(report.user_properties).get("cause")
        if report.when == "call" and caught:
            kata, mistake, is_named = caught
            known = self._named.setdefault(kata, {})
            known[mistake] = known.get(mistake, True) and is_named

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Complain where the causes are too few."""
        self._complaints = [
            f"{kata}: fewer than {LEAST} % have their cause named; these have not: "
            + ", ".join(sorted(name for name, is_named in named.items() if not is_named))
            for kata, named in self._named.items()
            if _percent(named) < LEAST and len(named) >= _WHOLE * len(catalogue(find_kata(kata))[0])
        ]
        if self._complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line for each kata."""
        for kata, named in sorted(self._named.items()):
            terminalreporter.write_line(
                f"{kata}: the cause is named in {sum(named.values())} of {len(named)} mistakes "
                f"({_percent(named):.0f} %)"
            )
        for line in self._complaints:
            terminalreporter.write_line(f"FAILED {line}", red=True)


def _percent(named: dict[str, bool]) -> float:
    return 100 * sum(named.values()) / len(named)
