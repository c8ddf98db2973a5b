"""Which function is at fault where one uses another: the reference's is put in its place.

A wrong `train_step` makes the specs of `train` fail. Where a spec holds as soon as the answer has
the reference's `train_step`, that is the function to mend.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from kit.answers.contract import functions
from kit.answers.edits import used
from kit.answers.loading import Answer, materialise
from kit.answers.marks import clause_of
from kit.answers.reset_torch import reset_torch
from kit.laws import checks, untouched
from kit.laws.checks import SpecFailure
from kit.laws.suspects import of_function

# Names that no answer has, for everything else in the file is the answer's own.
_SWAPPED = """\
exec(compile(open({answer!r}, encoding="utf-8").read(), {answer!r}, "exec"))
import pathlib as pathlib_of_blame, kit.answers.loading as loading_of_blame
{function} = loading_of_blame.load(pathlib_of_blame.Path({reference!r})).{function}
"""


def blamed(
    item: pytest.Function, answer: Answer, error: Exception, load: Callable[[Answer], ModuleType]
) -> BaseException | None:
    """What to say instead of an error where another function than the spec's own is at fault.

    An error that has come through that function says so itself.
    """
    function, mine = clause_of(item)[0].partition(".")[0], item.funcargs["answer"]
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    passed = {code.co_name for code in frames if code.co_filename == str(answer.path)}
    is_known = isinstance(error, SpecFailure) and error.sure
    called = set() if is_known else {*untouched.called}
    with contextlib.suppress(Exception):  # what was found before counts, whatever the file is like
        for other in _others(answer, function, called):
            if other in passed and not isinstance(error, SpecFailure):
                continue
            paths = {"answer": str(answer.path), "reference": str(answer.kata.solution)}
            text = _SWAPPED.format(**paths, function=other)
            # One path for each answer: several may be judged in one run, and a path is loaded once.
            label = f"{zlib.crc32(bytes(answer.path)):08x} with the reference's {other}"
            path = materialise(answer.kata, label, text)
            if _failure(item, load(Answer(answer.kata, "file", path))) is None:
                cause = f"{other}: with the reference's in its place, {function} passes this spec"
                if not isinstance(error, SpecFailure):
                    return checks.with_cause(error, cause)
                if error.sure:
                    return error.but(at=other)
                with of_function(other):  # what it does wrong may be known
                    again = _failure(item, mine) if isinstance(mine, ModuleType) else None
                if isinstance(again, SpecFailure) and again.sure:
                    return again.but(at=other)
                return error.but(cause=cause, sure=True, at=other)
    return None


def _failure(item: pytest.Function, answer: ModuleType) -> BaseException | None:
    """What a spec raises, run once more with an answer; nothing is shown of it."""
    reset_torch()
    bars = [*checks.bars]
    names = item._fixtureinfo.argnames
    arguments = {name: item.funcargs[name] for name in names} | {"answer": answer}
    try:
        with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "breakpointhook", lambda *_, **__: None)
            item.obj(**arguments)
    except BaseException as failure:
        if type(failure) is KeyboardInterrupt:  # and none that a scenario raises
            raise
        return failure
    finally:
        checks.bars[:] = bars
    return None


def _others(answer: Answer, function: str, called: set[str]) -> Iterator[str]:
    """What a function uses of the contract, or the spec, if it is not just as in the reference."""
    text, reference = (
        path.read_text(encoding="utf-8") for path in (answer.path, answer.kata.solution)
    )
    public = frozenset(name for name in functions(answer.kata.solution) if "." not in name)
    mine, theirs = _definitions(text), _definitions(reference)
    for name in sorted((used(text, function, public) | called) & public - {function}):
        if name in mine and ast.dump(mine[name]) != ast.dump(theirs[name]):
            yield name


def _definitions(text: str) -> dict[str, ast.stmt]:
    return {getattr(node, "name", ""): node for node in ast.parse(text).body}
