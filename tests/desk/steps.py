"""What to do after a verdict, with the commands."""

from __future__ import annotations

from desk import events
from desk.asked import PATHS
from desk.events import Outcome, Problem, Spec
from desk.verdict import Job, Verdict
from kit.catalog import shown

ALL_SOLVED = "nox -s reset -- NAME --force   (starts one afresh and keeps a copy of your work)"


def next_steps(verdict: Verdict) -> list[tuple[str, str]]:
    """What to do now, with the commands."""
    job = verdict.job
    whose = job.answers if job.answers in PATHS else shown(job.path)
    again = f"nox -s kata -- {job.kata.name}"
    options = "" if whose == "katas" else f" --answers {whose}"
    options += "" if job.device == "cpu" else f" --device {job.device}"
    if verdict.solved:
        return [("Next", "nox -s kata   (the next unsolved kata)")] if whose == "katas" else []
    if verdict.passed:
        judged = max(section.part for section in job.asked)
        later = [part.number for part in job.kata.parts if part.number > judged]
        return [("Next", f"{again} {later[0]}{options}" if later else f"{again}{options}")]
    again += f"{options}" if job.is_whole else f" {job.sections[0].part}{options}"
    if verdict.broken and whose == "katas" and not job.path.exists():
        fresh = f"nox -s reset -- {job.kata.name}   (writes a fresh {shown(job.path)})"
        return [("Next", fresh)]
    if verdict.broken:
        return [("Next", f"fix {verdict.broken.problem.at}"), ("then", again)]
    if verdict.trouble or verdict.first_bad is None:
        return [("Next", again)]
    spec, outcome = verdict.first_bad
    verb = "write" if outcome.result == events.TODO else "fix"
    part = _part_at_fault(verdict, spec, outcome.problem)
    hint = f"nox -s hint -- {job.kata.name} {part}"
    if part not in {spec.part, *(section.part for section in verdict.known)}:
        # What it should do is seen there.
        again = f"nox -s kata -- {job.kata.name} {part}{options}"
    steps = [("Next", f"{verb} {_where(outcome, job)}"), ("then", again), ("a hint", hint)]
    if outcome.charts and job.kata.has_timeline:
        steps.append(("picture", f"nox -s timeline -- {job.kata.name}{options}"))
    return steps


def _part_at_fault(verdict: Verdict, spec: Spec, problem: Problem | None) -> int:
    """The part of the function at fault, which need not be that of the spec."""
    if problem and problem.kind == "wrong":
        for other in verdict.specs:
            if other.function.partition(".")[0] == problem.function != spec.function:
                return other.part
    return spec.part


def _where(outcome: Outcome, job: Job) -> str:
    """The function that is to be changed, and its line."""
    problem = outcome.problem
    if problem is None:
        return shown(job.path)
    return f"{problem.function} in {problem.at}" if problem.function else problem.at
