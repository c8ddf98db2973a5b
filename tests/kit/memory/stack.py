"""The memory of a step as a stack: bytes of each kind at each point, for pictures and tables.

A kata has a picture of one step if tests/specs/NAME/timeline.py has

    TITLE = "One step of ..."
    def timeline(answer, reference, device) -> dict[str, Account]: ...

with the accounts of the plain way, of the reference and of the answer, by these names: "plain",
"reference", "yours". Other fixtures of specs, such as `world`, are arguments in the same way.
"""

from __future__ import annotations

from kit.memory.account import Account

Row = dict[str, int]

# From the bottom of a stack to its top. Activations wait for the backward pass; what is recomputed
# in it, and every other transient, is temporary.
KINDS = ("weights", "optimizer state", "gradients", "data", "activations", "temporary")
_NAMES = {"shards": "weights", "unsharded": "weights", "communication": "temporary"}


def stacked(books: Account) -> list[Row]:
    """Bytes of each of KINDS at every point of the step at which something came or went."""
    now, rows, at = dict.fromkeys(KINDS, 0), list[Row](), 0
    for point, kind, delta, waits in books.changes:
        if point != at:
            rows.append(dict(now))
            at = point
        now[_kind(kind, point, waits)] += delta
    return [*rows, now]


def by_kind(books: Account) -> Row:
    """Bytes of each of KINDS at the peak; the sum is the peak."""
    return highest(stacked(books))


def highest(rows: list[Row]) -> Row:
    """The row with the most bytes."""
    return max(rows, key=lambda row: sum(row.values()))


def thin(rows: list[Row]) -> list[Row]:
    """400 rows at most, so few that a plot can show them, with the highest of each stretch."""
    size = -(-len(rows) // 400)
    return [highest(rows[start : start + size]) for start in range(0, len(rows), size)]


def _kind(kind: str, point: int, waits: bool) -> str:
    if kind != "activations":
        return _NAMES.get(kind, kind)
    return "data" if point == 0 else "activations" if waits else "temporary"
