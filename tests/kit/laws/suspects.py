"""The mistakes of the catalogue as answers: what behaves just as one of them has its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from kit.answers.catalogue import Entry
from kit.answers.loading import Answer, load, sources
from kit.catalog import find_kata

Import = Callable[[], ModuleType | None]


def suspects(
    kata: str, wanted: Callable[[Entry], bool], spec: str = ""
) -> Iterator[tuple[str, Import]]:
    """What a mistake does and the belief behind it, in words, and how it is imported afresh.

    Those come first that this spec must catch: it is one of them more often than not.

    An answer may remember what was done with it, so one that was used before is another answer. One
    that cannot be imported is None: the proof complains of it, not a verdict.
    """
    answers = _mistakes(kata)
    for answer in sorted(answers, key=lambda a: not (a.mistake and a.mistake.spec == spec)):
        entry = answer.mistake
        if entry and wanted(entry):
            # The belief may sound right, so it must not read as what the judge believes.
            words = f'{entry.name.replace("_", " ")}. Perhaps you thought: "{entry.belief}"'
            yield words, partial(_imported, answer.path)


@cache
def _mistakes(kata: str) -> list[Answer]:
    try:
        return sources(find_kata(kata), "mistakes")
    except (OSError, ValueError):
        return []


def _imported(path: Path) -> ModuleType | None:
    try:
        return load(path)
    except Exception:
        return None
