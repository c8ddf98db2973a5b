"""`nox -s lab`: run the experiments that are wanted, and write the report."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import pkgutil
import sys
import time
import webbrowser
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kit.catalog import ROOT, shown
from kit.memory import gpu
from lab import experiments, report
from lab.notebook import Lab, NotHere, Page, conditions


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
    if device.type == "cuda":
        gpu.prepare(device)
    pages = []
    estimates = [_seconds(experiment, quick=quick) for experiment in wanted]
    console.print(f"{len(wanted)} experiments on {device}, about {_minutes(sum(estimates))}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(estimates))
        for experiment, estimate in zip(wanted, estimates, strict=True):
            progress.update(task, description=experiment.TITLE)
            page = Page(name_of(experiment), experiment.TITLE, experiment.QUESTION)
            start = time.perf_counter()
            lab = Lab(page, folder, device, quick=quick)
            try:
                experiment.run(lab)
                ended = f"{time.perf_counter() - start:.0f} s"
            except NotHere as reason:
                ended = f"not measured here: {reason}"
                lab.say(_sentence(ended))
            except Exception as error:
                progress.console.print_exception(max_frames=8)
                ended = f"broke off: {type(error).__name__}: {error}"
                lab.say(_sentence(ended))
                page.is_whole = False
            progress.console.print(f"  {experiment.TITLE}: {ended}")
            progress.advance(task, estimate)
            pages.append(page)
    return pages


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


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
