"""The dry run of a kata: what a model far too large for this machine needs on each rank.

A kata has one if tests/specs/NAME/plan.py has

    SIZES = {"layers": 24, "ranks": 64}                       # the options and their defaults
    def plan(answer: ModuleType, **sizes: int) -> Plan: ...   # ValueError: these sizes do not fit
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        label: what it is, in a few words.
        bytes: what a rank holds at the peak, by kind.
        peak: the bytes of the peak; at least the sum of the kinds.
        collectives: the collective calls of a step, in a few words.
    """

    label: str
    bytes: dict[str, int]
    peak: int
    collectives: str = ""


@dataclass(frozen=True)
class Plan:
    """A table; the title says how many parameters and ranks, and the shapes."""

    title: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
