"""`plan`: what a model far too large for this machine would need on each rank, as a table."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
from pathlib import Path

from rich.table import Table
from rich.text import Text

from desk import report, schema, source
from desk.asked import Misuse, locate, named, reference_job
from desk.one_call import OneCall, carry_out, show_problem
from desk.paper import Paper
from desk.verdict import Job, Verdict
from desk.words import waited
from kit import catalog
from kit.answers.stubs import is_untouched
from kit.catalog import Kata, shown
from kit.memory.plan import Plan, Row

_GIB = 2**30
_CARDS = (24, 40, 80)  # GiB of common GPUs


def run(name: str | None, answers: str, given: dict[str, int], limit: float, paper: Paper) -> int:
    """Print the table that the answer comes to; where nothing is written yet, the reference's."""
    kata = _kata(name)
    sizes = default_sizes(kata)
    for other in given:
        if other not in sizes:
            raise Misuse(unknown_option(f"--{other}", kata))
    sizes |= given
    options = ["-p", "desk.planner", *(f"--size={key}={number}" for key, number in sizes.items())]
    location = locate(kata, answers)
    job: Job = OneCall(kata, *location, limit=limit, function="plan", options=tuple(options))
    if answers == "katas" and is_untouched(job.path):
        paper.note(f"{kata.name}: nothing is written yet, so the reference plans instead")
        job = reference_job(job)
    paper.line(f"{kata.title} - a dry run of {shown(job.path)}", "bold")
    paper.line()
    verdict, outcome = carry_out(paper, job)
    found = outcome.plan if outcome else None
    if found:
        _draw(paper, found)
        paper.line(f"Time:    {waited()}")
    else:
        show_problem(paper, verdict, "table", "smaller sizes, or more seconds by --timeout")
    paper.report(_report(verdict, sizes, found))
    return 0 if found else 1


def _report(verdict: Verdict, sizes: dict[str, int], found: Plan | None) -> schema.Plan:
    rows = [schema.Configuration(**dataclasses.asdict(row)) for row in found.rows] if found else []
    problem = verdict.bad.problem if verdict.bad else None
    return schema.Plan(
        command="plan",
        ok=found is not None,
        kata=report.kata_name(verdict.job.kata),
        answer=shown(verdict.job.path),
        sizes=sizes,
        table=schema.Table(found.title, rows, found.notes) if found else None,
        problem=report.problem(problem) if problem else None,
        trouble=verdict.trouble,
    )


def add_sizes(command: argparse.ArgumentParser) -> None:
    """One option for each size of any kata; `run` knows which of them its own kata has."""
    defaults: dict[str, list[str]] = {}
    for kata in _planned():
        for name, number in default_sizes(kata).items():
            defaults.setdefault(name, []).append(f"{number} for {kata.name}")
    group = command.add_argument_group("sizes")
    for name, texts in defaults.items():
        words = ", ".join(texts)
        group.add_argument(f"--{name}", dest=f"size_{name}", type=_size, metavar="N", help=words)


def given_sizes(options: argparse.Namespace) -> dict[str, int]:
    """The sizes that were typed."""
    found = {key.removeprefix("size_"): n for key, n in vars(options).items() if "size_" in key}
    return {name: number for name, number in found.items() if number is not None}


def unknown_option(option: str, kata: Kata | None = None) -> str:
    """What to say of an option that is no size."""
    katas = [kata] if kata else _planned()
    names = list(dict.fromkeys(f"--{name}" for kata in katas for name in default_sizes(kata)))
    names += ["--answers", "--timeout"]
    near = difflib.get_close_matches(option.partition("=")[0], names, n=1, cutoff=0.75)
    whose = f"{kata.name} has" if kata else "there are"
    hint = f"did you mean {near[0]}?" if near else f"{whose} {', '.join(names)}"
    return f"{option} is no option here; {hint}"


def default_sizes(kata: Kata) -> dict[str, int]:
    """SIZES of the kata's plan, read and not imported, for that would take as long as torch."""
    try:
        tree = ast.parse(source.read(_file(kata)))
    except SyntaxError:
        return {}  # the run says what is wrong
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "SIZES" for target in targets):
            sizes: dict[str, int] = ast.literal_eval(getattr(node, "value"))  # noqa: B009
            return sizes
    return {}


def _size(text: str) -> int:
    """A number from 1; argparse says what is wrong and ends with exit code 2."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number


def _file(kata: Kata) -> Path:
    return kata.specs / "plan.py"


def _planned() -> list[Kata]:
    return [kata for kata in catalog.all_katas() if _file(kata).exists()]


def _kata(name: str | None) -> Kata:
    katas = _planned()
    names = ", ".join(kata.name for kata in katas)
    if name is None and len(katas) == 1:
        return katas[0]
    if not katas:
        raise Misuse("no kata has a plan")
    if name is None:
        raise Misuse(f"say which kata: nox -s plan -- NAME; those with a plan: {names}")
    kata = named(name)
    if kata not in katas:
        raise Misuse(f"{name} has no plan; those that have one: {names}")
    return kata


def _draw(paper: Paper, plan: Plan) -> None:
    unit, size = _unit(max(row.peak for row in plan.rows))
    paper.line(plan.title)
    paper.line(f"{unit} of one rank at the peak of a step, and whether they fit its GPU:")
    paper.line()
    paper.table(_table(plan.rows, size))
    paper.line()
    for number, row in enumerate(plan.rows):
        of_row = (row.bytes, row.collectives)
        same = [r.label for r in plan.rows[:number] if (r.bytes, r.collectives) == of_row]
        if same:
            why = "the option does nothing, or is not written yet"
            paper.line(f"{row.label}: all as in {same[0]}; {why}", "yellow")
    calls = [row for row in plan.rows if row.collectives]
    if calls:
        paper.line("Collective calls of a step:")
    for row in calls:
        paper.line(f"  {row.label}: {row.collectives}", hang=4)
    for note in plan.notes:
        paper.line(note, hang=2)
    paper.line()


def _table(rows: list[Row], unit: int) -> Table:
    """A column for each configuration, as its numbers are narrower than the names of kinds."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.label, justify="right", overflow="fold", vertical="bottom")
    for kind in dict.fromkeys(kind for row in rows for kind in row.bytes):
        table.add_row(kind, *(f"{row.bytes.get(kind, 0) / unit:,.2f}" for row in rows))
    table.add_row("peak", *(f"{row.peak / unit:,.2f}" for row in rows))
    for card in _CARDS:
        fits = [row.peak <= card * _GIB for row in rows]
        words = [Text("fits", "green") if good else Text("no", "red") for good in fits]
        table.add_row(f"{card} GiB", *words)
    return table


def _unit(largest: int) -> tuple[str, int]:
    """The unit in which the largest number has at least one digit before the point."""
    units = (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10))
    return next(((name, size) for name, size in units if largest >= size), ("Bytes", 1))
