"""An answer is one Python module: the candidate's, the reference, another right one, a wrong one.

`sources` lists the answers that a selection names, `load` imports one afresh. Mistakes and variants
are edits of the reference (kit.answers.catalogue), and become files, so that a traceback into one
shows its lines.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from kit.answers.catalogue import Entry, catalogue, together
from kit.answers.stubs import make_stub
from kit.catalog import ROOT, Kata, kata_of

KINDS = ("katas", "solutions", "right", "stubs", "mistakes")


@dataclass(frozen=True)
class Answer:
    """One module to judge; `kind` is one of KINDS, "variants", or "file" for a path."""

    kata: Kata
    kind: str
    path: Path
    name: str = ""
    mistake: Entry | None = None

    def __str__(self) -> str:
        return self.name or self.kind


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
            found.append(Answer(kata, "stubs", materialise(kata, "stub", text)))
        elif part == "right":
            folder = ROOT / "tests" / "right" / kata.name
            found += [
                Answer(kata, "right", path, f"right/{path.stem}")
                for path in sorted(folder.glob("*.py"))
            ]
            variants = together(catalogue(kata)[1], kata.solution.read_text(encoding="utf-8"))
            found += [
                Answer(kata, "variants", edited(kata, "variants", entry), f"right/{entry.name}")
                for entry in variants
            ]
        elif part == "mistakes":
            found += [
                Answer(
                    kata, part, edited(kata, part, entry), f"mistakes/{entry.name}", mistake=entry
                )
                for entry in catalogue(kata)[0]
            ]
        elif Path(part).is_file():
            if kata_of(Path(part)) in (None, kata):
                found.append(Answer(kata, "file", Path(part).resolve()))
        else:
            raise ValueError(f"no answers {part!r}: give one of {', '.join(KINDS)}, or a file")
    return found


def load(path: Path) -> ModuleType:
    """Import a file as a new module, whatever was imported before; its own errors come through.

    Its name is the same on all ranks, so that one reads what another has pickled.
    """
    module = _import(path, f"{path.stem}_answer_{zlib.crc32(bytes(path.absolute())):08x}")
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


class _Source(SourceFileLoader):
    """Compiles what stands in the file now: bytecode is known by its size and second only."""

    def get_code(self, fullname: str) -> CodeType:
        return _compiled(self.get_data(self.path), self.path)


@cache  # a mistake is imported afresh for each answer that may be like it
def _compiled(source: bytes, path: str) -> CodeType:
    code: CodeType = compile(source, path, "exec", dont_inherit=True)
    return code


def _import(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
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


def edited(kata: Kata, kind: str, entry: Entry) -> Path:
    """A file with the reference as an entry of the catalogue edits it."""
    text = entry.source(kata.solution.read_text(encoding="utf-8"))
    return materialise(kata, f"{kind}/{entry.name.partition('+')[0]}", text)


def materialise(kata: Kata, label: str, text: str) -> Path:
    """A file of an answer to a kata, until this process ends; the label keeps it apart."""
    path = _scratch() / label / f"{kata.name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
