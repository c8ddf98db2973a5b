"""Whether two observed values agree: bits where nobody rounds, nearly where sums are formed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.laws.differences import beside
from kit.laws.mentions import missing
from kit.laws.trace import Described, Trace

NEAR = 1e-4  # the oracle computes in the same precision: only the order of sums may differ
_EXACT = 1e-9  # of numbers that nobody rounds


@dataclass(frozen=True)
class Difference:
    scenario: str
    observable: str
    want: Any
    got: Any


def same(one: Any, other: Any, near: float = NEAR) -> bool:
    """Whether two observed values agree: tensors as vectors, nearly; the rest by ==."""
    if isinstance(one, Described) and isinstance(other, Described):
        return one.kind == other.kind and same(one.value, other.value, near)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and beside(one, other)
        return alike and _near(one, other.to(one.device), near)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], near) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(
            same(a, b, near) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_EXACT) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def _near(one: Tensor, other: Tensor, near: float) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return False
    one, other = one.double(), other.double()
    if not finite.all():  # to index millions of numbers takes longer than all else here
        one, other = one[finite], other[finite]
    return bool((one - other).norm() <= near * other.norm() + 1e-12)


def is_named(got: Trace, want: Trace) -> bool:
    """Whether the message of a refusal names what it should."""
    is_refused = want["outcome"] == got["outcome"] == "ValueError"
    return not is_refused or not missing(got["_error"], want["_world"].mentions)


def narrowed(scenario: str, name: str, want: Any, got: Any, near: float) -> Difference:
    """Of a table of tensors, or of as many texts, the first that differs."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in dict.fromkeys([*want, *got]):
            if not same(got.get(key), want.get(key), near):
                return Difference(scenario, f"{name} of {key}", want.get(key), got.get(key))
    if _are_texts(want) and _are_texts(got) and len(want) == len(got) > 1:
        number = next((n for n, text in enumerate(want) if text != got[n]), 0)
        return Difference(scenario, f"{name}, number {number}", want[number], got[number])
    return Difference(scenario, name, want, got)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)
