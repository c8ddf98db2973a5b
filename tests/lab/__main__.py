"""`nox -s lab`: run the experiments that are wanted, and write the report."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import pkgutil
import signal
import sys
import webbrowser
from pathlib import Path
from types import ModuleType

from kit import forkserver

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is measured yet: an end without a word
    if "--list" not in sys.argv:
        forkserver.start()  # it imports torch while the rest is imported here

# ruff: isort: split
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kit.catalog import ROOT, shown
from kit.memory import gpu
from lab import experiments, quiet, report
from lab.notebook import Page, conditions
from lab.runner import Job, carry_out_all

_AT_ONCE = 2  # with more, what is timed would wait for too many


def all_experiments() -> list[ModuleType]:
    """The modules of lab.experiments in their order."""
    names = [module.name for module in pkgutil.iter_modules(experiments.__path__)]
    found = [importlib.import_module(f"lab.experiments.{name}") for name in names]
    return sorted(found, key=lambda module: module.ORDER)


def name_of(experiment: ModuleType) -> str:
    """What it is called at the command line: the name of its file."""
    return experiment.__name__.rpartition(".")[2]


def main(words: list[str] | None = None) -> int:
    """Run the command; 0 if all that was wanted has been measured, 2 for a slip of the hand.

    An experiment that breaks off is told, and the others go on.
    """
    console = Console(highlight=False)
    options = _parser().parse_args(words)
    known = {name_of(experiment): experiment for experiment in all_experiments()}
    for name in options.names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            console.print(f"no experiment {name!r}: {hint}", style="bold red")
            return 2
    if options.list:
        _list(console, known, quick=options.quick)
        return 0
    wanted = [known[name] for name in options.names] or list(known.values())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(options.out).resolve()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pages = _carry_out(console, wanted, folder, device, quick=options.quick)
    except KeyboardInterrupt:
        console.print(
            "Interrupted. What was measured is kept; the same command goes on from there."
        )
        return 130
    path = report.write(folder, pages, conditions(device, quick=options.quick))
    where = f"Report: {shown(path)}, and report.md, report.json and plots/ beside it"
    console.print(where, soft_wrap=True)  # a path is not cut in two
    if options.open:
        webbrowser.open(path.as_uri())
    return 0 if all(page.is_whole for page in pages) else 1


def _carry_out(
    console: Console, wanted: list[ModuleType], folder: Path, device: torch.device, *, quick: bool
) -> list[Page]:
    at_once = min(len(wanted), _AT_ONCE, quiet.cores())
    if device.type == "cuda":
        gpu.prepare(device)
        at_once = 1
    seconds = {name_of(experiment): _seconds(experiment, quick=quick) for experiment in wanted}
    total = sum(seconds.values())
    console.print(f"{len(wanted)} experiments on {device}, about {_minutes(total / at_once)}")
    jobs = [
        Job(one.run, Page(name_of(one), one.TITLE, one.QUESTION), folder, device, quick)
        for one in wanted
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def tell(pages: list[Page]) -> None:
            progress.update(task, description=", ".join(page.title for page in pages))

        jobs.sort(key=lambda job: -seconds[job.page.name])  # no long one is left for the end
        found = dict[str, Page]()
        for ended in carry_out_all(jobs, at_once, tell):
            if ended.where:
                progress.console.print(ended.where, markup=False)
            progress.console.print(f"  {ended.page.title}: {ended.how}")
            progress.advance(task, seconds[ended.page.name])
            found[ended.page.name] = ended.page
    return [found[name] for name in seconds]


def _list(console: Console, known: dict[str, ModuleType], *, quick: bool) -> None:
    table = Table.grid(padding=(0, 2))
    for name, experiment in known.items():
        table.add_row(name, experiment.QUESTION, _minutes(_seconds(experiment, quick=quick)))
    console.print(table)


def _seconds(experiment: ModuleType, *, quick: bool) -> float:
    return float(experiment.SECONDS["quick" if quick else "full"])


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s lab --", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which experiments (all)")
    parser.add_argument("--list", action="store_true", help="list them, with a question each")
    parser.add_argument("--quick", action="store_true", help="all of it in under three minutes")
    parser.add_argument("--open", action="store_true", help="show the report in the browser")
    parser.add_argument("--out", default=str(ROOT / "lab-report"), help="where to (lab-report/)")
    return parser


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sys.exit(main())
