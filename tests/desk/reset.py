"""`reset`: a fresh stub, never over somebody's work unasked."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from desk import report, schema
from desk.asked import named
from desk.paper import Paper
from desk.state import write_whole
from kit import catalog
from kit.answers.stubs import is_untouched, make_stub
from kit.catalog import Kata, shown


def run(name: str | None, force: bool, paper: Paper) -> int:
    """Write the stub of the named kata, or of every kata; 1 if one was kept because of its work."""
    katas = [named(name)] if name else catalog.all_katas()
    # Every kata gets its turn before the exit code is known.
    stubs = [_reset(paper, kata, force) for kata in katas]
    ok = all(stub.written for stub in stubs)
    if name and ok:
        paper.steps([("Next", f"open {stubs[0].path} and write part 1")])
    paper.report(schema.Reset(command="reset", ok=ok, stubs=stubs))
    return 0 if ok else 1


def _reset(paper: Paper, kata: Kata, force: bool) -> schema.Stub:
    path, kept = kata.stub, ""
    name = report.kata_name(kata)
    stub = make_stub(kata.solution.read_text(encoding="utf-8"))
    if path.exists() and not is_untouched(path):
        if not force:
            paper.line(f"{shown(path)} has somebody's work in it and was left as it is.")
            paper.line(f"  To keep a copy and start afresh: nox -s reset -- {kata.name} --force")
            return schema.Stub(name, shown(path), written=False, kept="")
        kept = shown(_keep(path))
        paper.line(f"{shown(path)} is kept as {kept}")
    write_whole(path, stub)
    paper.line(f"{shown(path)} is a fresh stub.")
    return schema.Stub(name, shown(path), written=True, kept=kept)


def _keep(path: Path) -> Path:
    """Give the file another name, one that is free."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.stem}.old-{number}.py")
        try:
            os.link(path, kept)  # unlike a rename, it never replaces a file
        except FileExistsError:
            continue
        return kept
    raise AssertionError("unreachable")
