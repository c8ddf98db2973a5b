"""What was typed: which kata, which part of it, whose answer."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

from desk.verdict import Job
from kit import catalog
from kit.catalog import Kata, kata_of

# Whose answer, and where it is.
PATHS: dict[str, Callable[[Kata], Path]] = {
    "katas": lambda kata: kata.stub,
    "solutions": lambda kata: kata.solution,
}


class Misuse(ValueError):
    """What was typed cannot be done; the message says what can."""


def named(name: str) -> Kata:
    """The kata of that name or of that number on the board, or Misuse with what there is."""
    if name.isdecimal():
        katas = catalog.all_katas()
        if 1 <= int(name) <= len(katas):
            return katas[int(name) - 1]
        numbers = range(1, len(katas) + 1)
        raise Misuse(f"there is no kata {name}: {there_are('kata', numbers)}")
    try:
        return catalog.find_kata(name)
    except ValueError as error:
        raise Misuse(str(error)) from None


def part_named(kata: Kata, text: str) -> int:
    """The number of one of its parts, or Misuse with those there are."""
    numbers = [part.number for part in kata.parts]
    if text.isdecimal() and int(text) in numbers:
        return int(text)
    raise Misuse(f"{kata.name} has no part {text}: {there_are('part', numbers)}")


def there_are(what: str, numbers: Iterable[int]) -> str:
    """there are parts 1 to 4; what somebody could have typed."""
    found = sorted(numbers)
    if not found:
        return f"it has no {what}s"
    if len(found) == 1:
        return f"there is only {what} {found[0]}"
    return f"there are {what}s {found[0]} to {found[-1]}"


def katas_of(name: str | None, answers: str) -> list[Kata]:
    """The named kata, or all that `answers` has an answer to."""
    if name is not None:
        return [named(name)]
    katas = catalog.all_katas()
    if answers in PATHS:
        return katas
    # A file says by its name which kata it answers.
    mine = [kata for kata in katas if kata.name == Path(answers).stem]
    if not mine:
        raise Misuse(f"say which kata {answers} answers: nox -s kata -- NAME --answers {answers}")
    return mine


def locate(kata: Kata, answers: str) -> tuple[Path, str]:
    """The file to judge and how the judging process is told of it."""
    if answers in PATHS:
        return PATHS[answers](kata), answers
    path = Path(answers).resolve()
    if path.is_file() and "," not in str(path):
        if (other := kata_of(path) or kata) != kata:
            raise Misuse(f"{answers} is an answer to {other.name}, not to {kata.name}")
        return path, str(path)
    raise Misuse(f"no answers {answers!r} ({_why_not(path)}): give katas, solutions or a file")


def junit_file(text: str) -> Path:
    """Where pytest can write that file; there is none when the run begins."""
    path = Path(text).resolve()
    if path.suffix != ".xml":  # a slip must not cost somebody a file of another kind
        raise Misuse(f"--junitxml wants a file that ends in .xml, not {text!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        path.unlink()
    except OSError as error:
        raise Misuse(f"--junitxml cannot write {text!r}: {error.strerror}") from None
    return path


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    if path.is_file():
        return "its path has a comma in it"
    beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*PATHS, *beside], n=1)
    return f"did you mean {near[0]}?" if near else "there is no such file"


def reference_job(job: Job) -> Job:
    """The same with the reference answer."""
    return dataclasses.replace(job, path=job.kata.solution, answers="solutions")
