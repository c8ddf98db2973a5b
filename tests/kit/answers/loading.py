"""An answer is one Python module: the candidate's, the reference, another right one, a wrong one.

`sources` lists the answers that a selection names, `load` imports one afresh. A wrong answer is an
edit of the reference solution, or a whole text; either way it becomes a file, so that a traceback
into it shows its lines.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from kit.answers.stubs import make_stub
from kit.catalog import ROOT, Kata, kata_of

KINDS = ("katas", "solutions", "right", "stubs", "wrong")


@dataclass(frozen=True)
class Wrong:
    """A mistake that a spec must catch.

    Attributes:
        name: a few words with underscores, unique in the kata.
        belief: the misconception in one sentence.
        caught_by: the spec that must fail: a function name, or name[id] for one of its cases.
        says: words of the failure message, so that it is caught for this reason and no other.
        edits: (find, put) pairs applied to the reference; each `find` occurs exactly once.
        text: the whole module, where the mistake is of another shape than the reference.
        raises: the error that the answer itself raises, where the failure is not a spec's check.
    """

    name: str
    belief: str
    caught_by: str
    says: str
    edits: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    raises: type[Exception] | None = None

    def source(self, reference: str) -> str:
        """The module's text; ValueError if an edit no longer applies."""
        if (self.text is None) == (not self.edits):
            raise ValueError(f"wrong answer {self.name}: give either edits or a text")
        if self.text is not None:
            return self.text
        for find, put in self.edits:
            found = reference.count(find)
            if found != 1:
                raise ValueError(
                    f"wrong answer {self.name}: the edit {find!r} fits the reference "
                    f"{found} times, not once; bring it in step with solutions/"
                )
            reference = reference.replace(find, put)
        return reference


@dataclass(frozen=True)
class Answer:
    """One module to judge; `kind` is one of KINDS, or "file" for a path."""

    kata: Kata
    kind: str
    path: Path
    wrong: Wrong | None = None

    def __str__(self) -> str:
        if self.wrong:
            return f"wrong/{self.wrong.name}"
        return f"right/{self.path.stem}" if self.kind == "right" else self.kind


def sources(kata: Kata, selection: str) -> list[Answer]:
    """The answers to one kata that a comma-separated selection names.

    Each part is one of KINDS or the path of a file; a path whose name is that of another kata is
    not an answer to this one. ValueError names a part that is neither.
    """
    found: list[Answer] = []
    for part in filter(None, (part.strip() for part in selection.split(","))):
        if part == "katas":
            found.append(Answer(kata, "katas", kata.stub))
        elif part == "solutions":
            found.append(Answer(kata, "solutions", kata.solution))
        elif part == "stubs":
            text = make_stub(kata.solution.read_text(encoding="utf-8"))
            found.append(Answer(kata, "stubs", _materialise(kata, "stub", text)))
        elif part == "right":
            folder = ROOT / "tests" / "right" / kata.name
            found += [Answer(kata, "right", path) for path in sorted(folder.glob("*.py"))]
        elif part == "wrong":
            reference = kata.solution.read_text(encoding="utf-8")
            found += [
                Answer(
                    kata, "wrong", _materialise(kata, wrong.name, wrong.source(reference)), wrong
                )
                for wrong in wrong_answers(kata)
            ]
        elif Path(part).is_file():
            if kata_of(Path(part)) in (None, kata):
                found.append(Answer(kata, "file", Path(part).resolve()))
        else:
            raise ValueError(f"no answers {part!r}: give one of {', '.join(KINDS)}, or a file")
    return found


@cache
def wrong_answers(kata: Kata) -> tuple[Wrong, ...]:
    """The mistakes listed in tests/wrong for one kata."""
    path = ROOT / "tests" / "wrong" / f"{kata.name}.py"
    return tuple(_import(path, f"wrong_answers_{kata.name}").WRONG)


_loaded = itertools.count()


def load(path: Path) -> ModuleType:
    """Import a file as a new module, whatever was imported before; its own errors come through."""
    module = _import(path, f"{path.stem}_answer_{next(_loaded)}")
    if not hasattr(module, "__getattr__"):
        vars(module)["__getattr__"] = _Missing(path)
    return module


class MissingName(AttributeError):
    """The answer does not define a name that its kata asks for."""


class _Missing:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingName(f"{self.path.name} does not define {name}")


def _import(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="memory-katas-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _materialise(kata: Kata, label: str, text: str) -> Path:
    path = _scratch() / label / f"{kata.name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def caught(wrongs: Iterable[Wrong]) -> set[str]:
    """The specs that these wrong answers name, without the ids of their cases."""
    return {wrong.caught_by.split("[")[0] for wrong in wrongs}


@cache
def load_once(path: Path) -> ModuleType:
    """Import a file that does not change, such as a mistake of the catalogue, once."""
    return load(path)
