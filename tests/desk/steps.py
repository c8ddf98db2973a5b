"""What to do after a verdict, with the commands."""

from __future__ import annotations

from desk import events
from desk.asked import PATHS
from desk.verdict import Verdict, part_files
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
        later = [number for number in part_files(job.kata) if number > max(job.parts)]
        return [("Next", f"{again} {later[0]}{options}" if later else f"{again}{options}")]
    again += f"{options}" if job.is_whole else f" {job.parts[0]}{options}"
    if verdict.broken and whose == "katas" and not job.path.exists():
        fresh = f"nox -s reset -- {job.kata.name}   (writes a fresh {shown(job.path)})"
        return [("Next", fresh)]
    if verdict.broken:
        return [("Next", f"fix {verdict.broken.problem.at}"), ("then", again)]
    if verdict.trouble or verdict.first_bad is None:
        return [("Next", again)]
    spec, outcome = verdict.first_bad
    at = outcome.problem.at if outcome.problem else shown(job.path)
    todo = f"write {spec.subject or 'it'} in {at}" if outcome.result == events.TODO else f"fix {at}"
    hint = f"nox -s hint -- {job.kata.name} {spec.part}"
    return [("Next", todo), ("then", again), ("a hint", hint)]
