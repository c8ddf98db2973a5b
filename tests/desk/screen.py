"""Verdicts as text: at most 100 columns, plain ASCII of our own, colour only on a terminal."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from desk import events
from desk.events import Broken, Chart, Event, Outcome, Problem, Spec
from desk.verdict import Job, Verdict
from kit.catalog import shown

WIDTH = 100
_LABEL = 10
_MOST_LINES = 8
_BAR = 44
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_WORDS = {
    events.PASSED: ("pass", "green"),
    events.FAILED: ("FAIL", "bold red"),
    events.TODO: ("TODO", "bold yellow"),
}


# Each a label and a sentence or a command.
Steps = Iterable[tuple[str, str]]


class Paper:
    """Where lines go: wrapped to the width, without control characters, markup or emoji codes."""

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):  # a log in ASCII must not end the desk
            sys.stdout.reconfigure(errors="backslashreplace")
        self.width = max(40, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
        self._console = Console(width=self.width, highlight=False, markup=False, emoji=False)

    def line(self, text: str = "", style: str = "", *, hang: int = 0) -> None:
        """One paragraph; what does not fit goes on, indented by `hang`."""
        text = clean(text)
        indent = " " * (len(text) - len(text.lstrip()))
        rows = textwrap.wrap(
            text.strip(),
            self.width,
            initial_indent=indent,
            subsequent_indent=" " * (hang or len(indent)),
            break_on_hyphens=False,
        )
        for row in rows or [""]:
            self._put(Text(row, style))

    def labelled(self, indent: int, label: str, text: str, style: str = "") -> None:
        """A label and its text beside it, at most a few lines of it."""
        room = self.width - indent - _LABEL
        rows = [
            row for part in clean(text).splitlines() for row in textwrap.wrap(part, room) or [""]
        ]
        if len(rows) > _MOST_LINES:
            rows = [*rows[: _MOST_LINES - 1], "..."]
        for number, row in enumerate(rows or [""]):
            head = " " * indent + (label if number == 0 else "").ljust(_LABEL)
            self._put(Text().append(head, "bold").append(row, style))

    def verbatim(self, indent: int, text: str) -> None:
        """One line as it is, cut where the paper ends."""
        row = " " * indent + clean(text)
        self._put(Text(row if len(row) <= self.width else row[: self.width - 4] + " ..."))

    def marked(self, word: str, style: str, rest: str, *, indent: int = 2, hang: int = 18) -> None:
        """A line that starts with a coloured word."""
        rows = textwrap.wrap(
            clean(rest), self.width - hang, break_on_hyphens=False, drop_whitespace=True
        )
        first, *others = rows or [""]
        self._put(Text(" " * indent) + Text(word, style) + Text("  " + first))
        for row in others:
            self._put(Text(" " * hang + row))

    def table(self, table: Table) -> None:
        """A table, as wide as the paper at most."""
        self._console.print(table)

    def steps(self, steps: Steps) -> None:
        """What to do next, each command on a line of its own, ready to be copied."""
        for label, text in steps:
            self.line(f"{label + ':':<9}{text}", hang=9)

    def _put(self, text: Text) -> None:
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def clean(text: str) -> str:
    """Text of somebody's program, without what would move the cursor or colour the screen."""
    return _CONTROLS.sub("?", _ESCAPES.sub("", text.replace("\r\n", "\n")).expandtabs(4))


class Screen:
    """Shows one run as it happens, and then its verdict."""

    def __init__(self, paper: Paper, job: Job) -> None:
        self._paper, self._job = paper, job
        self._verdict = Verdict(job)
        self._part = 0
        self._held: list[Spec] = []

    def show(self, event: Event) -> None:
        """One event of the run."""
        self._verdict.take(event)
        if isinstance(event, Broken):
            self._paper.line(f"  This file cannot be judged: {event.problem.kind}", "bold red")
            self._paper.line()
            self.problem(event.problem, event.prints)
        elif isinstance(event, Outcome) and event.result != events.SKIPPED:
            self._outcome(next(s for s in self._verdict.specs if s.id == event.id), event)

    def _outcome(self, spec: Spec, outcome: Outcome) -> None:
        """Cases of one spec that pass share a line, which waits for the last of them."""
        paper = self._paper
        if self._held and _spec_of(self._held[0]) != _spec_of(spec):
            self._release()
        if spec.part != self._part:
            self._part = spec.part
            paper.line(self._heading(spec), "bold")
        if outcome.result == events.PASSED and not outcome.charts:
            self._held.append(spec)
            return
        self._release()
        self._mark(outcome.result, [spec])
        for chart in outcome.charts:
            self._chart(chart)
        if outcome.problem and outcome.result == events.TODO:
            paper.line(f"                  {outcome.problem.got}: {at(outcome.problem)}")
        elif outcome.problem:
            paper.line()
            self.problem(outcome.problem, outcome.prints)
            paper.line()

    def _release(self) -> None:
        if self._held:
            self._mark(events.PASSED, self._held)
            self._held = []

    def _mark(self, result: str, cases: list[Spec]) -> None:
        word, style = _WORDS[result]
        self._paper.marked(word, style, f"{cases[0].group:<9} {_words(cases)}")

    def _heading(self, spec: Spec) -> str:
        return f"Part {spec.part} of {self._verdict.parts}: {spec.title}"

    def problem(self, problem: Problem, prints: list[str]) -> None:
        """Expected, got, cause, and the line of the answer."""
        paper, indent = self._paper, 8
        rows = [("expected", problem.expected), ("got", problem.got), ("cause", problem.cause)]
        for label, text in rows:
            if text:
                paper.labelled(indent, label, text)
        if problem.path:
            paper.labelled(indent, "at", at(problem), "cyan")
        if problem.source:
            paper.verbatim(indent + _LABEL, problem.source)
        if problem.caret:
            paper.verbatim(indent + _LABEL, " " * (problem.caret - 1) + "^")
        for number, text in enumerate(prints):
            label = "printed" if number == 0 else ""
            paper.verbatim(indent, label.ljust(_LABEL) + text)

    def _chart(self, chart: Chart) -> None:
        paper, indent = self._paper, 18
        paper.line(f"{' ' * indent}{chart.title} (limit: {chart.formula})")
        largest = max([size for _, size, _ in chart.rows] + [1])
        texts = max(len(text) for _, _, text in chart.rows)
        for label, size, text in chart.rows:
            marks = "#" * max(round(_BAR * size / largest), 1 if size > 0 else 0)
            paper.verbatim(indent, f"{label:<9} {text:>{texts}}  {marks}")

    def close(self, verdict: Verdict, steps: Steps = ()) -> None:
        """What did not run, what the verdict is, and what to do now."""
        paper = self._paper
        self._release()
        if not verdict.broken:
            self._not_run(verdict)
            self._unchecked(verdict)
        if verdict.trouble:
            self.trouble(verdict)
        paper.line()
        style = "bold green" if verdict.passed else "bold"
        paper.line(f"Verdict: {summary(verdict)}", style, hang=9)
        paper.line(f"Time:    {verdict.seconds:.1f} s")
        paper.steps(steps)

    def trouble(self, verdict: Verdict) -> None:
        """What went wrong with the judge."""
        paper = self._paper
        paper.line("  The judge itself failed; this says nothing about the answer:", "bold red")
        for text in verdict.trouble.splitlines():
            paper.verbatim(4, text)

    def _not_run(self, verdict: Verdict) -> None:
        for part in range(1, verdict.parts + 1):
            specs = [spec for spec in verdict.not_run if spec.part == part]
            if specs and part > self._part:
                self._paper.line(
                    f"{self._heading(specs[0])} - not run ({count(len(specs), 'spec')})", hang=4
                )
            elif specs:
                self._paper.line(f"  not run: {count(len(specs), 'more spec')} of this part")

    def _unchecked(self, verdict: Verdict) -> None:
        reasons: dict[str, list[Spec]] = {}
        for spec in verdict.unchecked:
            outcome = verdict.outcomes.get(spec.id)
            reason = (outcome.reason if outcome else "").removeprefix("Skipped: ")
            reasons.setdefault(reason or "needs a CUDA GPU", []).append(spec)
        for reason, specs in reasons.items():
            self._paper.line(f"not checked ({reason}): {count(len(specs), 'spec')}")
            for _, cases in itertools.groupby(specs, _spec_of):
                self._paper.line(f"  - {_words(list(cases))}", hang=4)


def summary(verdict: Verdict) -> str:
    """The verdict in a line, with every spec counted once."""
    if verdict.broken:
        return state(verdict)
    counts = [
        f"{number} {word}"
        for number, word in (
            (verdict.count(), "passed"),
            (verdict.count(events.FAILED), "failed"),
            (verdict.count(events.TODO), "not written"),
            (len(verdict.not_run), "not run"),
            (len(verdict.unchecked), "not checked"),
        )
        if number
    ]
    return state(verdict) + (f" ({', '.join(counts)})" if counts else "")


def state(verdict: Verdict) -> str:
    """Where the answer stands, in a few words."""
    if verdict.broken:
        problem = verdict.broken.problem
        where = f", line {problem.line}" if problem.line else ""
        return f"broken file: {problem.kind}{where}"
    if verdict.trouble:
        return "no verdict, the judge itself failed"
    if verdict.first_bad is None:
        if verdict.passed:
            return "passed"
        nothing = verdict.finished and not verdict.not_run
        return f"no verdict, {'nothing could be checked' if nothing else 'the run did not end'}"
    spec, outcome = verdict.first_bad
    place = f"part {spec.part} of {verdict.parts}"
    if outcome.result == events.TODO:
        return f"{place} is not written yet"
    kind = outcome.problem.kind if outcome.problem else "wrong"
    return f"failing at {place}" + ("" if kind in ("wrong", "error") else f": {kind}")


def title(job: Job) -> str:
    """What is judged: the first line of every verdict."""
    kata = job.kata
    return f"{kata.title} ({kata.name}) - judging {shown(job.path)} on {job.device}"


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _spec_of(spec: Spec) -> tuple[int, str]:
    return spec.part, spec.sentence


def _words(cases: list[Spec]) -> str:
    """One spec with its cases: clips the true gradients (bf16, fp16)."""
    names = ", ".join(spec.case for spec in cases if spec.case)
    return cases[0].sentence + (f" ({names})" if names else "")


def at(problem: Problem) -> str:
    """Where the problem is: the line as an editor understands it, and the function."""
    return problem.at + (f" in {problem.function}" if problem.function else "")
