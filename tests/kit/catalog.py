"""The katas there are: names, order, titles, parts and minutes, read from katas/katas.toml."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]

# What specs say, in teaching order: it works, it is exact, it saves memory, it survives.
GROUPS = ("works", "exact", "saves", "survives")

# A kata is run in two laps: first the core, then its details and the parts that are a stretch.
Lap = Literal["core", "details", "stretch"]


@dataclass(frozen=True)
class Section:
    """What is judged, folded and remembered as one: the specs of a part that belong to a lap."""

    lap: Lap
    part: int


@dataclass(frozen=True)
class Part:
    """A part of a kata; `lap` says whether it is core or a stretch."""

    number: int
    title: str
    minutes: int
    lap: Lap

    def lap_of(self, group: str, clause: str | int) -> Lap:
        """The lap of its specs of that group and clause: traps, bad input and what only a numbered
        detail says are details of the core.
        """
        is_detail = group == "survives" or isinstance(clause, int)
        return "details" if self.lap == "core" and is_detail else self.lap


@dataclass(frozen=True)
class Kata:
    """One table of katas.toml; `name` is the file name in every folder.

    imports: what its specs import late because it is slow, and may not be installed
    """

    name: str
    title: str
    summary: str
    parts: tuple[Part, ...]
    imports: tuple[str, ...] = ()

    @property
    def minutes(self) -> int:
        """The time box: what the core takes."""
        return sum(part.minutes for part in self.parts if part.lap == "core")

    @property
    def sections(self) -> list[Section]:
        """Everything that is judged, in that order: core, details of the core, stretch."""
        core = [part.number for part in self.parts if part.lap == "core"]
        stretch = [part.number for part in self.parts if part.lap == "stretch"]
        return [
            *(Section("core", number) for number in core),
            *(Section("details", number) for number in core),
            *(Section("stretch", number) for number in stretch),
        ]

    def sections_of(self, part: int) -> list[Section]:
        """Those of one part."""
        return [section for section in self.sections if section.part == part]

    def part(self, number: int) -> Part:
        """The part of that number; one that katas.toml does not know has no title."""
        known = (part for part in self.parts if part.number == number)
        return next(known, Part(number, "", 0, "core"))

    @property
    def stub(self) -> Path:
        """The candidate's file."""
        return ROOT / "katas" / f"{self.name}.py"

    @property
    def solution(self) -> Path:
        """The reference answer."""
        return ROOT / "solutions" / f"{self.name}.py"

    @property
    def specs(self) -> Path:
        """The folder of what an answer must satisfy, one file for each part."""
        return ROOT / "tests" / "specs" / self.name

    @property
    def has_timeline(self) -> bool:
        """Whether a step of it can be drawn: kit.memory.stack says how."""
        return (self.specs / "timeline.py").exists()

    @property
    def hints(self) -> Path:
        """The rungs of hints for each part."""
        return ROOT / "katas" / "hints" / f"{self.name}.md"


def all_katas() -> list[Kata]:
    """Every kata in teaching order."""
    return [*_katas((ROOT / "katas" / "katas.toml").read_text(encoding="utf-8"))]


@cache  # it is asked for at each spec
def _katas(text: str) -> tuple[Kata, ...]:
    return tuple(_kata(name, **row) for name, row in tomllib.loads(text).items())


def _kata(
    name: str, title: str, summary: str, parts: list[dict[str, Any]], imports: Sequence[str] = ()
) -> Kata:
    numbered = tuple(Part(number, **part) for number, part in enumerate(parts, 1))
    return Kata(name, title, summary, numbered, tuple(imports))


def find_kata(name: str) -> Kata:
    """The kata of that name, title or file, or of its beginning if no other has the same.

    ValueError names the nearest one there is.
    """
    katas = {kata.name: kata for kata in all_katas()}
    plain = re.sub(r"[ -]", "_", name.lower()).removeprefix("katas/").removesuffix(".py")
    begun = [plain] if plain in katas else [known for known in katas if known.startswith(plain)]
    if plain and len(begun) == 1:
        return katas[begun[0]]
    near = difflib.get_close_matches(plain, katas, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(katas)}"
    raise ValueError(f"no kata is named {name!r}; {hint}")


def kata_of(path: Path) -> Kata | None:
    """The kata that a file by its name is an answer to; None if it may be one to any."""
    return next((kata for kata in all_katas() if kata.name == path.stem), None)


def shown(path: Path) -> str:
    """A path as people see it: relative to the repository where it lies inside it."""
    try:
        return str(path.resolve().relative_to(ROOT))
    except ValueError:
        return str(path)


def in_words(name: str) -> str:
    """The name of a spec, as one says it."""
    words = name.removeprefix("test_").replace("_", " ").replace("micro batch", "micro-batch")
    return re.sub(r"\b(caller|torch)s\b", r"\1's", words)
