"""Commands as data: the documents of `desk.schema`, and the paper that prints them for --json."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from desk import events, schema, words
from desk.paper import Paper
from desk.state import version_of_torch
from desk.verdict import Verdict
from kit import catalog
from kit.catalog import Kata, shown

_RESULTS: dict[str, schema.Result] = {
    events.PASSED: "passed",
    events.FAILED: "failed",
    events.TODO: "not_written",
    events.SKIPPED: "not_checked",
}


class JsonPaper(Paper):
    """Nothing of a screen is seen on it; a report is a line on stdout, with the notes so far."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep it for the next report."""
        self._notes.append(text)

    def report(self, document: schema.Document) -> None:
        """Print it."""
        notes, self._notes = [*document.notes, *self._notes], []
        print(line(dataclasses.replace(document, notes=notes)), flush=True)

    def table(self, table: Table) -> None:
        """Nothing."""

    def status(self, text: str = "") -> None:
        """Nothing."""

    def _put(self, text: Text) -> None:
        """Nothing."""


def line(document: schema.Document | schema.Error) -> str:
    """The document as one line of JSON, in ASCII."""
    return json.dumps(dataclasses.asdict(document), allow_nan=False)


def error(message: str) -> str:
    """What was typed wrong, as one line of JSON."""
    return line(schema.Error(schema.VERSION, message))


def judged(command: str, verdicts: Iterable[schema.Verdict], ok: bool) -> schema.Judged:
    """The document of these verdicts."""
    return schema.Judged(command=command, ok=ok, verdicts=list(verdicts))


def verdict(found: Verdict, next_steps: Iterable[tuple[str, str]]) -> schema.Verdict:
    """A verdict with everything that is known of it."""
    job, broken = found.job, found.broken
    return schema.Verdict(
        kata=kata_name(job.kata),
        answer=shown(job.path),
        device=job.device,
        torch=version_of_torch(),
        python=platform.python_version(),
        state=schema.Standing(words.code(found), words.state(found)),
        passed=found.passed,
        core_passed=found.core_passed,
        solved=found.solved,
        seconds=round(found.seconds, 3),
        problem=problem(broken.problem) if broken else None,
        prints=list(broken.prints) if broken else [],
        trouble=found.trouble,
        parts=_parts(found),
        specs=[_spec(found, spec) for spec in found.specs],
        next=steps(next_steps),
    )


def kata_name(kata: Kata) -> schema.KataName:
    """The kata and its number on the board."""
    names = [other.name for other in catalog.all_katas()]
    return schema.KataName(kata.name, kata.title, names.index(kata.name) + 1)


def steps(pairs: Iterable[tuple[str, str]]) -> list[schema.Step]:
    """What to do next."""
    return [schema.Step(label, text) for label, text in pairs]


def problem(found: events.Problem) -> schema.Problem:
    """With null for a place that is not known."""
    fields = dataclasses.asdict(found)
    place = {"line": found.line or None, "column": fields.pop("caret") or None}
    return schema.Problem(**fields | place)


def _spec(found: Verdict, spec: events.Spec) -> schema.Spec:
    outcome = found.outcomes.get(spec.id) or events.Outcome(spec.id, "")
    result = _result(found, spec)
    reason = outcome.reason.removeprefix("Skipped: ")
    fields = dataclasses.asdict(spec)
    del fields["gpu"]
    return schema.Spec(
        **fields,
        result=result,
        seconds=round(outcome.seconds, 3),
        reason=(reason or words.NEEDS_GPU) if result == "not_checked" else "",
        problem=problem(outcome.problem) if outcome.problem else None,
        bars=[_bar(chart) for chart in outcome.charts],
        prints=list(outcome.prints),
    )


def _result(found: Verdict, spec: events.Spec) -> schema.Result:
    if spec.id in found.outcomes:
        return _RESULTS[found.outcomes[spec.id].result]
    return "not_checked" if spec in found.unchecked else "not_run"


def _bar(chart: events.Chart) -> schema.Bar:
    sizes = {label: size for label, size, _ in chart.rows}
    labels = (field.name for field in dataclasses.fields(schema.Bytes))
    return schema.Bar(
        chart.title, chart.formula, schema.Bytes(*(sizes.get(label) for label in labels))
    )


def _parts(found: Verdict) -> list[schema.Part]:
    """What was judged, now or before, or could not be."""
    before = {old.section: old for old in found.job.before}
    known = {*before, *found.job.asked}
    parts = []
    for section in [section for section in found.job.kata.sections if section in known]:
        specs = [spec for spec in found.specs if spec.section == section]
        old = before.get(section) if not specs else None
        results = [_result(found, spec) for spec in specs]
        counts: dict[str, int] = {result: results.count(result) for result in results}
        seconds = sum((found.outcomes[s.id].seconds for s in specs if s.id in found.outcomes), 0.0)
        if old:
            counts = {"passed": old.passed, "not_checked": old.unchecked}
            seconds = old.seconds
        parts.append(
            schema.Part(
                section.part,
                section.lap,
                found.job.kata.part(section.part).title,
                result=_result_of(counts),
                unchanged=old is not None,
                passed=counts.get("passed", 0),
                failed=counts.get("failed", 0),
                not_written=counts.get("not_written", 0),
                not_run=counts.get("not_run", 0),
                not_checked=counts.get("not_checked", 0),
                seconds=round(seconds, 3),
            )
        )
    return parts


def _result_of(counts: dict[str, int]) -> schema.Result:
    """Of a part: the worst that its specs came to."""
    order: tuple[schema.Result, ...] = ("failed", "not_written", "not_run", "passed", "not_checked")
    return next((result for result in order if counts.get(result)), "not_run")
