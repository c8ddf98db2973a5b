"""What an experiment writes into: measured samples, and the page that they add up to.

def run(lab: Lab) -> None:
    peak = lab.sample("fp32", lambda: measure_something())     # kept: a second run reads it
    lab.say("A sentence.")
    lab.table("Peaks", ["configuration", "GiB"], [["fp32", "13.6"]])
    lab.plot("peaks", figure, "AMP saves a third of the peak, not half", "Bars of ...")
    lab.claim("q9-amp-half", "35 % of the peak", verdict="holds in part", when="...")
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kit.catalog import ROOT
from lab import quiet
from lab.claims import CLAIMS
from lab.measure import alternating

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of words; numbers come with their unit in the heading or in the cell."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Plot:
    """A figure: its title states the finding, `alt` what is drawn, for whoever cannot see it."""

    name: str
    title: str
    alt: str


@dataclass(frozen=True)
class Code:
    """Programs beside each other, a name for each."""

    title: str
    programs: dict[str, str]


Block = Text | Table | Plot | Code


@dataclass(frozen=True)
class Measured:
    """What was measured for one claim, and under which conditions the claim holds.

    `verdict` is "holds", "holds in part", "does not hold" or "not measured".
    """

    claim: str
    measured: str
    verdict: str
    when: str


VERDICTS = ("holds", "holds in part", "does not hold", "not measured")


@dataclass
class Page:
    """One experiment as it was carried out: the report is made of these. Samples took `seconds`.

    `is_whole`: it did not break off.
    """

    name: str
    title: str
    question: str
    seconds: float = 0.0
    is_whole: bool = True
    blocks: list[Block] = field(default_factory=list)
    claims: list[Measured] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)


class NotHere(Exception):
    """What an experiment needs is not here: the words say what."""


def needs(*libraries: str) -> None:
    """Raise NotHere if one of them is not installed."""
    if missing := [name for name in libraries if find_spec(name) is None]:
        raise NotHere(f"{' and '.join(missing)} not installed")


class Lab:
    """Where one experiment runs, how large, and what it has found so far.

    Attributes:
        quick: whether all experiments together must take less than three minutes on two cores.
        limit: seconds after which no further round of a timing begins.
        device: cuda where there is one, and the cpu with smaller shapes elsewhere.
    """

    def __init__(self, page: Page, folder: Path, device: torch.device, *, quick: bool) -> None:
        self.page, self.device, self.quick = page, device, quick
        self.limit = 2.5 if quick else math.inf
        self._folder = folder
        self._kept = folder / "samples" / f"{page.name}.json"
        self._key = conditions(device, quick=quick)
        kept = read_json(self._kept)
        same = kept.get("conditions") == self._key and kept.get("code") == code_of(page.name)
        self._samples: dict[str, Any] = kept.get("samples", {}) if same else {}
        page.seconds = kept.get("seconds", 0.0) if same else 0.0

    def sample(self, name: str, measure: Callable[[], T]) -> T:
        """What `measure()` returns, which JSON can hold; kept, so an interrupted run goes on here.

        Numbers are drawn anew from the same seed for each sample: none depends on those before it.
        """
        if name not in self._samples:
            quiet.make_way()
            torch.manual_seed(0)
            start = time.perf_counter() - quiet.waited()
            self._samples[name] = json.loads(json.dumps(measure()))
            self.page.seconds += time.perf_counter() - quiet.waited() - start
            kept: dict[str, Any] = {"conditions": self._key, "code": code_of(self.page.name)}
            kept |= {"seconds": self.page.seconds, "samples": self._samples}
            write_json(self._kept, kept)
        self.page.samples[name] = self._samples[name]
        found: T = self._samples[name]
        return found

    def say(self, text: str) -> None:
        """A paragraph of the page."""
        self.page.blocks.append(Text(text))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of the page."""
        self.page.blocks.append(Table(title, list(columns), [list(row) for row in rows]))

    def code(self, title: str, programs: dict[str, str]) -> None:
        """Programs of the page, a name for each."""
        self.page.blocks.append(Code(title, programs))

    def plot(self, name: str, figure: Figure, title: str, alt: str) -> None:
        """A figure of the page, saved as SVG and PNG."""
        from lab import draw  # whoever only lists experiments waits for no matplotlib

        draw.save(figure, self._folder / "plots" / f"{self.page.name}-{name}", title)
        self.page.blocks.append(Plot(f"{self.page.name}-{name}", title, alt))

    def bars(self, name: str, bars: dict[str, dict[str, int]], title: str, alt: str) -> None:
        """A figure of bytes by kind, a bar for each name."""
        from lab import draw

        figure, (axes,) = draw.figure(height=1.8 + 0.3 * len(bars))
        draw.stacked_bars(axes, bars)
        self.plot(name, figure, title, alt)

    def seconds(
        self, name: str, make: Callable[[], Mapping[str, Callable[[], object]]], rounds: int = 15
    ) -> dict[str, list[float]]:
        """A sample: seconds of the steps that `make` gives, in turn; a quick run has 5 rounds."""
        count = 5 if self.quick else rounds
        return self.sample(name, lambda: alternating(make(), self.device, count, self.limit))

    def claim(self, claim: str, measured: str, *, verdict: str, when: str = "") -> None:
        """Set a measurement beside a claim of lab.claims; `when`: the conditions."""
        if claim not in CLAIMS:
            raise ValueError(f"lab/claims.py has no claim {claim!r}")
        if verdict not in VERDICTS:
            raise ValueError(f"a verdict is one of {', '.join(VERDICTS)}, not {verdict!r}")
        self.page.claims.append(Measured(claim, measured, verdict, when))


def in_part(parts: Iterable[bool]) -> str:
    """The verdict on a claim of several parts, by whether each is as claimed."""
    found = list(parts)
    return "holds" if all(found) else "holds in part" if any(found) else "does not hold"


def conditions(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """What a sample depends on, beside the code: part of the report."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "device": str(device),
        "gpu": gpu,
        "processor": platform.processor() or platform.machine(),
        "cores": quiet.cores(),
        "threads": 1 if device.type == "cpu" else torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "quick": quick,
        "seed": 0,
    }


def code_of(name: str) -> str:
    """A fingerprint of the experiment, of what it is made with, and of the references."""
    lab = Path(__file__).parent
    shown = {"__main__.py", "claims.py", "draw.py", "notebook.py", "report.py", "tracer.py"}
    made_of = (path for path in sorted(lab.glob("*.py")) if path.name not in shown)
    paths = [lab / "experiments" / f"{name}.py", *made_of]
    digest = hashlib.sha256()
    for path in [*paths, *sorted((ROOT / "solutions").glob("*.py"))]:
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """A file as it was written; nothing if it is not there, or broken off."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    part.replace(path)


def as_json(page: Page) -> dict[str, Any]:
    """The page as JSON can hold it; each block with a word for what it is."""
    blocks = [{"kind": type(b).__name__.lower(), **dataclasses.asdict(b)} for b in page.blocks]
    return {**dataclasses.asdict(page), "blocks": blocks}
