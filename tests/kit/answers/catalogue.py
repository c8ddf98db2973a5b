"""The catalogue of mistakes: tests/mistakes/NAME.md, a page whose entries are edits as diffs.

    ### never unscales the optimizer's gradients

    scaler.step() does all that is needed.

    Caught by `test_clips_the_true_gradients[fp16]`: have not been unscaled

    ```diff
    @@ train_step @@
    -        scaler.unscale_(optimizer)
    ```

Elsewhere it is called never_unscales_the_optimizers_gradients. A hunk stands in the function, class
or method that it names; `module` is the whole file. Its context and removed lines, as one block,
stand there exactly once, so that an edit cannot rot.
Above a diff there may also be

    Caught by `test_x`, where it raises TypeError: words    the answer's own error, no check's
    Differs: in what                                        from one with the same spec and words
    Shows in: train                                         another function than that of the diff

Under "## Accepted variants" stand right answers, with a sentence on why they are right.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from kit.catalog import ROOT, Kata, shown

VARIANTS = "## Accepted variants"
_CAUGHT = re.compile(r"Caught by `([^`]+)`(?:, where it raises (\w+))?(?:: (.+))?")


class Place(NamedTuple):
    """A line of a page."""

    page: Path
    line: int

    def __str__(self) -> str:
        return f"{shown(self.page)}:{self.line}"

    def refuse(self, problem: str) -> NoReturn:
        """Raise ValueError with file and line."""
        raise ValueError(f"{self}: {problem}")


@dataclass
class Hunk:
    """Lines of the reference and what stands there instead, both with the context."""

    place: Place
    scope: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Entry:
    """A mistake that a spec must catch or, without `caught_by`, a variant that every one accepts.

    `name` is its heading as an identifier. `caught_by` is a spec's name, or name[id] for a case.
    """

    name: str
    place: Place
    heading: str = ""
    belief: str = ""
    differs: str = ""
    shows_in: str = ""
    caught_by: str = ""
    says: str = ""
    raises: type[Exception] | None = None
    hunks: list[Hunk] = field(default_factory=list)

    def source(self, reference: str) -> str:
        """The reference with these hunks, all found in it as it is; ValueError if one is not."""
        lines = reference.splitlines()
        starts = {self.start(hunk, reference): hunk for hunk in self.hunks}
        end = len(lines)
        for start, hunk in sorted(starts.items(), reverse=True):
            if start + len(hunk.old) > end or len(starts) < len(self.hunks):
                hunk.place.refuse(f"{self.name}: this hunk in {hunk.scope} and another overlap")
            lines[start : start + len(hunk.old)] = hunk.new
            end = start
        return "\n".join(lines) + "\n"

    def start(self, hunk: Hunk, reference: str) -> int:
        """The index of the line of the reference at which a hunk begins."""
        if hunk.scope not in scopes(reference):
            hunk.place.refuse(f"{self.name}: the reference has no {hunk.scope}")
        first, end = scopes(reference)[hunk.scope]
        lines, size = reference.splitlines(), len(hunk.old)
        starts = [n for n in range(first, end - size + 1) if lines[n : n + size] == hunk.old]
        if len(starts) != 1:
            hunk.place.refuse(
                f"{self.name}: what this hunk replaces stands {len(starts)} times in {hunk.scope} "
                f"of the reference, not once; it begins with {hunk.old[0].strip()!r}"
            )
        return starts[0]

    @property
    def spec(self) -> str:
        """The name of the spec that must catch it, without a case."""
        return self.caught_by.partition("[")[0]


@cache
def scopes(source: str) -> dict[str, tuple[int, int]]:
    """Functions, classes, and methods as Class.method: the index of the first line, and the end."""

    def named(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                yield prefix + node.name, (first - 1, node.end_lineno or node.lineno)
                if isinstance(node, ast.ClassDef):
                    yield from named(node.body, f"{prefix}{node.name}.")

    return {"module": (0, len(source.splitlines())), **dict(named(ast.parse(source).body, ""))}


@cache
def catalogue(kata: Kata) -> tuple[list[Entry], list[Entry]]:
    """A kata's mistakes, and its accepted variants."""
    entries = read(ROOT / "tests" / "mistakes" / f"{kata.name}.md")
    return [e for e in entries if e.caught_by], [e for e in entries if not e.caught_by]


def together(variants: Iterable[Entry], reference: str) -> list[Entry]:
    """Variants that edit different lines as one answer: what refuses it refuses one of them."""
    groups: list[list[Entry]] = []
    for variant in variants:
        for group in groups:
            with contextlib.suppress(ValueError):  # they overlap
                _joined([*group, variant]).source(reference)
                group.append(variant)
                break
        else:
            groups.append([variant])
    return [*map(_joined, groups)]


def _joined(entries: list[Entry]) -> Entry:
    name = "+".join(entry.name for entry in entries)
    return Entry(name, entries[0].place, hunks=[h for entry in entries for h in entry.hunks])


def read(page: Path) -> list[Entry]:
    """The entries of one page; ValueError for what is not in the form."""
    found: dict[str, Entry] = {}
    entry: Entry | None = None
    group = ""
    text = page.read_text(encoding="utf-8").splitlines()
    lines = ((Place(page, number), line) for number, line in enumerate(text, 1))
    for place, line in lines:
        if line.startswith("## "):
            group, entry = line, None
        elif line.startswith("### "):
            heading = line.removeprefix("### ")
            name = re.sub(r"[^a-z0-9]+", "_", heading.lower().replace("'", "")).strip("_")
            if not name.isidentifier() or name in found:
                place.refuse(f"{heading!r} stands here twice, or does not begin with a word")
            entry = found[name] = Entry(name, place, heading)
        elif entry and line.strip():
            if entry.hunks:
                place.refuse(f"{entry.name} goes on after its diff")
            elif line == "```diff":
                entry.hunks = list(_hunks(place, lines))
            else:
                _take(entry, place, line)
        if entry and entry.hunks and bool(entry.caught_by) == (group == VARIANTS):
            entry.place.refuse(f"{entry.name}: all but variants say what they are Caught by")
    for entry in found.values():
        if not (entry.belief and entry.hunks):
            entry.place.refuse(f"{entry.name} lacks a sentence or a diff")
    return list(found.values())


def _take(entry: Entry, place: Place, line: str) -> None:
    """Read a line above the diff."""
    if line.startswith("Caught by"):
        match = _CAUGHT.fullmatch(line)
        error = getattr(builtins, match[2] or "Exception", None) if match else None
        if not match or not (isinstance(error, type) and issubclass(error, Exception)):
            place.refuse("wanted: Caught by `test_name[case]`, where it raises ValueError: words")
        entry.caught_by, entry.raises = match[1], error if match[2] else None
        entry.says = re.sub(r"^`(.*)`$", r"\1", match[3] or "")
    elif line.startswith("Differs: "):
        entry.differs = line.removeprefix("Differs: ")
    elif line.startswith("Shows in: "):
        entry.shows_in = line.removeprefix("Shows in: ")
    else:
        entry.belief = f"{entry.belief} {line}".strip()


def _hunks(fence: Place, lines: Iterator[tuple[Place, str]]) -> Iterator[Hunk]:
    """The hunks of a diff, up to the end of its block."""
    hunk: Hunk | None = None
    for place, line in lines:
        scope = re.fullmatch(r"@@ ([\w.]+) @@", line)
        if scope or line == "```":
            if hunk and hunk.old and hunk.old != hunk.new:
                yield hunk
            elif hunk:
                hunk.place.refuse("a hunk needs an old line, and changes something")
            if not scope:
                return
            hunk = Hunk(place, scope[1])
        elif not hunk or line[:1] not in ("", " ", "-", "+"):
            place.refuse("wanted: @@ function @@, or a line that begins with a space, - or +")
        else:
            if line[:1] != "+":
                hunk.old.append(line[1:])
            if line[:1] != "-":
                hunk.new.append(line[1:])
    fence.refuse("this block has no end")
