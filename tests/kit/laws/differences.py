"""What differs between what came and what was expected, in words: the kit's own, for every spec."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kit.laws.trace import Described

# Factors that are told as "1/3" or "64"; others are told as a number.
_LARGEST_DIVISOR = 64


def show(value: Tensor) -> str:
    """A tensor in a few words: a number, or its first values, with shape and dtype."""
    kind = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return f"{value.item():.6g} ({kind})"
    first = ", ".join(f"{number:.4g}" for number in value.detach().flatten()[:4].tolist())
    more = ", ..." if value.numel() > 4 else ""
    return f"[{first}{more}] ({kind}, shape {tuple(value.shape)})"


def beside(one: Tensor, other: Tensor) -> bool:
    """Whether both are on one device; a number can be used beside tensors of any."""
    return one.dim() == other.dim() == 0 or one.device == other.device


def differences(got: object, want: object) -> str:
    """`got` in a few words, and how it differs from `want`: NaN, zero, a multiple, or where."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return show(got) if isinstance(got, Tensor) else str(got)
    if not beside(got, want):
        return f"a tensor on {got.device}, not on {want.device}"
    got = got.to(want.device)
    if got.shape != want.shape or got.dtype != want.dtype:
        return show(got)
    words = _kind(got, want)
    return f"{show(got)}: {words}" if words else show(got)


# Where two sums differ by less than this, somebody has rounded.
_ROUNDED = 1e-5

# What 16 bits can tell apart.
_DIGITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# The root of the largest float32.
_ROOT = 1.8e19


def certain(got: object, want: object, what: str = "") -> str | None:
    """What is certain of a difference, whatever the answer does; `what` differs, in words."""
    if what == "outcome" and "this scenario" in str(want) and got != want:  # a planted error
        if got == "returns":
            return "the error is swallowed"
        return "the error is caught, and another one is raised"
    if what == "outcome" and want == "ValueError" and "this scenario" in str(got):
        return "it is refused too late, or not at all: the call went on until that error"
    if what == "outcome" and (got, want) == ("returns", "ValueError"):
        return "it is not refused: nothing checks it, or a check lets it through"
    if got is None and isinstance(want, Tensor) and what.startswith("gradient"):
        if want.is_complex():
            return "it gets no gradient: detached, or left out because is_floating_point() is False"
        return "it gets no gradient: something on the way is detached, or has no graph"
    if isinstance(got, Tensor) and want is None and what.startswith("gradient"):
        if not bool(got.any()):
            return "the gradient is zeros, but should be None"
        return "there is a gradient, but it should be None"
    if what.startswith("kept gradients") and (got is None) != (want is None):
        return "it was cleared, but should have been kept" if got is None else "it was not cleared"
    if isinstance(got, Described) and isinstance(want, Described):
        (*_, graph, held), (*_, no_graph, not_held) = got.kind, want.kind
        belief = certain(got.value, want.value)
        if graph and not no_graph and (belief or torch.equal(got.value, want.value)):
            return "the number is right, but still has its graph: detach it"
        if belief or not torch.equal(got.value, want.value):
            return belief
        if held and not not_held:
            return f"the number is right, but a view that keeps {held} bytes alive: copy it"
        return None
    if isinstance(got, float) and isinstance(want, Tensor) and want.numel() == 1:
        is_right = math.isclose(got, want.item(), rel_tol=_ROUNDED)
        return "the number is right, but is a Python float and no tensor" if is_right else None
    if not isinstance(got, Tensor) or not isinstance(want, Tensor) or not beside(got, want):
        return None
    if got.numel() != want.numel() or got.is_complex() or want.is_complex() or not got.numel():
        return None
    mine, true = got.detach().flatten().double(), want.detach().flatten().double()
    if what.startswith("gradient") and bool(mine.isnan().all() & ~true.isnan().any()):
        return (
            "one NaN spread to every number: by a common factor, such as inf / inf when clipping"
            " to an infinite norm, or through the model"
        )
    if bool(mine.isinf().any() & true.isfinite().all() & (true.abs().max() > _ROOT)):
        return "it overflows: in 16 bits, or as the square of a number above 1e19 in float32"
    if not bool(true.isfinite().all()):
        return None  # no sum says how far off it is
    off = (mine - true.to(mine.device)).norm()
    digits = _ROUNDED if got.dtype == want.dtype else _DIGITS.get(got.dtype, _ROUNDED)
    if not bool(off <= digits * true.norm()) or not bool(true.any()):
        dtype = _rounded_to(mine, true.to(mine.device))
        return f"it is computed in {dtype}, or rounded to it" if dtype else None
    if got.dtype != want.dtype:
        kinds = [str(t.dtype).removeprefix("torch.") for t in (got, want)]
        return f"these are the right values in {kinds[0]}; they belong in {kinds[1]}"
    if got.shape != want.shape:
        return f"the numbers are right, in the shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not bool(off):
        return None
    if got.dtype == torch.float64:
        if not torch.allclose(mine, true.to(mine.device), rtol=_ROUNDED, atol=0):
            return None
        return "the numbers are right to about 7 digits: something is computed in float32"
    return "the numbers differ in the last digits only, as after a sum in another order"


def _kind(got: Tensor, want: Tensor) -> str:
    mine, true = got.detach().flatten(), want.detach().flatten()
    if mine.numel() == 0:
        return ""
    if mine.is_complex() or not mine.dtype.is_floating_point:
        return _first(mine, true, got.shape)
    mine, true = mine.double(), true.double()
    if bool(true.isfinite().all()):
        if bool(mine.isnan().any()):
            return f"NaN{_at(mine.isnan(), got.shape)}"
        if bool(mine.isinf().any()):
            return f"infinite{_at(mine.isinf(), got.shape)}"
        if bool((mine == 0).all()):
            return "zero" if got.dim() == 0 else "zero everywhere"
        if dtype := _rounded_to(mine, true):
            return f"what is expected, rounded to {dtype}"
        factor = multiple(mine, true)
        if factor:
            return f"{factor} x what is expected" + (", everywhere" if got.dim() else "")
    return _first(mine, true, got.shape)


def _rounded_to(got: Tensor, want: Tensor) -> str:
    """The 16-bit dtype to which all numbers are rounded; or nothing."""
    for dtype in (torch.bfloat16, torch.float16):
        rounded = want.to(dtype).double()
        if bool((want != rounded).all() & (got == rounded).all()):
            return str(dtype).removeprefix("torch.")
    return ""


def multiple(got: Tensor, want: Tensor) -> str:
    """The one factor between both, as a whole number or a fraction if it is one; or nothing."""
    there = want.abs() > 1e-12 * want.abs().max()
    if not bool(there.any()) or not bool((got[~there] == 0).all()):
        return ""
    factors = got[there] / want[there]
    factor = factors.median().item()
    if abs(factor - 1) < 1e-3 or not bool(((factors / factor - 1).abs() < 1e-3).all()):
        return ""
    if not 1e-6 < abs(factor) < 1e12:  # whatever was in memory
        return ""
    near = Fraction(factor).limit_denominator(_LARGEST_DIVISOR)
    if (
        near
        and abs(float(near) / factor - 1) < 1e-3
        and 1 in (abs(near.numerator), near.denominator)
    ):
        return str(near)
    # Of one number alone every ratio is a factor: only a plain one says something.
    return f"{factor:.4g}" if factors.numel() > 1 else ""


def _first(mine: Tensor, true: Tensor, shape: torch.Size) -> str:
    if len(shape) == 0:
        return ""
    other = (mine != true) & ~(mine.isnan() & true.isnan())
    if not bool(other.any()):
        return ""
    if mine.dtype.is_floating_point:
        # Where it is far off, not where it is rounded.
        gap = (mine - true).abs().nan_to_num(nan=torch.inf)
        other = gap > 0.5 * gap[gap.isfinite()].max() if bool(gap.isfinite().any()) else other
    index = int(other.nonzero()[0, 0])
    one, two = f"{mine[index].item():.6g}", f"{true[index].item():.6g}"
    if one == two:
        one, two = f"{mine[index].item():.12g}", f"{true[index].item():.12g}"
    return f"{one} for {two}{_at(other, shape)}"


def _at(where: Tensor, shape: torch.Size) -> str:
    if len(shape) == 0:
        return ""
    rest, places = int(where.flatten().nonzero()[0, 0]), []
    for size in reversed(shape):
        places.append(rest % size)
        rest //= size
    count = int(where.sum())
    more = f" and {count - 1} more" if count > 1 else ""
    return f" at {list(reversed(places))}{more}"


def in_another_order(got: object, want: object) -> bool:
    """Whether two lists have the same in them, as told in words, and not one by one."""
    if not isinstance(got, list) or not isinstance(want, list):
        return False
    mine, true = [*map(shown, got)], [*map(shown, want)]
    return mine != true and sorted(mine) == sorted(true)


def shown(value: Any, beside: Any = None) -> str:
    """An observed value, in words; beside another of its kind, what is different."""
    if isinstance(value, Described):
        if isinstance(beside, Described) and value.kind == beside.kind:
            return differences(value.value, beside.value)
        return str(value)
    if isinstance(value, Tensor):
        return differences(value, beside) if isinstance(beside, Tensor) else show(value)
    if isinstance(value, dict):
        return "; ".join(f"{key}: {shown(part)}" for key, part in [*value.items()][:2])
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return "; ".join(value)[:200]
    return str(value)[:200]
