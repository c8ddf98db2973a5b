"""What is judged, and what is known of it: a job, and the verdict that its events add up to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from desk import events
from desk.events import Broken, Chart, Collected, Event, Finished, Outcome, Spec
from kit.catalog import Kata

_NUMBER_IN_NAME = re.compile(r"test_part(\d+)")
_NUMBER_IN_TEXT = re.compile(r"^class TestPart(\d+)", re.MULTILINE)


def part_of(path: Path) -> int:
    """The part that a file of specs is about: by its name, or by the name of its first class."""
    found = _NUMBER_IN_NAME.match(path.name)
    if not found and path.is_file():
        found = _NUMBER_IN_TEXT.search(path.read_text(encoding="utf-8", errors="replace"))
    return int(found.group(1)) if found else 1


def part_files(kata: Kata) -> dict[int, list[Path]]:
    """The files of specs of each part, parts and files in teaching order."""
    files: dict[int, list[Path]] = {}
    for path in sorted(kata.specs.glob("test_*.py")):
        files.setdefault(part_of(path), []).append(path)
    return dict(sorted(files.items()))


@dataclass(frozen=True)
class Figure:
    """A memory bar as a row of numbers: whose it is, and its chart."""

    part: int
    case: str
    chart: Chart


@dataclass(frozen=True)
class PassedPart:
    """A part in which everything that could run has passed."""

    number: int
    passed: int
    unchecked: int
    seconds: float
    figures: list[Figure]


@dataclass(frozen=True)
class Job:
    """What to judge: `answers` is what --answers gets, `limit` is seconds for a spec.

    `parts` says which parts run and in which order (none: all of them); `before` are those that
    need not run, because they have passed with this very code. `junitxml` is the file that pytest
    writes, if any.
    """

    kata: Kata
    path: Path
    answers: str = "katas"
    device: str = "cpu"
    run_all: bool = False
    limit: float = 20.0
    parts: tuple[int, ...] = ()
    before: tuple[PassedPart, ...] = ()
    junitxml: Path | None = None

    @property
    def arguments(self) -> list[str]:
        """What pytest is to run, and the file that it writes."""
        files = part_files(self.kata)
        chosen = [path for part in self.parts for path in files[part]] or [self.kata.specs]
        options = [f"--junitxml={self.junitxml}"] if self.junitxml else []
        return [*map(str, chosen), *options]

    @property
    def is_whole(self) -> bool:
        """Whether it is about every part, and not about one alone."""
        known = {*self.parts, *(part.number for part in self.before)}
        return not self.parts or known >= set(part_files(self.kata))

    @property
    def grace(self) -> float:
        """Seconds after the limit in which a spec may still end by itself."""
        return min(8.0, 2.0 + self.limit)


@dataclass
class Verdict:
    """What is known of a run so far."""

    job: Job
    specs: list[Spec] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    broken: Broken | None = None
    trouble: str = ""
    finished: bool = False
    seconds: float = 0.0

    def take(self, event: Event) -> None:
        """Add one event."""
        if isinstance(event, Collected):
            self.specs = event.specs
        elif isinstance(event, Outcome):
            self.outcomes[event.id] = event
        elif isinstance(event, Broken):
            self.broken = event
        elif isinstance(event, Finished):
            self.finished = True

    @property
    def passed(self) -> bool:
        """Whether everything that was to run, and could, has passed."""
        ended = self.finished and not self.broken and not self.trouble
        return ended and not self.not_run and not self.first_bad and self.count() > 0

    @property
    def solved(self) -> bool:
        """Whether every part of the kata has passed, in this run or before with the same code."""
        known = {part.number for part in [*self.job.before, *self.passed_parts]}
        return self.passed and known >= set(part_files(self.job.kata))

    @property
    def parts(self) -> int:
        """How many parts the kata has."""
        return max([*part_files(self.job.kata), *(spec.part for spec in self.specs)], default=0)

    def count(self, result: str = events.PASSED) -> int:
        """How many specs ended that way."""
        return sum(outcome.result == result for outcome in self.outcomes.values())

    @property
    def unchecked(self) -> list[Spec]:
        """Specs that this device cannot show, whether or not the run came so far."""
        return [spec for spec in self.specs if self._is_unchecked(spec)]

    @property
    def not_run(self) -> list[Spec]:
        """Specs that could run and did not."""
        return [s for s in self.specs if s.id not in self.outcomes and not self._is_unchecked(s)]

    def _is_unchecked(self, spec: Spec) -> bool:
        outcome = self.outcomes.get(spec.id)
        if outcome:
            return outcome.result == events.SKIPPED
        return spec.gpu and self.job.device != "cuda"

    @property
    def first_bad(self) -> tuple[Spec, Outcome] | None:
        """The first spec that did not pass, with how it ended."""
        for spec in self.specs:
            outcome = self.outcomes.get(spec.id)
            if outcome and outcome.result in (events.FAILED, events.TODO):
                return spec, outcome
        return None

    @property
    def passed_parts(self) -> list[PassedPart]:
        """The parts of this run in which nothing is missing and nothing has failed."""
        if not self.finished or self.broken or self.trouble:
            return []
        missing = {spec.part for spec in self.not_run}
        numbers = dict.fromkeys(s.part for s in self.specs if s.part not in missing)
        return [part for number in numbers if (part := self._passed_part(number))]

    def _passed_part(self, number: int) -> PassedPart | None:
        specs = [spec for spec in self.specs if spec.part == number]
        ended = [(spec, self.outcomes[spec.id]) for spec in specs if spec.id in self.outcomes]
        if any(outcome.result in (events.FAILED, events.TODO) for _, outcome in ended):
            return None
        return PassedPart(
            number,
            passed=sum(outcome.result == events.PASSED for _, outcome in ended),
            unchecked=sum(self._is_unchecked(spec) for spec in specs),
            seconds=sum(outcome.seconds for _, outcome in ended),
            figures=[
                Figure(number, s.case, chart) for s, outcome in ended for chart in outcome.charts
            ],
        )
