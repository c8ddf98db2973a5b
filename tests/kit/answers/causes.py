"""How often a spec that catches a mistake names its cause."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kit.answers.catalogue import Entry, catalogue
from kit.answers.loading import Answer
from kit.catalog import GROUPS, Kata

LEAST = 80  # percent


class Causes:
    """The mistakes that were caught by specs whose mark says which sentence they are about."""

    def __init__(self) -> None:
        self._named: dict[Kata, dict[Entry, bool]] = {}

    def note(self, answer: Answer, item: pytest.Item, error: Exception) -> None:
        """A mistake was caught; where several cases catch it, each must name the cause."""
        mistake = answer.mistake
        if mistake and any(mark.args for mark in item.iter_markers() if mark.name in GROUPS):
            words = mistake.says and mistake.says in getattr(error, "cause", "")
            known = self._named.setdefault(answer.kata, {})
            is_named = bool(getattr(error, "sure", False) or words)
            known[mistake] = known.get(mistake, True) and is_named

    def lines(self) -> list[str]:
        """One line for each kata."""
        return [
            f"{kata.name}: the cause is named in {sum(named.values())} of {len(named)} mistakes "
            f"({_percent(named):.0f} %)"
            for kata, named in self._named.items()
        ]

    def complaints(self, ran: Iterable[Entry]) -> list[str]:
        """A line for each kata whose mistakes ran, all of them, with too few causes."""
        everything = set(ran)
        return [
            f"{kata.name}: fewer than {LEAST} % have their cause named; these have not: "
            + ", ".join(sorted(entry.name for entry, is_named in named.items() if not is_named))
            for kata, named in self._named.items()
            if _percent(named) < LEAST and everything.issuperset(catalogue(kata)[0])
        ]


def _percent(named: dict[Entry, bool]) -> float:
    return 100 * sum(named.values()) / len(named)
