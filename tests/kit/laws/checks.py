"""Checks that explain themselves: what was expected, what came, and the cause.

A spec calls these instead of a bare assert, so that one failure reads the same under plain pytest
and on the verdict's screen. Words are the candidate's: names from the docstring of the kata.

A cause is a guess ("perhaps") unless it was computed: `suspects` maps a belief to what it would
give, and where the answer gave just that, the belief is the cause.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from kit.catalog import ROOT
from kit.laws.differences import certain, differences, show
from kit.laws.equal import Names, narrowed, same, whence
from kit.laws.mentions import in_words, missing
from kit.memory.ruler import human


class SpecFailure(AssertionError):
    """An answer does not do what a spec asks.

    Attributes:
        sure: whether the cause was computed.
        clause: the clause of the contract, where it is another than the spec's own: a law, an
            argument, "Raises", or the number of a detail.
        at: the function at fault, where it is another than the spec's own.
        scenario: where it is seen, and in how many others.
        home: the spec that must catch the mistake that is the cause, where there is one.
    """

    def __init__(
        self,
        expected: str,
        got: str,
        cause: str,
        sure: bool = False,
        clause: str | int = "",
        at: str = "",
        scenario: str = "",
        home: str = "",
    ) -> None:
        self.expected, self.got, self.cause, self.home = expected, got, cause, home
        self.sure, self.clause, self.at, self.scenario = sure, clause, at, scenario
        label = "cause  " if sure else "perhaps"
        where = f"\n  scenario  {scenario}" if scenario else ""
        super().__init__(f"\n  expected  {expected}\n  got       {got}{where}\n  {label}   {cause}")

    def _parts(self) -> dict[str, Any]:
        names = ("expected", "got", "cause", "sure", "clause", "at", "scenario", "home")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[type[SpecFailure], tuple[Any, ...]]:
        # pickle would have one argument only
        return SpecFailure, (*self._parts().values(),)

    def but(self, **changes: Any) -> SpecFailure:
        """The same at the same place, with something changed."""
        told = SpecFailure(**self._parts() | changes).with_traceback(self.__traceback__)
        told.__cause__ = self.__cause__  # has the answer's own line
        return told


def in_scenario(error: BaseException, scenario: str, *others: str, tried: int = 0) -> BaseException:
    """The error, to be raised again, with the scenario in which it came, and three more of them.

    Args:
        others: scenarios in which it came too.
        tried: in how many it could have come; 0 where nobody knows.
    """
    if others:
        of_all = f" of {tried}" if tried else ""
        scenario += f" (and {len(others)} more{of_all}: {'; '.join(others[:3])})"
    elif tried > 1:
        scenario += f" (1 of {tried} scenarios fails)"
    if isinstance(error, SpecFailure):
        return error.but(scenario=scenario)
    return _with_note(error, _SCENARIO, scenario)


def with_cause(error: BaseException, cause: str) -> BaseException:
    """The error, to be raised again, with its cause in words."""
    return _with_note(error, _CAUSE, cause)


def _with_note(error: BaseException, kind: str, text: str) -> BaseException:
    vars(error)["__notes__"] = [*getattr(error, "__notes__", []), f"{kind}{text}"]
    return error


class Notes(NamedTuple):
    """What was added to an error: the scenario in which it came, its cause, and the rest."""

    scenario: str
    cause: str
    others: list[str]


def notes_of(error: BaseException) -> Notes:
    """What was added to an error on its way."""
    notes = getattr(error, "__notes__", [])
    scenario, cause = (
        next((n.removeprefix(kind) for n in notes if n.startswith(kind)), "")
        for kind in (_SCENARIO, _CAUSE)
    )
    return Notes(scenario, cause, [n for n in notes if not n.startswith((_SCENARIO, _CAUSE))])


@dataclass(frozen=True)
class Bar:
    """A memory bar: what was measured, in bytes, and the limit that it was held to."""

    title: str
    yours: int
    limit: int
    plain: int | None
    reference: int | None
    formula: str


_SCENARIO = "in the scenario: "
_CAUSE = "because: "

# Laws of the module: what every function leaves alone, and what an error says and leaves behind.
UNTOUCHED, ERRORS = "untouched", "errors"

# Bars of the spec that runs now; the test session takes them out after each spec.
bars: list[Bar] = []

Suspects = Mapping[str, object]


def fail(
    *, expected: str, got: object, cause: str, sure: bool = False, clause: str = ""
) -> NoReturn:
    """End the spec: the answer is wrong."""
    __tracebackhide__ = True
    raise SpecFailure(expected, str(got), cause, sure, clause)


def check(ok: bool, *, expected: str, got: object, cause: str, clause: str = "") -> None:
    """Fail unless `ok`."""
    __tracebackhide__ = True
    if not ok:
        fail(expected=expected, got=got, cause=cause, clause=clause)


def check_equal(
    got: object,
    want: object,
    what: str,
    *,
    cause: str,
    suspects: Suspects | None = None,
    before: object = None,
    clause: str = "",
) -> None:
    """Fail unless both are equal: tensors to the bit and in dtype, anything else by ==.

    Of dicts and lists of these the first part that differs is shown. `before`: what was there
    before the call, so that what has stayed is told.
    """
    __tracebackhide__ = True
    if same(got, want):
        return
    belief = next((b for b, value in (suspects or {}).items() if same(got, value)), None)
    belief = belief or whence(got, want, before)
    got, want, what = narrowed(got, want, what)
    belief = belief or certain(got, want, what)
    shown = show(want) if isinstance(want, torch.Tensor) else want
    fail(
        expected=f"{what} {want}" if isinstance(want, Names) else f"{what} = {shown}",
        got=differences(got, want),
        cause=belief or cause,
        sure=belief is not None,
        clause=clause,
    )


def check_close(
    got: torch.Tensor | float,
    want: torch.Tensor | float,
    what: str,
    *,
    cause: str,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    suspects: Suspects | None = None,
) -> None:
    """Fail unless |got - want| <= atol + rtol * |want| everywhere; the default suits float32."""
    __tracebackhide__ = True
    mine, true = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    if _close(mine, true, rtol, atol):
        return
    values = {b: torch.as_tensor(value) for b, value in (suspects or {}).items()}
    # Of several that fit by chance the nearest.
    off = {
        b: float((mine.double() - value.double()).abs().max()) if mine.numel() else 0.0
        for b, value in values.items()
        if _close(mine, value, rtol, atol)
    }
    belief = min(off, key=off.__getitem__, default=None)
    near = f"{100 * rtol:.2g} %" if rtol else f"{atol:g}"
    expected = f"{what} = {show(true)}, within {near}"
    if mine.shape != true.shape:
        expected = f"{what} of shape {tuple(true.shape)}"
    fail(
        expected=expected,
        got=differences(mine, true),
        cause=belief or cause,
        sure=belief is not None,
    )


def _close(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=rtol, atol=atol)


def check_raises(
    call: Callable[[], object],
    errors: type[Exception] | tuple[type[Exception], ...],
    *,
    mentions: Sequence[object] = (),
    when: str,
    cause: str = "no check refuses this input",
) -> None:
    """Fail unless `call` raises one of `errors` and the message holds every text in `mentions`.

    Args:
        mentions: texts; of a tuple of texts one is enough.
        cause: why it may raise nothing.
    """
    __tracebackhide__ = True
    kinds = errors if isinstance(errors, tuple) else (errors,)
    name = " or ".join(kind.__name__ for kind in kinds)
    named = f" whose message holds {in_words(mentions)}" if mentions else ""
    expected = f"{name}{named}, {when}"
    stream = torch.get_rng_state()
    try:
        call()
    except (NotImplementedError, SpecFailure):
        raise
    except Exception as error:
        if not isinstance(error, kinds):
            fail(
                expected=expected,
                got=f"{type(error).__name__}: {_first_line(error)}",
                cause=_why_another(error, name),
                clause=ERRORS if kinds == (ValueError,) else "Raises",
            )
        if lacks := missing(error, mentions):
            on_purpose = is_raised_on_purpose(error)
            fail(
                expected=expected,
                got=f"{type(error).__name__}: {_first_line(error)}",
                cause=f"the message does not say {in_words(lacks)}"
                if on_purpose
                else "nothing checks it: it is used, and that fails",
                sure=on_purpose,
                clause=ERRORS,
            )
        if not torch.equal(stream, torch.get_rng_state()):
            fail(
                expected=f"{expected}, and torch's random stream where it was",
                got="the stream has moved",
                cause="it begins before everything is checked: it draws, or loads a state",
                clause=ERRORS,
            )
        return
    fail(expected=expected, got="no error", cause=cause)


def check_bar(
    title: str,
    yours: int,
    limit: float,
    *,
    formula: str,
    cause: str,
    plain: int | None = None,
    reference: int | None = None,
    suspects: Suspects | None = None,
) -> None:
    """Fail if `yours` is over `limit`; either way the bar is shown. All numbers are bytes.

    A suspect may be a function that measures; it runs only after a failure.
    """
    __tracebackhide__ = True
    bars.append(Bar(title, int(yours), int(limit), plain, reference, formula))
    if yours <= limit:
        return
    given = {b: v() if callable(v) else v for b, v in (suspects or {}).items()}
    belief = next((b for b, value in given.items() if yours == value), None)
    fail(
        expected=f"{title} of at most {human(int(limit))} ({formula})",
        got=human(int(yours)),
        cause=belief or cause,
        sure=belief is not None,
    )


def is_raised_on_purpose(error: BaseException) -> bool:
    """Whether the innermost line is a `raise`; where native code has raised it is not."""
    return _last_line(error).startswith("raise")


def _why_another(error: BaseException, wanted: str) -> str:
    if _last_line(error).startswith("assert"):
        return "an assert checks it: it raises AssertionError, and python -O leaves it out"
    others = (torch.__path__[0], str(ROOT / "tests"))
    if is_raised_on_purpose(error) and not _last_place(error)[0].startswith(others):
        return f"it is refused, and the error is no {wanted}"
    return "no check refuses this input before it is used"


def _last_line(error: BaseException) -> str:
    return linecache.getline(*_last_place(error)).strip()


def _last_place(error: BaseException) -> tuple[str, int]:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename, line


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
