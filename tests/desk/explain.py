"""Turns what a spec raised into expected, got, likely cause, and the line of the candidate's file.

Runs in the judging process, where the exception still has its frames.
"""

from __future__ import annotations

import difflib
import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

from desk import source
from desk.events import TODO_KIND, Problem
from desk.source import Place
from desk.torch_errors import meaning, said
from kit.answers import contract
from kit.catalog import ROOT, shown
from kit.laws.checks import ERRORS, UNTOUCHED, SpecFailure, is_raised_on_purpose, notes_of
from kit.memory.gpu import ends_the_gpu
from kit.private_torch import ENGINE

# "train_step() got an unexpected ...", "Writer.__init__() missing 1 required ...",
# "Counter() takes no arguments": how Python says that a call does not fit.
_MISFIT = re.compile(r"^([A-Za-z_][\w.]*)\(\) (?:got|takes|missing) ")

# What an answer may raise so that pytest takes the spec for something else than failed.
_ENDINGS = ("Skipped", "SkipTest", "XFailed", "Exit", "KeyboardInterrupt")


@dataclass(frozen=True)
class Judged:
    """The file under judgement, the reference beside it, and the function of the spec."""

    path: Path
    reference: Path
    function: str
    limit: float
    importing: bool = False
    clause: contract.Clause = ""
    clauses: Mapping[str, tuple[str, contract.Clause]] = field(default_factory=dict)  # of all specs


def explain(error: BaseException, judged: Judged) -> Problem:
    """What the exception means for the candidate."""
    place = place_in(error, judged.path)
    here = (place or source.find(judged.path, _about(error, judged))).fields()
    if isinstance(error, SpecFailure):
        if error.at or error.clause == UNTOUCHED:  # no line that an error came by has done that
            here = source.find(judged.path, error.at or judged.function).fields()
        here |= {"sure": error.sure, "scenario": error.scenario}
        here |= {"contract": _sentence(error, judged)}
        return Problem("wrong", error.got, error.expected, error.cause, **here)
    here["scenario"] = notes_of(error).scenario
    if _is_timeout(error):
        return _timeout(judged, place, here)
    if ends_the_gpu(error):
        return _end_of_the_gpu(error, here)
    if isinstance(error, SystemExit):
        return _exit(error, judged, here)
    if judged.importing:
        return _import(error, judged, here)
    if is_todo(error, judged.path):
        return Problem(TODO_KIND, "not written yet", "", "", **here)
    missing = _missing_name(error, judged)
    if missing:
        return missing
    if place is None and isinstance(error, TypeError) and (misfit := _misfit(error, judged)):
        return misfit
    if known := notes_of(error).cause:  # a guess: other faults may raise it too
        return Problem("error", said(error), "no error", known, **here)
    if place:
        return _raised(error, judged, here)
    return _unusable(error, judged, here)


def _about(error: BaseException, judged: Judged) -> str:
    """The function of the spec; of a class the method, where the clause has its name."""
    clause = getattr(error, "clause", "") or judged.clause
    is_law = isinstance(clause, str) and "." not in judged.function
    return f"{judged.function}.{clause}" if is_law else judged.function


def _sentence(error: SpecFailure, judged: Judged) -> str:
    """The sentence that the answer breaks, where it is another than that of the spec.

    A mistake that is the cause breaks the sentence of the spec that must catch it. A spec of a
    detail is about that detail, unless what is broken is another one, or holds for every function.
    What another function breaks is not known: its contract begins with what it does.
    """
    if error.home in judged.clauses:
        return contract.sentence(judged.reference, *judged.clauses[error.home])
    if error.at:
        return f"{error.at}: {contract.contract_of(judged.reference, error.at).summary}"
    holds = isinstance(error.clause, int) or error.clause in (UNTOUCHED, ERRORS)
    if not error.clause or (isinstance(judged.clause, int) and not holds):
        return ""
    return contract.sentence(judged.reference, judged.function, error.clause)


def is_todo(error: BaseException, path: Path) -> bool:
    """Whether the candidate's own file says that it is not written; torch has such errors too."""
    frames = _frames(error)
    return isinstance(error, NotImplementedError) and bool(frames) and _is_in(frames[-1][0], path)


def place_in(error: BaseException, path: Path) -> Place | None:
    """The last line of the file that the traceback, or that of its cause, passes through."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        lines = [(frame.f_code, line) for frame, line in _frames(chain) if _is_in(frame, path)]
        if lines:
            code, line = lines[-1]
            return Place(path, line, _function(code))
        chain = chain.__cause__ or chain.__context__
    return None


def last_file(error: BaseException) -> str:
    """The file in which it was raised."""
    return _frames(error)[-1][0].f_code.co_filename


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    return [*walk_tb(error.__traceback__)]


def _is_in(frame: FrameType, path: Path) -> bool:
    return frame.f_code.co_filename == str(path)


def _function(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 and later know the class
    if name == "<module>":
        name = code.co_name  # a frame that came from another process has no more
    return "" if name == "<module>" else name.replace("<locals>.", "")


def _is_timeout(error: BaseException) -> bool:
    return type(error).__name__ == "Failed" and str(error).startswith("Timeout")


def _timeout(judged: Judged, place: Place | None, here: dict[str, Any]) -> Problem:
    what = "the import of the file" if judged.importing else "an answer"
    cause = "a loop without an end, or far too many calls; this line ran when the time was up"
    if place is None:
        cause = "the time went by outside of the file that is judged"
    got = f"time-out: still running after {judged.limit:g} s"
    return Problem("time-out", got, f"{what} within {judged.limit:g} s", cause, **here)


def _end_of_the_gpu(error: BaseException, here: dict[str, Any]) -> Problem:
    cause = (
        "an index or a label is out of range; a GPU says so late, so the line may be a later one."
        " On the CPU the same error says what it is: nox -s kata"
    )
    return Problem("error", said(error).splitlines()[0], "no error", cause, **here)


def _exit(error: SystemExit, judged: Judged, here: dict[str, Any]) -> Problem:
    expected = "an import that returns" if judged.importing else "a call that returns or raises"
    cause = "sys.exit(), exit() or quit() ends the whole program; return, or raise an error"
    return Problem("sys.exit()", f"SystemExit: {error.code}", expected, cause, sure=True, **here)


def _import(error: BaseException, judged: Judged, here: dict[str, Any]) -> Problem:
    if isinstance(error, SyntaxError):
        return source.syntax_problem(error, Path(error.filename or judged.path))
    got = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        expected = "imports of torch and of the standard library only"
        cause = "no such module is installed here"
        return Problem("import error", got, expected, cause, sure=True, **here)
    if isinstance(error, ImportError):
        cause = "the module is there, and the name is not: misspelt, or of another version"
        return Problem("import error", got, "", cause, **here)
    cause = "this line runs when the file is imported, before any function is called"
    return Problem("error at import", got, "a file that can be imported", cause, sure=True, **here)


def _missing_name(error: BaseException, judged: Judged) -> Problem | None:
    """A function or a class that is not in the file, or a method that is not in its class."""
    if type(error).__name__ == "MissingName":
        return _missing(str(error).rpartition(" ")[2], judged)
    if not isinstance(error, AttributeError) or place_in(error, judged.path):
        return None
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    name = f"{owner.__name__}.{error.name}"
    is_asked_for = name in source.definitions(judged.reference)
    return _missing(name, judged) if is_asked_for else None


def _missing(name: str, judged: Judged) -> Problem:
    where = shown(judged.path)
    wanted = source.signature(judged.reference, name) or name
    defined = source.definitions(judged.path)
    near = difflib.get_close_matches(name, defined, n=1)
    here = source.find(judged.path, near[0] if near else name.rpartition(".")[0]).fields()
    return Problem(
        "missing name",
        f"{where} does not define {name}" + (f", but {near[0]}" if near else ""),
        f"{wanted}, as in the stub",
        "renamed, deleted, or indented into something else",
        **here,
    )


def _misfit(error: TypeError, judged: Judged) -> Problem | None:
    """A call that does not fit: a signature that is not the reference's, or a function besides."""
    found = _MISFIT.match(str(error))
    name = found.group(1).removesuffix(".__init__") if found else judged.function
    wanted = source.signature(judged.reference, name)
    mine = source.signature(judged.path, name)
    place = source.find(judged.path, name)
    if mine is None and place.line:
        mine = f"{name}()"  # a class without a constructor
    constructor = source.find(judged.path, f"{name}.__init__")
    place = constructor if constructor.line else place
    if wanted is None and mine is not None:
        cause = f"{name} is called with other arguments than it can take"
        return Problem("error", said(error), "no error", cause, sure=True, **place.fields())
    if wanted is None or mine is None or wanted == mine:
        return None
    cause = f"the signature is not the one of the stub ({error})"
    return Problem("wrong signature", mine, wanted, cause, sure=True, **place.fields())


def _raised(error: BaseException, judged: Judged, here: dict[str, Any]) -> Problem:
    frames = [frame for frame, _ in _frames(error)]
    last = frames[-1]
    if type(error).__name__ == "BdbQuit" or str(error) == "Quitting debugger":
        return _left_debugger(type(error).__name__ == "Exit", here)
    if type(error).__name__ in _ENDINGS:
        cause = "this ends the spec before it has checked anything"
    else:
        where = "your code raised it at this line"
        mine = [_function(f.f_code) for f in frames if _is_in(f, judged.path)]
        if not _is_in(last, judged.path):
            name = f"{last.f_code.co_name} ({Path(last.f_code.co_filename).name})"
            where = f"raised in {name}, which this line has called"
            about = judged.function.partition(".")[0]
            if mine and about not in [name.partition(".")[0] for name in mine]:
                # and may have made what is called here
                where += f" (the spec is about {about})"
        elif judged.function and isinstance(error, ValueError) and is_raised_on_purpose(error):
            where = "your code refuses at this line what the contract allows"
            public = contract.functions(judged.reference)
            about = next((name for name in reversed(mine) if name in public), judged.function)
            here["contract"] = contract.sentence(judged.reference, about, "Raises")
        cause = ": ".join(filter(None, (where, meaning(error))))
    got = said(error)
    return Problem("error", got, "no error", cause, sure=True, **here)


def _left_debugger(by_q: bool, here: dict[str, Any]) -> Problem:
    got = "q at the prompt of breakpoint()"
    cause = "q ends the run; c goes on to the end of the spec"
    if not by_q:
        got = "the end of the input at breakpoint()"
        cause = "it asks at a terminal: there is none in a pipe or in a rank, and Ctrl-D closes it"
    expected = "a spec that runs to its end"
    return Problem("stopped in the debugger", got, expected, cause, sure=True, **here)


def _unusable(error: BaseException, judged: Judged, here: dict[str, Any]) -> Problem:
    frame, _ = _frames(error)[-1]
    if isinstance(error, AssertionError):
        first = next(iter(str(error).splitlines()), "the check does not hold")
        return Problem("wrong", first, "", "", **here)
    got = said(error)
    if frame.f_code.co_filename == ENGINE:
        cause = (
            "what the backward pass finds does not fit: a dtype, a shape, or a graph that is gone"
        )
        if is_without_graph := "does not require grad" in str(error):
            cause = "what your code has returned has no graph: detached, or made under no_grad"
        expected = "no error in the backward pass"
        return Problem("error", got, expected, cause, sure=is_without_graph, **here)
    none = "the spec has met a None, as a missing `return` or gradient leaves one"
    unknown = none if "'NoneType'" in got else "the spec could not use what it was given"
    cause = meaning(error) or unknown
    return Problem(
        "error",
        got,
        f"a call of {judged.function or 'the kata'} and a result that can be used",
        f"{cause}, in {_last_line(error)}",
        sure=True,
        **here,
    )


def _last_line(error: BaseException) -> str:
    """The last line of a spec that ran, and what has raised if that is in a library."""
    frame, line = _frames(error)[-1]
    judges = [(f.f_code.co_filename, n) for f, n in _frames(error) if _is_a_judges(f)]
    file, number = judges[-1] if judges else (frame.f_code.co_filename, line)
    code = linecache.getline(file, number).strip()
    raised = "" if file == frame.f_code.co_filename else f"; raised in {_function(frame.f_code)}"
    return f"`{code}` ({shown(Path(file))}:{number}{raised})"


def _is_a_judges(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(ROOT / "tests")
