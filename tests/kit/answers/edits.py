"""A mistake of the catalogue as a module without a file: only what it edits is compiled anew.

A verdict looks at dozens of them for the cause of a failure, and compiling a whole reference takes
as long as running it.
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

from kit.answers.catalogue import Entry

_FILE = "<mistake>"


def load_edited(reference: Path, entry: Entry) -> ModuleType:
    """The reference with the edits of an entry, as a new module; its own errors come through."""
    module = ModuleType(f"{reference.stem}_{entry.name}")
    module.__file__ = _FILE
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        for code in _edited(reference.read_text(encoding="utf-8"), entry):
            exec(code, vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


@cache
def used(text: str, function: str, public: frozenset[str]) -> frozenset[str]:
    """What a function or class uses of its file, by name, and itself.

    It goes on through helpers; what is `public` is named, and not what that uses.
    """
    found: set[str] = set()
    known = {code.co_name: code for statement in _statements(text) for code in statement.inner}
    names = [function]
    while names:
        name = names.pop()
        if name in known and name not in found:
            found.add(name)
            names += _names(known[name]) if name == function or name not in public else ()
    return frozenset(found)


class _Statement:
    """A statement of a module with the lines before it: from a line to another, and compiled."""

    def __init__(self, lines: list[str], start: int, end: int) -> None:
        self.start, self.end = start, end
        self.code = _compiled(lines[start:end])

    @property
    def inner(self) -> list[CodeType]:
        """The function, or the body of the class, that it defines."""
        return [part for part in self.code.co_consts if isinstance(part, CodeType)]


@cache
def _statements(text: str) -> list[_Statement]:
    lines = text.splitlines()
    ends = [node.end_lineno or 0 for node in ast.parse(text).body]
    return [_Statement(lines, *ends) for ends in zip([0, *ends], ends, strict=False)]


def _edited(text: str, entry: Entry) -> Iterator[CodeType]:
    lines, moved = entry.source(text).splitlines(), 0
    starts = [(entry.start(hunk, text), hunk) for hunk in entry.hunks]
    for statement in _statements(text):
        mine = [(at, hunk) for at, hunk in starts if statement.start <= at < statement.end]
        if any(at + len(hunk.old) > statement.end for at, hunk in mine):
            raise ValueError(f"{entry.place}: {entry.name} edits two statements in one hunk")
        start = statement.start + moved
        moved += sum(len(hunk.new) - len(hunk.old) for _, hunk in mine)
        yield _compiled(lines[start : statement.end + moved]) if mine else statement.code


def _compiled(lines: list[str]) -> CodeType:
    flags = __future__.annotations.compiler_flag  # of the statement at the top of each reference
    code: CodeType = compile("\n".join(lines), _FILE, "exec", flags, dont_inherit=True)
    return code


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
