"""Shows one run on paper: each spec as it ends, what is wrong with it, and the verdict."""

from __future__ import annotations

import itertools

from desk import events
from desk.events import Broken, Chart, Debugging, Event, Outcome, Problem, Spec, Started
from desk.paper import LABEL, Paper
from desk.verdict import Job, Verdict
from desk.words import (
    NEEDS_GPU,
    at,
    cases_of,
    count,
    section_name,
    spec_of,
    summary,
    waited,
)
from kit.catalog import Section

_BAR = 44
_FEW_PRINTS = 5  # of a spec that passes
_WORDS = {
    events.PASSED: ("pass", "green"),
    events.FAILED: ("FAIL", "bold red"),
    events.TODO: ("TODO", "bold yellow"),
}


class Screen:
    """Shows one run as it happens, and then its verdict.

    A section, which is the core or the details of a part, folds to a line where everything passes,
    all but the one in hand: the first in which something is wrong or, where nothing is, the last.
    So lines wait until the section is known.
    """

    def __init__(self, paper: Paper, job: Job, verbose: bool = False) -> None:
        self._paper, self._verbose = paper, verbose
        self._verdict = Verdict(job)
        self._section: Section | None = None
        self._in_hand: Section | None = None
        self._is_open = False
        self._waiting: list[tuple[Spec, Outcome]] = []  # of a section that may fold
        self._held: list[Spec] = []  # cases of one spec, which share a line
        self._unwritten: dict[str, int] = {}  # places, and the specs of the section that meet them
        for found in job.before:
            if found.passed:
                self._passed(found.section, found.passed, "unchanged")

    def show(self, event: Event) -> None:
        """One event of the run."""
        self._verdict.take(event)
        if isinstance(event, Broken):
            self._paper.line(f"  This file cannot be judged: {event.problem.kind}", "bold red")
            self._paper.line()
            self.problem(event.problem, event.prints)
        elif isinstance(event, Debugging):
            self._paper.status()
        elif isinstance(event, Started):
            spec = self._verdict.spec(event.id)
            limit = f"{self._verdict.job.limit:g} s"
            self._paper.status(f"still running, for {limit} at most: {cases_of([spec])}")
        elif isinstance(event, Outcome) and event.result != events.SKIPPED:
            self._take(self._verdict.spec(event.id), event)

    def _take(self, spec: Spec, outcome: Outcome) -> None:
        if spec.section != self._section:
            self._end_section(is_last=False)
            self._section = spec.section
        is_bad = outcome.result != events.PASSED
        if is_bad and not self._in_hand:
            self._in_hand = spec.section
        self._waiting.append((spec, outcome))
        if is_bad or self._verbose or self._is_open:
            self._open()
        else:
            passed = count(len(self._waiting), "spec")
            self._paper.status(f"{section_name(spec.section)}: {passed} passed")

    def _end_section(self, *, is_last: bool) -> None:
        """Nothing more comes of the section: fold it, or show what has waited."""
        broke_off = any(spec.section == self._section for spec in self._verdict.not_run)
        if self._waiting and broke_off and not is_last:
            self._open()  # it comes again: this was the spec that failed last time
        elif self._waiting and (broke_off or (is_last and not self._in_hand)):
            self._in_hand = self._in_hand or self._section
            self._open()
        elif self._waiting:
            found = self._verdict.passed_in(self._waiting[0][0].section)
            if found:  # nothing has failed, or it would be open
                self._passed(found.section, found.passed, f"{found.seconds:.1f} s")
            self._waiting = []
        self._release()
        for place, specs in self._unwritten.items():
            if specs > 1:
                self._paper.line(f"  and {count(specs - 1, 'more spec')} of {place}", hang=4)
        self._unwritten = {}
        self._is_open = False

    def _passed(self, section: Section, specs: int, how: str) -> None:
        name = _capitalised(section_name(section))
        self._paper.line(f"{name} passed: {count(specs, 'spec')} ({how})", "green")

    def _open(self) -> None:
        if not self._is_open:
            self._paper.line(self._heading(self._waiting[0][0].section), "bold")
        self._is_open = True
        for spec, outcome in self._waiting:
            self._outcome(spec, outcome)
        self._waiting = []

    def _outcome(self, spec: Spec, outcome: Outcome) -> None:
        """Cases of one spec that pass share a line, which waits for the last of them."""
        paper = self._paper
        if self._held and spec_of(self._held[0]) != spec_of(spec):
            self._release()
        is_bad = outcome.result != events.PASSED
        if outcome.problem and outcome.result == events.TODO:
            place = at(outcome.problem)
            self._unwritten[place] = self._unwritten.get(place, 0) + 1
            if self._unwritten[place] > 1 and not self._verbose:
                return
        charts = outcome.charts
        if not (is_bad or self._verbose or self._in_hand == spec.section):
            charts = []
        if not is_bad and not charts and not outcome.prints:
            self._held.append(spec)
            return
        self._release()
        self._mark(outcome.result, [spec])
        for chart in charts:
            self._chart(chart)
        if outcome.problem and outcome.result == events.TODO:
            paper.line(f"                  {outcome.problem.got}: {at(outcome.problem)}")
        elif outcome.problem:
            paper.line()
            sentence = outcome.problem.contract or spec.contract
            self.problem(outcome.problem, outcome.prints, sentence)
            paper.line()
        else:
            self._prints(18 - LABEL, outcome.prints[-_FEW_PRINTS:])

    def _release(self) -> None:
        if self._held:
            self._mark(events.PASSED, self._held)
            self._held = []

    def _mark(self, result: str, cases: list[Spec]) -> None:
        word, style = _WORDS[result]
        self._paper.marked(word, style, f"{cases[0].group:<9} {cases_of(cases)}")

    def _heading(self, section: Section) -> str:
        name = f"{_capitalised(section_name(section))} of {self._verdict.parts}"
        title = self._verdict.job.kata.part(section.part).title
        return f"{name}: {title}" if title else name

    def problem(self, problem: Problem, prints: list[str], contract: str = "") -> None:
        """Expected, got, cause, the sentence of the contract, and the line of the answer."""
        paper, indent = self._paper, 8
        rows = [
            ("expected", problem.expected),
            ("got", problem.got),
            ("scenario", problem.scenario),
            ("cause" if problem.sure else "perhaps", problem.cause),
            ("contract", contract),
        ]
        for label, text in rows:
            if text:
                paper.labelled(indent, label, text)
        if problem.path:
            paper.labelled(indent, "at", at(problem), "cyan")
        is_name_alone = problem.source.startswith(("def ", "class ")) and not problem.caret
        if problem.source and not is_name_alone:
            paper.verbatim(indent + LABEL, problem.source)
        if problem.caret:
            paper.verbatim(indent + LABEL, " " * (problem.caret - 1) + "^")
        self._prints(indent, prints)

    def _prints(self, indent: int, prints: list[str]) -> None:
        for number, text in enumerate(prints):
            label = "printed" if number == 0 else ""
            self._paper.verbatim(indent, label.ljust(LABEL) + text)

    def _chart(self, chart: Chart) -> None:
        paper, indent = self._paper, 18
        paper.line(f"{' ' * indent}{chart.title} (limit: {chart.formula})")
        largest = max([size for _, size, _ in chart.rows] + [1])
        texts = max(len(text) for _, _, text in chart.rows)
        room = min(_BAR, paper.width - indent - texts - 12)
        for label, size, text in chart.rows:
            marks = "#" * max(round(room * size / largest), 1 if size > 0 else 0)
            paper.verbatim(indent, f"{label:<9} {text:>{texts}}  {marks}")

    def close(self, verdict: Verdict, since: float | None = None) -> None:
        """What did not run, what the verdict is, and how long it took, since nox began or since."""
        paper = self._paper
        self._end_section(is_last=True)
        paper.status()
        if not verdict.broken:
            self._not_run(verdict)
            self._unchecked(verdict)
        if verdict.trouble:
            self.trouble(verdict)
        paper.line()
        style = "bold green" if verdict.passed else "bold"
        paper.line(f"Verdict: {summary(verdict)}", style, hang=9)
        paper.line(f"Time:    {waited(since)}")
        if verdict.core_passed and not verdict.solved:
            minutes = verdict.job.kata.minutes
            text = f"done, the {minutes} minutes of this kata. Details and stretch follow."
            paper.line(f"Core:    {text}", "green", hang=9)

    def trouble(self, verdict: Verdict) -> None:
        """What went wrong with the judge."""
        paper = self._paper
        paper.line("  The judge itself failed; this says nothing about the answer:", "bold red")
        for text in verdict.trouble.splitlines():
            paper.verbatim(4, text)

    def _not_run(self, verdict: Verdict) -> None:
        begun = {spec.section for spec in verdict.specs if spec.id in verdict.outcomes}
        for section in sorted(begun, key=lambda section: section == self._section):
            if more := [spec for spec in verdict.not_run if spec.section == section]:
                name = f"{'the ' if section.lap == 'details' else ''}{section_name(section)}"
                self._paper.line(f"  not run: {count(len(more), 'more spec')} of {name}")
        later = [spec for spec in verdict.not_run if spec.section not in begun]
        core = [spec for spec in later if spec.lap == "core"]
        for specs in (core, [spec for spec in later if spec.lap != "core"]):
            sections = list(dict.fromkeys(spec.section for spec in specs))
            if specs:
                text = self._heading(sections[0]) if len(sections) == 1 else _names(sections)
                self._paper.line(f"{text} - not run ({count(len(specs), 'spec')})", hang=4)

    def _unchecked(self, verdict: Verdict) -> None:
        reasons: dict[str, list[Spec]] = {}
        for spec in verdict.unchecked:
            outcome = verdict.outcomes.get(spec.id)
            reason = (outcome.reason if outcome else "").removeprefix("Skipped: ")
            reasons.setdefault(reason or NEEDS_GPU, []).append(spec)
        for reason, specs in reasons.items():
            self._paper.line(f"not checked ({reason}): {count(len(specs), 'spec')}")
            if verdict.first_bad:
                continue  # what is to be mended is near
            for _, cases in itertools.groupby(specs, spec_of):
                self._paper.line(f"  - {cases_of(list(cases))}", hang=4)


def _names(sections: list[Section]) -> str:
    """Core parts 2, 3; Details of parts 1, 2, stretch part 4."""
    texts = []
    for lap, found in itertools.groupby(sections, lambda section: section.lap):
        numbers = sorted(section.part for section in found)
        plural = f"parts {', '.join(map(str, numbers))}"
        name = section_name(Section(lap, numbers[0]))
        texts.append(name if len(numbers) == 1 else name.replace(f"part {numbers[0]}", plural))
    return _capitalised(", ".join(texts))


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
