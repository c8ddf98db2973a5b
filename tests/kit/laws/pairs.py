"""What users combine: worlds of many twists, a few dozen in which every two of them meet.

    TABLES = {"": (), "clipped": half}, {"": (), "stale gradients": stale, "frozen": frozen}

A world takes one part of each table, of which the first is plain. Most faults need two things at
once, seldom three (Kuhn, Wallace and Gallo, "Software fault interactions", 2004). Of a world in
which an answer fails, what does not matter is made plain before it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from allpairspy import AllPairs

Part = tuple[str, Any]  # a name, and what it stands for
Parts = tuple[Part, ...]  # one of each table
Tables = Sequence[Mapping[str, Any]]  # what is plain comes first in each


def in_pairs(tables: Tables) -> list[Parts]:
    """Combinations of one part from each table, the same ones each time."""
    return [tuple(row) for row in AllPairs([[*table.items()] for table in tables])]


def name_of(parts: Parts) -> str:
    """The names of what is special."""
    return ", ".join(name for name, _ in parts if name) or "nothing special"


def plainest(parts: Parts, tables: Tables, fails: Callable[[Parts], bool]) -> Parts:
    """The same with what is plain in place of each part that it fails without.

    It fails, too, where `fails` raises.
    """
    for number, table in enumerate(tables):
        plain = next(iter(table.items()))
        plainer = (*parts[:number], plain, *parts[number + 1 :])
        if plain == parts[number]:
            continue
        try:
            is_failing = fails(plainer)
        except Exception:
            is_failing = True
        parts = plainer if is_failing else parts
    return parts


class Mix(str):
    """The name of a scenario of many parts; `make` makes it of them, or of plainer ones."""

    parts: Parts
    tables: Tables
    make: Callable[[Parts], tuple[Any, ...]]


def mixed(make: Callable[..., Any], *more: Any, tables: Tables) -> Iterator[tuple[Any, ...]]:
    """Scenarios for a spec to yield: the options in the tables, as keyword arguments of `make`.

    What comes after it in the scenarios, `more`, is the same for all.
    """

    def world(parts: Parts) -> tuple[Any, ...]:
        options: dict[str, Any] = {}
        for _, part in parts:
            options |= part
        return make(**options), *more

    for parts in in_pairs(tables):
        mix = Mix(name_of(parts))
        mix.parts, mix.tables, mix.make = parts, tables, world
        yield mix, *world(parts)
