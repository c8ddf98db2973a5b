"""Which wrong rule a function of whole numbers follows: the one that gives all that it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Rule = Callable[..., bool]  # of the arguments, and then of what the answer gives


def followed(call: Callable[..., Any], arguments: Iterable[Any], rules: Mapping[str, Rule]) -> str:
    """The first rule that fits what `call` gives for every one of the arguments, or nothing."""
    try:
        given = [(*args, call(*args)) for args in arguments]
        return next((name for name, fits in rules.items() if all(fits(*g) for g in given)), "")
    except Exception:  # or gives what is no number
        return ""


def least(cost: Callable[[int, int], float]) -> Rule:
    """It is a k from 1 to n of which the cost is least."""
    return lambda n, k: 1 <= k <= n and cost(n, k) == min(cost(n, j) for j in range(1, n + 1))


def _up(n: int, k: int) -> int:
    return math.ceil(n / k)


# What is taken for the k that makes ceil(n / k) + k least.
ROOTS: dict[str, Rule] = {
    "the division is rounded down, not up": least(lambda n, k: n // k + k),
    "the division is rounded to the nearest number, not up": least(lambda n, k: round(n / k) + k),
    "only numbers that divide the number of layers are tried": least(
        lambda n, k: math.inf if n % k else n // k + k
    ),
    # One and the same number, for every n.
    "the search stops where the next number is not better, or it counts itself twice": least(
        lambda n, k: _up(n, k) + 2 * k
    ),
    "the larger of both counts twice, or a number itself half": least(
        lambda n, k: _up(n, k) + k / 2
    ),
    "the root of the number of layers, and what is above it, is not tried": lambda n, k: (
        _up(n, k) + k == min(_up(n, j) + j for j in range(1, max(2, math.isqrt(n))))
    ),
    "it is the logarithm of the number of layers, not the root": lambda n, k: (
        abs(k - math.log2(n)) <= 1
    ),
    "it is the root of twice the number of layers": lambda n, k: abs(k - math.sqrt(2 * n)) <= 1,
}


def root_followed(call: Callable[[int], Any]) -> str:
    """The wrong rule by which `call` finds the k."""
    return followed(call, [(n,) for n in range(1, 101)], ROOTS)
