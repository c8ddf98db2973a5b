"""Equality to the bit of what specs compare, the first part that differs, and whence it comes."""

from __future__ import annotations

import itertools

import torch

from kit.laws.differences import beside

_FEW = 6  # names that can be compared at a glance


def same(one: object, other: object) -> bool:
    """Whether both are equal: tensors to the bit, in dtype and place, anything else by ==."""
    if one is other:  # even where a NaN is in it
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and beside(one, other)
        return alike and torch.equal(one, other.to(one.device))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


class Names(str):
    """Which names a dict has, and which it has not, in words."""


class Raised(str):
    """The type of an error that came; it is shown with its message, whose words are free."""

    message: str

    def __new__(cls, error: BaseException, name: str = "") -> Raised:
        """`name` stands for the type."""
        made = super().__new__(cls, name or type(error).__name__)
        made.message = (str(error).splitlines() or [""])[0]
        return made

    def __str__(self) -> str:
        return f"{self[:]}: {self.message}"


def _told(how: str, names: list[object]) -> str:
    first = ", ".join(map(repr, names[:_FEW]))
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return how.format(first + more) if names else ""


def narrowed(got: object, want: object, what: str) -> tuple[object, object, str]:
    """The first part of a dict or a list that differs, however deep; or the names, if these do."""
    if isinstance(got, dict) and isinstance(want, dict):
        there = itertools.takewhile(got.__contains__, want)  # what differs before a name is missing
        first = next((key for key in there if not same(got[key], want[key])), None)
        if got.keys() != want.keys() and first is None:
            lacks = _told("without {}", [name for name in want if name not in got])
            has = _told("with {} besides", [name for name in got if name not in want])
            asked = f"with its {len(want)} names"
            if len(want) <= _FEW:
                asked = _told("with {}", [*want]) or "empty"
            return Names("; ".join(filter(None, [lacks, has]))), Names(asked), what
        return narrowed(got[first], want[first], f"{first} of {what}" if what else str(first))
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        number = next(n for n, value in enumerate(want) if not same(got[n], value))
        if isinstance(want[number], (torch.Tensor, dict)):
            return narrowed(got[number], want[number], f"number {number} of {what}")
    elif isinstance(got, list) and isinstance(want, list) and _has_tensors(got, want):
        return len(got), len(want), f"number of {what}"
    return got, want, what


def _has_tensors(*lists: list[object]) -> bool:
    return any(isinstance(value, torch.Tensor) for values in lists for value in values)


def whence(got: object, want: object, before: object = None) -> str | None:
    """What is certain of the first part of a dict that differs, whatever the answer has done.

    It is left out where all else is right, has stayed as it was `before`, or is what another part
    should be, or is right in another dtype.
    """
    if not isinstance(got, dict) or not isinstance(want, dict):
        return None
    if not any(isinstance(value, torch.Tensor) for value in want.values()):
        return None
    there = [key for key in want if key in got]
    key = next((key for key in there if not same(got[key], want[key])), None)
    if len(there) < min(len(got), len(want)):
        return "names are missing, and others are there: these are changed, or paired with others"
    if key is None and len(got) == len(there) < len(want):
        return "all else is there, and right: these are left out"
    known = before if isinstance(before, dict) else {}
    if len(there) == len(want) < len(got):
        stayed = all(name in known for name in got if name not in want)
        return "what was there before has stayed" if stayed else None
    if got.keys() != want.keys():
        return None
    mine, true = got.get(key), want.get(key)
    if key in known and same(mine, known[key]):
        return "it is as it was before the call: nothing has been put there"
    if not isinstance(mine, torch.Tensor) or not isinstance(true, torch.Tensor):
        return None
    if mine.dtype != true.dtype and same(mine, true.to(mine.dtype)):
        return f"these are the right values, cast to {mine.dtype}"
    if not bool((mine != mine.flatten()[:1]).any()):  # one number, zeros: as many others are
        return None
    others = (name for name, value in want.items() if name != key and same(mine, value))
    return next((f"it is that of {other}" for other in others), None)
