"""`kata`: judge one answer, or a part of it, and show why it is right or wrong."""

from __future__ import annotations

import dataclasses

from desk import board, report, schema, solved
from desk.asked import Misuse, junit_file, katas_of, locate, part_named
from desk.gpu import why_no_cuda
from desk.judge import judge
from desk.paper import Paper
from desk.screen import Screen
from desk.state import Record, State
from desk.steps import ALL_SOLVED, next_steps
from desk.verdict import Job
from desk.words import title
from kit.answers.stubs import is_untouched
from kit.catalog import shown


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was asked for; `name` may be a number, and `part` is None for the whole kata."""

    name: str | None = None
    part: str | None = None
    answers: str = "katas"
    device: str = "cpu"
    run_all: bool = False
    verbose: bool = False
    limit: float = 20.0
    junitxml: str = ""


def run(wanted: Wanted, paper: Paper) -> int:
    """Judge the named kata, or the one in hand; 0 only if all that could run has passed."""
    verdicts = _verdicts(wanted, paper)
    ok = verdicts is not None and all(verdict.passed for verdict in verdicts)
    paper.report(report.judged("kata", verdicts or [], ok))
    return 0 if ok else 1


def _verdicts(wanted: Wanted, paper: Paper) -> list[schema.Verdict] | None:
    """The verdicts, none if there is nothing to judge; None if nothing can be judged here."""
    jobs = _jobs(wanted)
    if wanted.device == "cuda" and (reason := why_no_cuda()):
        paper.note(reason)
        return None
    state = State(paper.note, wanted.device)
    if wanted.name is None and wanted.answers == "katas":
        jobs = _in_hand(jobs, state, paper)
    verdicts = []
    for job in jobs:
        verdicts.append(_judge(paper, state, wanted, job))
        if not verdicts[-1].passed:
            break
    return verdicts


def _in_hand(jobs: list[Job], state: State, paper: Paper) -> list[Job]:
    """The one about the kata to work at; none, which is said, if every kata is solved."""
    standings = board.all_standings(state)
    solved = [found for found in standings if not found.steps]
    for found in solved:
        paper.note(f"{found.kata.name}: {found.words}, unchanged")
    todo = board.in_hand(standings)
    if todo is None:
        paper.line("Every kata is solved.", "bold green")
        paper.steps([("Next", ALL_SOLVED)])
        return []
    if solved:
        paper.line()
    return [job for job in jobs if job.kata == todo.kata]


def _jobs(wanted: Wanted) -> list[Job]:
    katas = katas_of(wanted.name, wanted.answers)
    part = part_named(katas[0], wanted.part) if wanted.part else 0
    if wanted.junitxml and wanted.name is None and len(katas) > 1:
        raise Misuse("--junitxml is for one kata: nox -s kata -- NAME --junitxml=FILE")
    locations = [locate(kata, wanted.answers) for kata in katas]
    junitxml = junit_file(wanted.junitxml) if wanted.junitxml else None
    return [
        Job(
            *(kata, *location),
            device=wanted.device,
            run_all=wanted.run_all,
            limit=wanted.limit,
            sections=tuple(kata.sections_of(part)),
            junitxml=junitxml,
        )
        for kata, location in zip(katas, locations, strict=True)
    ]


def _judge(paper: Paper, state: State, wanted: Wanted, job: Job) -> schema.Verdict:
    """Judge and show each spec as it ends; keep the verdict if the answer is the candidate's."""
    own = job.answers == "katas"
    before = state.fingerprint(job.kata) if own else None
    record = state.read(job.kata) if own else None
    if record and before and wanted.part is None and not is_untouched(job.path):
        may_skip = not (record.changed(before) or wanted.verbose or job.junitxml)
        job = planned(job, record, may_skip=may_skip)
    paper.line(title(job), "bold")
    if [*job.sections] != [section for section in job.kata.sections if section in job.sections]:
        paper.line("What you have changed, and what failed last time, is judged first.")
    paper.line()
    screen = Screen(paper, job, wanted.verbose)
    paper.status("starting")
    verdict = judge(job, screen.show)
    steps = next_steps(verdict)
    screen.close(verdict)
    if before:
        state.keep(verdict, before, steps)
    if job.junitxml and not job.junitxml.exists():
        paper.note(f"The run did not come to its end, so there is no {shown(job.junitxml)}.")
    if own and verdict.solved:
        solved.show(paper, verdict)
    paper.steps(steps)
    return report.verdict(verdict, steps)


def planned(job: Job, record: Record, *, may_skip: bool) -> Job:
    """What is about changed functions comes first, then the section that failed last.

    Of the first, the spec that failed last comes before all: whoever has mended it wants to know.
    Core comes before details until it has passed once. What has passed with this very code need not
    run.
    """
    if job.run_all:
        return job
    sections = job.kata.sections
    before = [found for found in record.passed_sections if found.section in sections]
    if not may_skip or len(before) == len(sections):
        before = []  # whoever asks for a kata that has passed wants to see it judged
    known = {found.section for found in before}
    todo = [section for section in sections if section not in known]
    todo.sort(key=lambda section: section != record.failed)
    is_past = record.failed.lap != "core" if record.failed else record.core_passed(job.kata)
    return dataclasses.replace(
        job,
        sections=tuple(todo),
        before=tuple(before),
        changed=record.changed_functions(job.path),
        failed=record.spec,
        past_core=is_past,
    )
