"""Checks that explain themselves: what was expected, what came, and the likely cause.

A spec calls these instead of a bare assert, so that one failure reads the same under plain pytest
and on the verdict's screen. Words are the candidate's: names from the docstring of the kata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from kit.memory.ruler import human


class SpecFailure(AssertionError):
    """An answer does not do what a spec asks."""

    def __init__(self, expected: str, got: str, cause: str) -> None:
        self.expected, self.got, self.cause = expected, got, cause
        super().__init__(f"\n  expected  {expected}\n  got       {got}\n  cause     {cause}")

    def __reduce__(self) -> tuple[type[SpecFailure], tuple[str, str, str]]:
        return SpecFailure, (self.expected, self.got, self.cause)  # pickle has one argument only


@dataclass(frozen=True)
class Bar:
    """A memory bar: what was measured, in bytes, and the limit that it was held to."""

    title: str
    yours: int
    limit: int
    plain: int | None
    reference: int | None
    formula: str


# Bars of the spec that runs now; the test session takes them out after each spec.
bars: list[Bar] = []


def fail(*, expected: str, got: object, cause: str) -> NoReturn:
    """End the spec: the answer is wrong."""
    __tracebackhide__ = True
    raise SpecFailure(expected, str(got), cause)


def check(ok: bool, *, expected: str, got: object, cause: str) -> None:
    """Fail unless `ok`."""
    __tracebackhide__ = True
    if not ok:
        fail(expected=expected, got=got, cause=cause)


def check_equal(got: object, want: object, what: str, *, cause: str) -> None:
    """Fail unless both are equal: tensors to the bit and in dtype, anything else by ==."""
    __tracebackhide__ = True
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.dtype == want.dtype and torch.equal(got, want):
            return
        fail(expected=f"{what} = {show(want)}", got=_difference(got, want), cause=cause)
    check(
        type(got) is type(want) and got == want, expected=f"{what} = {want}", got=got, cause=cause
    )


def check_close(
    got: torch.Tensor | float,
    want: torch.Tensor | float,
    what: str,
    *,
    cause: str,
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> None:
    """Fail unless |got - want| <= atol + rtol * |want| everywhere; the default suits float32."""
    __tracebackhide__ = True
    mine, true = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    if mine.shape != true.shape:
        fail(expected=f"{what} of shape {tuple(true.shape)}", got=tuple(mine.shape), cause=cause)
    if not torch.allclose(mine.double(), true.double(), rtol=rtol, atol=atol):
        near = f"{100 * rtol:.2g} %" if rtol else f"{atol:g}"
        expected = f"{what} = {show(true)}, within {near}"
        fail(expected=expected, got=_difference(mine, true), cause=cause)


def check_raises(
    call: Callable[[], object],
    errors: type[Exception] | tuple[type[Exception], ...],
    *,
    mentions: Sequence[object] = (),
    when: str,
) -> None:
    """Fail unless `call` raises one of `errors` and the message holds every text in `mentions`."""
    __tracebackhide__ = True
    kinds = errors if isinstance(errors, tuple) else (errors,)
    name = " or ".join(kind.__name__ for kind in kinds)
    shown = " and ".join(repr(str(text)) for text in mentions)
    expected = f"{name}{f' whose message holds {shown}' if shown else ''}, {when}"
    try:
        call()
    except NotImplementedError:
        raise
    except Exception as error:
        if not isinstance(error, kinds):
            fail(
                expected=expected,
                got=f"{type(error).__name__}: {_first_line(error)}",
                cause="the input is not checked before it is used",
            )
        if not all(str(text) in str(error) for text in mentions):
            fail(
                expected=expected,
                got=f"{type(error).__name__}: {_first_line(error)}",
                cause="the message does not say which value was wrong",
            )
        return
    fail(expected=expected, got="no error", cause="this input is not checked")


def check_bar(
    title: str,
    yours: int,
    limit: float,
    *,
    formula: str,
    cause: str,
    plain: int | None = None,
    reference: int | None = None,
) -> None:
    """Fail if `yours` is over `limit`; either way the bar is shown. All numbers are bytes."""
    __tracebackhide__ = True
    bars.append(Bar(title, int(yours), int(limit), plain, reference, formula))
    check(
        yours <= limit,
        expected=f"{title} of at most {human(int(limit))} ({formula})",
        got=human(int(yours)),
        cause=cause,
    )


def show(value: torch.Tensor) -> str:
    """A tensor in a few words: a number, or its first values, with shape and dtype."""
    kind = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return f"{value.item():.6g} ({kind})"
    first = ", ".join(f"{number:.4g}" for number in value.detach().flatten()[:4].tolist())
    more = ", ..." if value.numel() > 4 else ""
    return f"[{first}{more}] ({kind}, shape {tuple(value.shape)})"


def _difference(got: torch.Tensor, want: torch.Tensor) -> str:
    if got.shape != want.shape or got.dtype != want.dtype or got.dim() == 0:
        return show(got)
    worst = (got.double() - want.double()).abs().max().item()
    return f"{show(got)}, off by up to {worst:.3g}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
