"""What `--json` prints: one document on one line. These classes are its schema.

Every field is always there, in this order. Bytes are whole numbers. What is not known is null, and
a text that says nothing is "". Within a version fields may be added; a field that goes or changes
its meaning makes a new version. A command that cannot be done prints an Error (exit code 2), and so
does one that Ctrl-C has ended (130).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from desk.words import Code, seconds_waited
from kit.catalog import Lap

VERSION = 2

# The first five are verdicts; with "part_passed" all that was judged has passed, and other parts of
# the kata have not passed yet. The others stand on the board alone, where nothing is judged:
# "not_judged" is begun without a verdict, "changed" and "outdated" have one on an older answer, or
# by older specs, and "missing" has no file.
State = Literal[Code, "not_started", "not_judged", "changed", "outdated", "missing"]

Result = Literal["passed", "failed", "not_written", "not_run", "not_checked"]


@dataclass(frozen=True)
class Step:
    """What to do next: a label such as "Next" or "a hint", and a command or a sentence."""

    label: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Document:
    """What every document begins with; `ok` says that the exit code is 0.

    `seconds` is how long somebody has waited. `notes` are sentences for people, such as that a
    verdict could not be kept.
    """

    version: int = VERSION
    command: str
    ok: bool
    seconds: float = field(default_factory=seconds_waited)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Error:
    """The command was not done; a sentence says why."""

    version: int
    error: str


@dataclass(frozen=True)
class KataName:
    """A kata; `number` is the one on the board."""

    name: str
    title: str
    number: int


@dataclass(frozen=True)
class Standing:
    """Where an answer stands, as a code for programs and in the words of the screen."""

    code: State
    words: str


@dataclass(frozen=True)
class Problem:
    """Why something is not right, and where; `line` and `column` count from 1.

    `scenario` is where it was seen, if the spec tries several. The cause is `sure` where it follows
    from what was seen; elsewhere it is a guess. `contract` is the sentence that is broken, where it
    is another than that of the spec.
    """

    kind: str
    expected: str
    got: str
    scenario: str
    cause: str
    sure: bool
    contract: str
    path: str
    line: int | None
    column: int | None
    function: str
    source: str


@dataclass(frozen=True)
class Bytes:
    """The rows of a memory bar: without the technique, the answer's, the reference's, at most."""

    plain: int | None
    yours: int | None
    reference: int | None
    limit: int | None


@dataclass(frozen=True)
class Bar:
    """A memory bar; `formula` is where the limit comes from."""

    title: str
    formula: str
    bytes: Bytes


@dataclass(frozen=True)
class Spec:
    """One spec, or one case of it; `reason` says why it was not checked, `prints` are its last.

    `function` is what it is about, and `contract` the sentence of the docstring that it checks
    ("": it names none).
    """

    id: str
    part: int
    lap: Lap
    function: str
    contract: str
    group: str
    sentence: str
    case: str
    result: Result
    seconds: float
    reason: str
    problem: Problem | None
    bars: list[Bar]
    prints: list[str]


@dataclass(frozen=True)
class Part:
    """What belongs to one lap of one part, with the counts of its specs.

    A core part has its core and its details (what survives traps and bad input); any other part is
    a stretch. `unchanged` ones have passed before with the same code, and their specs are not in
    the document; the option -v runs them again.
    """

    number: int
    lap: Lap
    title: str
    result: Result
    unchanged: bool
    passed: int
    failed: int
    not_written: int
    not_run: int
    not_checked: int
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """One run on one answer.

    `passed` says that all that was to run, and could, has passed; `core_passed` that all of the
    core has, in this run or before with the same code, and `solved` that everything has. `problem`
    is what keeps the whole file from being judged, and `trouble` what went wrong with the judge
    itself. `seconds` are those of the judging alone.
    """

    kata: KataName
    answer: str
    device: str
    torch: str
    python: str
    state: Standing
    passed: bool
    core_passed: bool
    solved: bool
    seconds: float
    problem: Problem | None
    prints: list[str]
    trouble: str
    parts: list[Part]
    specs: list[Spec]
    next: list[Step]


@dataclass(frozen=True, kw_only=True)
class Judged(Document):
    """Of `kata`, `gpu` and each save of `watch`: a verdict for each kata judged, mostly one.

    There is none where nothing was to judge; a note says why.
    """

    verdicts: list[Verdict]


@dataclass(frozen=True)
class Row:
    """A kata on the board; `part` is the one to work at."""

    kata: KataName
    answer: str
    state: Standing
    part: int
    core_passed: bool


@dataclass(frozen=True, kw_only=True)
class Board(Document):
    """Of `board`: every kata in teaching order."""

    katas: list[Row]
    next: list[Step]


@dataclass(frozen=True, kw_only=True)
class Hint(Document):
    """Of `hint`: one rung of those that a part has; 0 is the hint of the `spec` that failed."""

    kata: KataName
    part: int
    part_title: str
    rung: int
    rungs: int
    spec: str
    title: str
    paragraphs: list[str]
    next: list[Step]


@dataclass(frozen=True)
class Configuration:
    """A row of a plan: bytes of one rank by kind and at the peak, and the calls of a step."""

    label: str
    bytes: dict[str, int]
    peak: int
    collectives: str


@dataclass(frozen=True)
class Table:
    """What a dry run comes to."""

    title: str
    rows: list[Configuration]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Plan(Document):
    """Of `plan`: the table, or else the problem of the answer or the trouble of the judge."""

    kata: KataName
    answer: str
    sizes: dict[str, int]
    table: Table | None
    problem: Problem | None
    trouble: str


@dataclass(frozen=True, kw_only=True)
class Timeline(Document):
    """Of `timeline`: the picture and the bytes of each peak, or else the problem or the trouble."""

    kata: KataName
    answer: str
    picture: str
    peaks: dict[str, int]
    problem: Problem | None
    trouble: str


@dataclass(frozen=True)
class Stub:
    """What became of one file: `written` afresh, and where the work in it is `kept` ("": nowhere).

    One that is not written has somebody's work in it and is as it was.
    """

    kata: KataName
    path: str
    written: bool
    kept: str


@dataclass(frozen=True, kw_only=True)
class Reset(Document):
    """Of `reset`: each file."""

    stubs: list[Stub]
