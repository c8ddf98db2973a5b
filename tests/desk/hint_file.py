"""The hints of a kata: the rungs of each part, and what is said where one spec fails."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PART = re.compile(r"^## Part (\d+): *(.*)$")
_RUNG = re.compile(r"^### (\d+) +(.*)$")
_SPECS = "## When a spec fails"
_SPEC = re.compile(r"^- `(test_\w+)`: *(.*)$")


@dataclass
class Ladder:
    """The hints of a part; each rung has a title and its lines."""

    title: str
    rungs: dict[int, tuple[str, list[str]]] = field(default_factory=dict)


@dataclass
class Hints:
    """Parts by number, and for some specs a sentence or two."""

    parts: dict[int, Ladder] = field(default_factory=dict)
    specs: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> Hints:
    """What the file says."""
    hints = Hints()
    rungs, _, specs = text.partition(f"\n{_SPECS}\n")
    lines: list[str] = []
    for line in rungs.splitlines():
        if found := _PART.match(line):
            ladder = hints.parts[int(found[1])] = Ladder(found[2])
            lines = []
        elif (found := _RUNG.match(line)) and hints.parts:
            lines = []
            ladder.rungs[int(found[1])] = (found[2], lines)
        else:
            lines.append(line)
    for ladder in hints.parts.values():
        for _, lines in ladder.rungs.values():
            _strip_blank_ends(lines)
    name = ""
    for line in specs.splitlines():
        if found := _SPEC.match(line):
            name = found[1]
            hints.specs[name] = found[2]
        elif name and line.startswith("  "):
            hints.specs[name] += f" {line.strip()}"
    return hints


def _strip_blank_ends(lines: list[str]) -> None:
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
