"""What is judged, and what is known of it: a job, and the verdict that its events add up to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from desk import events, source
from desk.events import Broken, Chart, Collected, Event, Finished, Order, Outcome, Spec
from kit.catalog import Kata, Section

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
class Passed:
    """A section in which everything that could run has passed."""

    section: Section
    passed: int
    unchecked: int
    seconds: float
    figures: list[Figure]


@dataclass(frozen=True)
class Job:
    """What to judge: `answers` is what --answers gets, `limit` is seconds for a spec.

    `sections` says what runs and in which order (nothing: everything); `before` are those that
    need not run, because they have passed with this very code. What is about a function that has
    `changed` since the last verdict runs first: the spec that has `failed`, then others in their
    lap or, once `past_core`, of all.
    `junitxml` is the file that pytest writes, if any.
    """

    kata: Kata
    path: Path
    answers: str = "katas"
    device: str = "cpu"
    run_all: bool = False
    limit: float = 20.0
    sections: tuple[Section, ...] = ()
    before: tuple[Passed, ...] = ()
    changed: tuple[str, ...] = ()
    failed: str = ""
    past_core: bool = False
    junitxml: Path | None = None

    @property
    def arguments(self) -> list[str]:
        """What pytest is to run, and the file that it writes."""
        files = part_files(self.kata)
        parts = sorted({section.part for section in self.sections})
        chosen = [path for part in parts for path in files.get(part, [])] or [self.kata.specs]
        options = [f"--junitxml={self.junitxml}"] if self.junitxml else []
        return [*map(str, chosen), *options]

    @property
    def order(self) -> Order:
        """What is to run of all that was collected."""
        return Order(tuple(self.asked), self.changed, self.failed, self.past_core, self.run_all)

    @property
    def may_share(self) -> bool:
        """Whether two processes may judge it: one report, and one debugger, need one process."""
        text = source.read(self.path)
        asks = "breakpoint" in text or "set_trace" in text
        return self.device == "cpu" and not self.junitxml and not asks

    @property
    def asked(self) -> list[Section]:
        """The sections that run, in that order."""
        return list(self.sections) or self.kata.sections

    @property
    def is_whole(self) -> bool:
        """Whether it is about every part, and not about one alone."""
        return {*self.asked, *(found.section for found in self.before)} >= {*self.kata.sections}

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
        """Whether both laps of the kata have passed, in this run or before with the same code."""
        return self.passed and {*self.known} >= {*self.job.kata.sections}

    @property
    def core_passed(self) -> bool:
        """Whether the core has passed, in this run or before with the same code."""
        core = {section for section in self.job.kata.sections if section.lap == "core"}
        return bool(core) and {*self.known} >= core

    @property
    def known(self) -> list[Section]:
        """The sections that have passed, in this run or before with the same code."""
        return [found.section for found in [*self.job.before, *self.passed_sections]]

    @property
    def parts(self) -> int:
        """How many parts the kata has."""
        known = [*part_files(self.job.kata), *(part.number for part in self.job.kata.parts)]
        return max([*known, *(spec.part for spec in self.specs)], default=0)

    def spec(self, id: str) -> Spec:
        """The one of that id."""
        return next(spec for spec in self.specs if spec.id == id)

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
    def bad(self) -> Broken | Outcome | None:
        """What is wrong first, if anything: the file, or how a spec ended; it has the problem."""
        return self.broken or (self.first_bad[1] if self.first_bad else None)

    @property
    def passed_sections(self) -> list[Passed]:
        """The sections of this run in which nothing is missing and nothing has failed.

        One that has no specs has passed too.
        """
        if not self.finished or self.broken or self.trouble or not self.specs:
            return []
        missing = {spec.section for spec in self.not_run}
        sections = dict.fromkeys([*(spec.section for spec in self.specs), *self.job.asked])
        found = (self.passed_in(section) for section in sections if section not in missing)
        return [section for section in found if section]

    def passed_in(self, section: Section) -> Passed | None:
        """What has passed of a section so far; None if something of it has failed."""
        specs = [spec for spec in self.specs if spec.section == section]
        ended = [(spec, self.outcomes[spec.id]) for spec in specs if spec.id in self.outcomes]
        if any(outcome.result in (events.FAILED, events.TODO) for _, outcome in ended):
            return None
        return Passed(
            section,
            passed=sum(outcome.result == events.PASSED for _, outcome in ended),
            unchecked=sum(self._is_unchecked(spec) for spec in specs),
            seconds=sum(outcome.seconds for _, outcome in ended),
            figures=[
                Figure(s.part, s.case, chart) for s, outcome in ended for chart in outcome.charts
            ],
        )
