"""One call instead of specs, judged as one: the `plan` or the `timeline` of a kata."""

from __future__ import annotations

from dataclasses import dataclass

from desk import events
from desk.asked import Misuse
from desk.events import TODO_KIND, Outcome
from desk.judge import judge
from desk.paper import Paper
from desk.screen import Screen
from desk.verdict import Job, Verdict
from desk.words import at


@dataclass(frozen=True)
class OneCall(Job):
    """The function that is called, of a file of its name, and what its plugin is told."""

    function: str = ""
    options: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """What pytest is told to run."""
        call = f"{self.kata.specs / self.function}.py::{self.function}"
        return [call, "-o", f"python_functions={self.function}", *self.options]

    @property
    def may_share(self) -> bool:
        """There is one thing to run."""
        return False


def carry_out(paper: Paper, job: Job) -> tuple[Verdict, Outcome | None]:
    """The verdict, and what the call came to if it has passed; Misuse says why it is skipped."""
    paper.status(f"running, for {job.limit:g} s at most")
    verdict = judge(job)
    paper.status()
    outcome = next(iter(verdict.outcomes.values()), None)
    if outcome and outcome.result == events.SKIPPED:
        raise Misuse(outcome.reason.removeprefix("Skipped: "))
    return verdict, outcome if verdict.passed else None


def show_problem(paper: Paper, verdict: Verdict, what: str, in_time: str) -> None:
    """Why there is no such thing, and what to do; `in_time`: so that it ends before its limit."""
    screen = Screen(paper, verdict.job)
    bad = verdict.bad
    problem = bad.problem if bad else None
    step = f"nox -s kata -- {verdict.job.kata.name}"
    if not bad or not problem:
        screen.trouble(verdict)
    elif problem.kind == TODO_KIND:
        paper.line(f"There is no {what} before this is written: {at(problem)}")
    else:
        paper.line(f"There is no {what}: {problem.kind}", "bold red")
        paper.line()
        screen.problem(problem, bad.prints)
        if problem.kind == "time-out":
            step = in_time
    paper.line()
    paper.steps([("Next", step)])
