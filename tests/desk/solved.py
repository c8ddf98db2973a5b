"""What follows a kata that is solved: the figures beside the reference's, and what to ask next."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from rich.table import Table

from desk import source
from desk.paper import Paper
from desk.verdict import Figure, Verdict
from kit.catalog import Kata, shown

_SECTION = re.compile(
    r"^## [^\n]*(?:ask next|follow-up)[^\n]*\n(.*?)(?=^## |\Z)", re.M | re.S | re.I
)
_QUESTION = re.compile(r"^- \*(.+?)\*", re.M | re.S)
_MOST_QUESTIONS = 2
_MOST_ROWS = 10
_FAR_ABOVE = 1.10


def show(paper: Paper, verdict: Verdict) -> None:
    """The figures, where to read on, and two questions that an interviewer asks next."""
    passed = [*verdict.job.before, *verdict.passed_sections]
    figures = _worst([figure for found in passed for figure in found.figures])
    shown_here = sorted(figures, key=_ratio, reverse=True)[:_MOST_ROWS]
    if figures:
        paper.line()
        in_order = sorted(shown_here, key=lambda figure: figure.part)
        paper.table(_table(in_order))
    if more := len(figures) - len(shown_here):
        paper.line(f"... and {more} more, none of them farther above the reference; see -v")
    question = ": what is there that need not be?"  # once is enough
    for figure in shown_here:
        sizes = _sizes(figure)
        if sizes["yours"] > _FAR_ABOVE * sizes["reference"]:
            texts = _texts(figure)
            both = f"yours {texts['yours']}, reference {texts['reference']}"
            paper.line(f"{_name(figure)}: {both}{question}", hang=4)
            question = ""
    _read_on(paper, verdict.job.kata)


def questions(walk_through: Path) -> list[str]:
    """The first questions of the walk-through's section of follow-up questions."""
    section = _SECTION.search(source.read(walk_through))
    found = _QUESTION.findall(section.group(1)) if section else []
    return [" ".join(question.split()) for question in found[:_MOST_QUESTIONS]]


def _read_on(paper: Paper, kata: Kata) -> None:
    walk_through = kata.solution.with_suffix(".md")
    paper.line()
    reading = {"Read the reference beside your answer, aloud:": shown(kata.solution)}
    if walk_through.exists():
        reading["What an interviewer looks for in it:"] = shown(walk_through)
    if kata.has_timeline:
        reading["A step of yours as a picture, beside it:"] = f"nox -s timeline -- {kata.name}"
    reading["What articles claim of it, measured:"] = "nox -s lab -- --quick --open"
    for what, where in reading.items():
        paper.line(f"{what:<46}{where}")
    if asked := questions(walk_through):
        paper.line("An interviewer asks next (answer before you look them up):")
    for question in asked:
        paper.line(f"  - {question}", hang=4)
    paper.line()


def _worst(figures: list[Figure]) -> list[Figure]:
    """Of the cases of one bar, the one that is farthest above the reference."""
    cases: dict[tuple[int, str], list[Figure]] = {}
    for figure in figures:
        if {"yours", "reference"} <= _sizes(figure).keys():
            cases.setdefault((figure.part, figure.chart.title), []).append(figure)
    # The case says something only where there are several.
    return [
        max(found, key=_ratio) if len(found) > 1 else dataclasses.replace(found[0], case="")
        for found in cases.values()
    ]


def _ratio(figure: Figure) -> float:
    sizes = _sizes(figure)
    return sizes["yours"] / max(1, sizes["reference"])


def _table(figures: list[Figure]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("Part")
    table.add_column("Bytes", overflow="fold")
    for label in ("yours", "reference", "limit"):
        table.add_column(label, justify="right", no_wrap=True)
    for figure in figures:
        texts = _texts(figure)
        numbers = (texts["yours"], texts["reference"], texts.get("limit", ""))
        table.add_row(str(figure.part), _name(figure), *numbers)
    return table


def _name(figure: Figure) -> str:
    return figure.chart.title + (f" ({figure.case})" if figure.case else "")


def _sizes(figure: Figure) -> dict[str, int]:
    return {label: size for label, size, _ in figure.chart.rows}


def _texts(figure: Figure) -> dict[str, str]:
    return {label: text for label, _, text in figure.chart.rows}
