"""The report of the lab: one HTML page that asks the network for nothing, Markdown, and JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from lab.claims import ARTICLES, CLAIMS
from lab.notebook import Block, Code, Measured, Page, Table, Text, as_json

HEADINGS = ["article", "claims", "measured", "verdict", "under which conditions"]


def write(folder: Path, pages: list[Page], conditions: dict[str, Any]) -> Path:
    """Write index.html, report.md and report.json; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"version": 1, "conditions": conditions, "experiments": [as_json(p) for p in pages]}
    (folder / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (folder / "report.md").write_text("\n".join(_markdown(pages, conditions)), encoding="utf-8")
    path = folder / "index.html"
    path.write_text(_html(folder, pages, conditions), encoding="utf-8")
    return path


def where(conditions: dict[str, Any]) -> str:
    """On what it was measured, in a line."""
    device = conditions["gpu"] or f"cpu, {conditions['cores']} cores ({conditions['processor']})"
    size = ", quick" if conditions["quick"] else ""
    return f"{device}; torch {conditions['torch']}, Python {conditions['python']}{size}"


def claims_of(pages: list[Page]) -> list[list[str]]:
    """A row for each numeric claim of the articles, also of those that were not measured."""
    found = {measured.claim: measured for page in pages for measured in page.claims}
    rows = []
    for name, claim in CLAIMS.items():
        got = found.get(name, Measured(name, "", "not measured", "its experiment did not run"))
        at = f"{claim.article}, {claim.where}"
        rows.append([at, claim.text, got.measured, got.verdict, got.when])
    return rows


def _markdown(pages: list[Page], conditions: dict[str, Any]) -> Iterator[str]:
    yield "# Claims and measurements\n"
    yield f"{where(conditions)}\n"
    yield from (f"- {name}: {title}" for name, title in ARTICLES.items())
    for page in pages:
        yield f"\n## {page.title}\n"
        yield f"*{page.question}* ({page.seconds:.0f} s)\n"
        for block in page.blocks:
            if isinstance(block, Text):
                yield f"{block.text}\n"
            elif isinstance(block, Table):
                yield f"**{block.title}**\n"
                yield from _markdown_table(block.columns, block.rows)
            elif isinstance(block, Code):
                yield f"**{block.title}**\n"
                for name, source in block.programs.items():
                    yield f"{name}:\n\n```python\n{source}\n```\n"
            else:
                yield f"![{block.title}. {block.alt}](plots/{block.name}.png)\n"
    yield "\n## Every claim\n"
    yield from _markdown_table(HEADINGS, claims_of(pages))


def _markdown_table(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _html(folder: Path, pages: list[Page], conditions: dict[str, Any]) -> str:
    links = "".join(f'<li><a href="#{p.name}">{html.escape(p.title)}</a></li>' for p in pages)
    body = "".join(_section(folder, page) for page in pages)
    table = _html_table("Every numeric claim of the articles", HEADINGS, claims_of(pages))
    articles = "".join(
        f"<li><b>{name}</b>: {html.escape(title)}</li>" for name, title in ARTICLES.items()
    )
    template = files("lab").joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "where": html.escape(where(conditions)),
        "links": links + '<li><a href="#claims">Every claim</a></li>',
        "body": body,
        "claims": table,
        "articles": articles,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def _section(folder: Path, page: Page) -> str:
    blocks = "".join(_block(folder, block) for block in page.blocks)
    return (
        f'<section id="{page.name}"><h2>{html.escape(page.title)}</h2>'
        f'<p class="question">{html.escape(page.question)} '
        f"<small>({page.seconds:.0f} s)</small></p>{blocks}</section>"
    )


def _block(folder: Path, block: Block) -> str:
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Table):
        return _html_table(block.title, block.columns, block.rows)
    if isinstance(block, Code):
        programs = "".join(
            f"<div><p>{html.escape(name)}</p>"
            f'<pre tabindex="0"><code>{html.escape(source)}</code></pre></div>'
            for name, source in block.programs.items()
        )
        return f'<h3>{html.escape(block.title)}</h3><div class="code">{programs}</div>'
    svg = (folder / "plots" / f"{block.name}.svg").read_text(encoding="utf-8")
    label = html.escape(f"{block.title}. {block.alt}", quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return (
        f'<figure id="{block.name}">{svg}<figcaption>{html.escape(block.alt)}</figcaption></figure>'
    )


def _html_table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    label = html.escape(title, quote=True)
    # It scrolls by itself on a narrow screen, by keyboard too.
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{label}">'
        f"<table><caption>{html.escape(title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
