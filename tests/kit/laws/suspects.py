"""The mistakes of the catalogue as answers: what behaves just as one of them has its cause."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kit.answers.catalogue import Entry, catalogue
from kit.answers.contract import functions
from kit.answers.edits import load_edited, used
from kit.answers.loading import edited, load
from kit.catalog import find_kata
from kit.laws.checks import SpecFailure, with_cause

_passed: dict[str, set[str]] = {}  # the specs that an answer has passed, by its file
_blamed: list[str] = []  # the function that is at fault, where it is another than the spec's own


@dataclass(frozen=True)
class Suspect:
    """A mistake that may be the cause of a failure."""

    entry: Entry
    reference: Path

    @property
    def belief(self) -> str:
        """What it does and the belief behind it, in words."""
        # The belief may sound right, so it must not read as what the judge believes.
        return f'{self.entry.heading}. Perhaps you thought: "{self.entry.belief}"'

    def load(self, *, as_file: bool = False) -> ModuleType | None:
        """A new module, since an answer may remember what was done with it; ranks need a file.

        None if it cannot be imported: the proof complains of that, not a verdict.
        """
        try:
            if as_file:
                return load(edited(find_kata(self.reference.stem), "mistakes", self.entry))
            return load_edited(self.reference, self.entry)
        except Exception:
            return None


def note_passed(file: Path, spec: str) -> None:
    """An answer has passed a spec, name[case]: no mistake that it must catch is in there."""
    _passed.setdefault(str(file.resolve()), set()).update((spec, spec.partition("[")[0]))


@contextlib.contextmanager
def of_function(name: str) -> Iterator[None]:
    """Look for the cause in this function."""
    _blamed.append(name)
    try:
        yield
    finally:
        _blamed.pop()


def suspects(kata: str, answer: ModuleType, function: str = "") -> Iterator[list[Suspect]]:
    """The mistakes that the spec under way must catch, and then others in a function.

    It is one of the first more often than not, and then nobody need look at the others. What a spec
    must catch that the answer has passed is left out.
    """
    spec = _current_spec()
    file = Path(getattr(answer, "__file__", None) or "")
    passed = _passed.get(str(file.resolve()), set())
    try:
        reference, entries = find_kata(kata).solution, catalogue(find_kata(kata))[0]
        whole = (_blamed or [function])[-1].partition(".")[0]
        public = frozenset(functions(reference))
        mine = used(reference.read_text(encoding="utf-8"), whole, public) - (public - {whole})
    except (OSError, ValueError):
        return
    open_ones = [entry for entry in entries if entry.caught_by not in passed]
    yield [Suspect(entry, reference) for entry in open_ones if entry.spec == spec]
    yield [
        Suspect(entry, reference)
        for entry in open_ones
        if entry.spec != spec and mine & {hunk.scope.partition(".")[0] for hunk in entry.hunks}
    ]


def explained(
    error: BaseException,
    answer: ModuleType,
    kata: str,
    function: str,
    run: Callable[[ModuleType], object],
) -> BaseException:
    """The error, with its cause if a mistake ends in the same one where `run` calls it.

    Mistakes are tried in the function of the contract that the error has come by last. What an
    answer raises itself says so, and its own line is shown.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    mine = [f.f_code for f in frames if f.f_code.co_filename == getattr(answer, "__file__", None)]
    is_known = isinstance(error, (SpecFailure, NotImplementedError))
    if is_known or not mine or mine[-1] is frames[-1].f_code:
        return error
    public = functions(find_kata(kata).solution)
    names = [code.co_name for code in mine if code.co_name in public]
    wanted = ending(error, answer)
    with of_function(names[-1] if names else function):
        for suspect in itertools.chain.from_iterable(suspects(kata, answer)):
            if _ending_of(run, suspect.load()) == wanted:
                return with_cause(error, suspect.belief)
    return error


def _ending_of(
    run: Callable[[ModuleType], object], mistake: ModuleType | None
) -> tuple[object, ...]:
    try:
        run(mistake) if mistake else None
    except Exception as error:
        return ending(error, mistake)
    return ()


def ending(error: BaseException, answer: ModuleType | None) -> tuple[object, ...]:
    """Its type, file and function of the line that raised it, and its text without addresses.

    One answer's own file is as good as another's.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    is_own = file == getattr(answer, "__file__", None)
    # What a spec has told of one has its scenario, and of the other not yet.
    said = error.got if isinstance(error, SpecFailure) else str(error)
    text = re.sub(r"0x[0-9a-f]+", "", said)
    return type(error), "" if is_own else file, frame.f_code.co_name, text


def _current_spec() -> str:
    """The name of the spec under way."""
    return os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0].partition("[")[0]
