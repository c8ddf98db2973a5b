"""What the judging process tells the desk: one JSON object a line, each with a word for what it is.

Both ends import this module, so it needs neither torch nor pytest.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kit.catalog import Lap, Section
from kit.memory.plan import Plan, Row

# How a spec can end. "todo" is NotImplementedError out of the candidate's own file; "skipped" is
# what this device cannot show.
PASSED, FAILED, TODO, SKIPPED = "passed", "failed", "todo", "skipped"

# The kind of problem that a part which nobody has written yet is.
TODO_KIND = "not written"


@dataclass(frozen=True)
class Problem:
    """Why something is not right, in the words that the screen shows; empty fields are left out.

    `kind` names the problem in two or three words; a `cause` is `sure` where it is computed, and a
    guess elsewhere. `line` counts from 1 (0: no line is known) and `caret` is the column of
    `source` to point at, from 1 (0: none).
    """

    kind: str
    got: str
    expected: str = ""
    cause: str = ""
    path: str = ""
    line: int = 0
    function: str = ""
    source: str = ""
    caret: int = 0
    sure: bool = False
    contract: str = ""
    scenario: str = ""

    @property
    def at(self) -> str:
        """The place as an editor understands it: path:line."""
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Chart:
    """A memory bar; each row is a label, its bytes, and the same with a unit."""

    title: str
    formula: str
    rows: list[tuple[str, int, str]]


@dataclass(frozen=True)
class Spec:
    """One spec, or one case of it, as the candidate knows it; `part` is the number of its file.

    `function` is what it is about, and `contract` the sentence that it checks, where it names one.
    """

    id: str
    part: int
    lap: Lap
    function: str
    group: str
    sentence: str
    case: str
    gpu: bool
    contract: str = ""

    @property
    def section(self) -> Section:
        """Where it belongs."""
        return Section(self.lap, self.part)

    @property
    def name(self) -> str:
        """The name of its function in the file of specs."""
        return f"test_{self.sentence.replace(' ', '_')}"


@dataclass(frozen=True)
class Collected:
    """The specs that were found, in the order in which they are judged."""

    word: ClassVar[str] = "collected"
    specs: list[Spec]


@dataclass(frozen=True)
class Started:
    """A spec begins; the desk hears of those that take long."""

    word: ClassVar[str] = "started"
    id: str


@dataclass(frozen=True)
class Outcome:
    """A spec has ended; `reason` says why it was skipped, `plan` is the table of a dry run."""

    word: ClassVar[str] = "outcome"
    id: str
    result: str
    seconds: float = 0.0
    problem: Problem | None = None
    reason: str = ""
    charts: list[Chart] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    plan: Plan | None = None


@dataclass(frozen=True)
class Broken:
    """The file cannot be judged at all; said once, whatever the number of specs."""

    word: ClassVar[str] = "broken"
    problem: Problem
    prints: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The run came to its end by itself; without this event nothing counts as passed."""

    word: ClassVar[str] = "finished"


@dataclass(frozen=True)
class Debugging:
    """breakpoint() wants the terminal, or needs it no longer."""

    word: ClassVar[str] = "debugging"
    active: bool


@dataclass(frozen=True)
class Order:
    """What the desk tells the judging process: what to run of all that was collected.

    The sections in their order, but first what is about functions that have `changed`: the spec
    that has `failed` last, then others in their lap or, `past_core`, of all. `run_all` goes on
    after a failure.
    """

    sections: tuple[Section, ...]
    changed: tuple[str, ...] = ()
    failed: str = ""
    past_core: bool = False
    run_all: bool = False


Event = Collected | Started | Outcome | Broken | Finished | Debugging


def encode(event: Event) -> str:
    """The event as one line."""
    return json.dumps({"event": event.word, **dataclasses.asdict(event)}) + "\n"


def decode(line: str) -> Event:
    """The event that `encode` made a line of."""
    data: dict[str, Any] = json.loads(line)
    word = data.pop("event")
    if word == Collected.word:
        return Collected([Spec(**spec) for spec in data["specs"]])
    if word == Started.word:
        return Started(**data)
    if word == Finished.word:
        return Finished()
    if word == Debugging.word:
        return Debugging(**data)
    problem = Problem(**data["problem"]) if data["problem"] else None
    if word == Broken.word and problem:
        return Broken(problem, data["prints"])
    charts = [chart(values) for values in data.pop("charts")]
    plan = data.pop("plan")
    if plan:
        plan = Plan(plan["title"], [Row(**row) for row in plan["rows"]], plan["notes"])
    return Outcome(**{**data, "problem": problem, "charts": charts, "plan": plan})


def chart(data: dict[str, Any]) -> Chart:
    """What `dataclasses.asdict` and JSON made of it; an error if anything has another form."""
    rows = [(str(label), int(size), str(text)) for label, size, text in data["rows"]]
    return Chart(str(data["title"]), str(data["formula"]), rows)
