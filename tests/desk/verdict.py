"""What is judged, and what is known of it: a job, and the verdict that its events add up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from desk import events
from desk.events import Broken, Collected, Event, Finished, Outcome, Spec
from kit.catalog import Kata


@dataclass(frozen=True)
class Job:
    """What to judge: `answers` is what --answers gets, `limit` is seconds for a spec."""

    kata: Kata
    path: Path
    answers: str = "katas"
    device: str = "cpu"
    run_all: bool = False
    limit: float = 20.0

    @property
    def arguments(self) -> list[str]:
        """What pytest is told to run."""
        return [str(self.kata.specs)]

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
        """Whether everything that could run has passed."""
        ended = self.finished and not self.broken and not self.trouble
        return ended and not self.not_run and not self.first_bad and self.count() > 0

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
    def parts(self) -> int:
        """How many parts the kata has."""
        return max((spec.part for spec in self.specs), default=0)
