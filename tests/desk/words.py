"""A verdict in words: its sentence, its counts, the time it took, and what was judged."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import Literal

import psutil

from desk import events
from desk.events import Problem, Spec
from desk.verdict import Job, Verdict
from kit.catalog import Kata, Section, shown

# When nox began, in seconds as time.time() has them.
STARTED_VARIABLE = "MEMORY_KATAS_STARTED"

NEEDS_GPU = "needs a CUDA GPU"

# What a verdict comes to, for programs.
Code = Literal["passed", "part_passed", "failing", "not_written", "broken", "no_verdict"]


def summary(verdict: Verdict) -> str:
    """The verdict in a line, with every spec counted once."""
    if verdict.broken:
        return state(verdict)
    before = verdict.job.before
    counts = [
        f"{number} {word}"
        for number, word in (
            (verdict.count() + sum(found.passed for found in before), "passed"),
            (verdict.count(events.FAILED), "failed"),
            (verdict.count(events.TODO), "not written"),
            (len(verdict.not_run), "not run"),
            (len(verdict.unchecked) + sum(found.unchecked for found in before), "not checked"),
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
        if verdict.solved:
            return "passed"
        if verdict.passed:
            numbers = sorted({spec.part for spec in verdict.specs})
            return f"{_parts(numbers, verdict.parts)} passed"
        nothing = verdict.finished and not verdict.not_run
        return f"no verdict, {'nothing could be checked' if nothing else 'the run did not end'}"
    spec, outcome = verdict.first_bad
    core = "core passed, " if verdict.core_passed else ""
    if outcome.result == events.TODO:
        return f"{core}part {spec.part} of {verdict.parts} is not written yet"
    kind = outcome.problem.kind if outcome.problem else "wrong"
    details = "the details of " if spec.lap == "details" else ""
    place = f"{details}part {spec.part} of {verdict.parts}"
    return f"{core}failing at {place}" + ("" if kind in ("wrong", "error") else f": {kind}")


def progress(kata: Kata, passed: Iterable[Section]) -> str:
    """Where an answer stands whose core has passed: core passed, details 3 of 6."""
    later = [section for section in kata.sections if section.lap != "core"]
    return f"core passed, details {len({*passed} & {*later})} of {len(later)}"


def section_name(section: Section) -> str:
    """core part 1, details of part 1, stretch part 4."""
    return f"{section.lap}{' of' if section.lap == 'details' else ''} part {section.part}"


def code(verdict: Verdict) -> Code:
    """What `state` says in words."""
    if verdict.broken:
        return "broken"
    if verdict.passed:
        return "passed" if verdict.solved else "part_passed"
    if verdict.trouble or verdict.first_bad is None:
        return "no_verdict"
    return "not_written" if verdict.first_bad[1].result == events.TODO else "failing"


def _parts(numbers: list[int], total: int) -> str:
    """part 2 of 4; parts 2, 3 of 4."""
    noun = "part" if len(numbers) == 1 else "parts"
    return f"{noun} {', '.join(map(str, numbers))} of {total}"


def waited(since: float | None = None) -> str:
    """How long somebody has waited, with the unit."""
    return f"{seconds_waited(since):.1f} s"


def seconds_waited(since: float | None = None) -> float:
    """How long somebody has waited: since nox began, or else since this process did."""
    try:
        since = since or float(os.environ.get(STARTED_VARIABLE, ""))
    except ValueError:
        since = psutil.Process().create_time()
    return round(max(0.0, time.time() - since), 3)


def title(job: Job) -> str:
    """What is judged: the first line of every verdict."""
    return f"{job.kata.title} - judging {shown(job.path)} on {job.device}"


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spec_of(spec: Spec) -> tuple[int, str]:
    """What the cases of one spec have in common."""
    return spec.part, spec.sentence


def cases_of(cases: list[Spec]) -> str:
    """One spec with its cases: clips the true gradients (bf16, fp16)."""
    # Several numbers, each with a name: ranks=8 rank=7.
    names = ", ".join(re.sub(r"-(?=\w+=)", " ", spec.case) for spec in cases if spec.case)
    return cases[0].sentence + (f" ({names})" if names else "")


def at(problem: Problem) -> str:
    """Where the problem is: the line as an editor understands it, and the function."""
    return problem.at + (f" in {problem.function}" if problem.function else "")
