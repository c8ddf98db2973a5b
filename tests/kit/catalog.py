"""The katas there are: names, order, titles and time boxes, read from katas/katas.toml."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kata:
    """One row of katas.toml; `name` is the file name in every folder.

    imports: what its specs import late because it is slow, and may not be installed
    """

    name: str
    title: str
    minutes: int
    summary: str
    imports: tuple[str, ...] = ()

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
    def hints(self) -> Path:
        """The four rungs of hints for each part."""
        return ROOT / "katas" / "hints" / f"{self.name}.md"


def all_katas() -> list[Kata]:
    """Every kata in teaching order."""
    rows = tomllib.loads((ROOT / "katas" / "katas.toml").read_text(encoding="utf-8"))
    return [
        Kata(name=name, **{**row, "imports": tuple(row.get("imports", ()))})
        for name, row in rows.items()
    ]


def find_kata(name: str) -> Kata:
    """The kata of that name; ValueError names the nearest one there is."""
    katas = {kata.name: kata for kata in all_katas()}
    if name in katas:
        return katas[name]
    near = difflib.get_close_matches(name, katas, n=1, cutoff=0.3)
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
