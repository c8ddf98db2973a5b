"""Break the reference solutions in every small way and see whether some spec notices.

    python -m bench.mutants [KATA ...]

Cosmic Ray makes the mutants (comparisons, arithmetic, constants, and/or, break/continue, loops
that do not run, decorators, exception types); two operators here add what it lacks: every
statement deleted, every condition flipped whole. Each mutant is judged by the specs of its kata in
a forked child, so that torch is imported once, beginning with those of the function that has
changed. A mutant that no spec catches is a missing spec, or a statement that is not needed, or it
is harmless: then tests/bench/survivors.toml says why.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
import pytest
import torch
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from rich.console import Console

from kit.answers import blame
from kit.answers.contract import functions
from kit.answers.edits import used
from kit.answers.marks import clause_of
from kit.catalog import ROOT, Kata, all_katas, find_kata, tomllib
from kit.laws import suspects

SECONDS = 60  # a mutant that takes longer is caught: it loops
# These need arguments of their own, or replace annotations only.
LEFT_OUT = ("VariableReplacer", "VariableInserter")


class DeleteStatement(Operator):  # type: ignore[misc]
    """Replaces one simple statement, or a raise, return or assignment, by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt" and node.children[0].type != "string":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        nothing = parso.parse("pass").children[0]
        nothing.get_first_leaf().prefix = node.get_first_leaf().prefix
        node.children[0] = nothing
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class FlipCondition(Operator):  # type: ignore[misc]
    """Negates a whole condition: of if, elif, while, a ternary, or a comprehension."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        for _ in self._places(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        place = self._places(node)[index]
        node.children[place] = parso.parse(f" (not ({node.children[place].get_code()}))")
        return node

    @staticmethod
    def _places(node: Any) -> list[int]:
        if node.type in ("if_stmt", "while_stmt", "comp_if"):
            words = ("if", "elif", "while")
            return [
                n + 1 for n, child in enumerate(node.children) if child.get_code().strip() in words
            ]
        return [2] if node.type in ("test", "ternary") else []

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class Mutant:
    """One change to a reference solution."""

    kata: Kata
    operator: str
    line: int
    change: str  # "old line -> new line", by which survivors.toml knows it
    text: str


def mutants(kata: Kata) -> list[Mutant]:
    """Every mutant that differs from the solution in more than annotations and docstrings."""
    source = kata.solution.read_text(encoding="utf-8")
    operators: list[tuple[str, Operator]] = [
        ("DeleteStatement", DeleteStatement()),
        ("FlipCondition", FlipCondition()),
    ]
    for name in operator_names():
        short = name.rpartition("/")[2]
        if short not in LEFT_OUT:
            operators.append((short, get_operator(name)()))
    made: dict[str, Mutant] = {}
    seen = {_behaviour(source)}
    for name, operator in operators:
        for number in range(10_000):
            text = mutate_code(source, operator, number)
            if text is None:
                break
            try:
                behaviour = _behaviour(text)
            except SyntaxError:
                continue
            if behaviour not in seen:
                seen.add(behaviour)
                line, change = _change(source, text)
                made.setdefault(text, Mutant(kata, name, line, change, text))
    return sorted(made.values(), key=lambda mutant: mutant.line)


def _behaviour(source: str) -> str:
    """The program without what does not run: annotations, docstrings, protocols, imports."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_inert(s)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_inert(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) in ("Protocol", "NamedTuple") for base in node.bases)
    if isinstance(node, ast.Assign):  # type aliases
        return (
            isinstance(node.value, ast.Subscript)
            and isinstance(node.value.value, ast.Name)
            and (node.value.value.id in ("tuple", "Callable"))
        )
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass))


def _change(source: str, text: str) -> tuple[int, str]:
    old, new = source.splitlines(), text.splitlines()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if tag != "equal":
            before = " ".join(line.strip() for line in old[i1:i2])
            after = " ".join(line.strip() for line in new[j1:j2])
            return i1 + 1, f"{before.strip()} -> {after}"
    raise ValueError("nothing was changed")


def judge(mutant: Mutant) -> int:
    """Start judging in a child process; its exit status is 0 if every spec passes."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{mutant.kata.name}.py"
            path.write_text(mutant.text, encoding="utf-8")
            suspects.catalogue = lambda kata: ([], [])  # nobody reads what the cause is
            blame._others = lambda answer, function: iter(())
            status = _run_specs(mutant.kata, str(path), _Order(mutant))
    finally:
        os._exit(status)


class _Order:
    """Specs of the functions that use the line that has changed come first."""

    def __init__(self, mutant: Mutant) -> None:
        source = mutant.kata.solution.read_text(encoding="utf-8")
        changed = [
            node.name
            for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and node.lineno <= mutant.line <= (node.end_lineno or 0)
        ]
        public = {name.partition(".")[0] for name in functions(mutant.kata.solution)}
        self.first = {name for name in public if used(source, name, frozenset(public)) & {*changed}}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """They are sorted, and else in their order."""
        items.sort(key=lambda item: clause_of(item)[0].partition(".")[0] not in self.first)


def _run_specs(kata: Kata, answers: str, *plugins: object) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options = ["-x", "-q", "-p", "no:randomly", "--timeout=30"]
        return int(pytest.main([*options, f"--answers={answers}", str(kata.specs)], plugins))


def needs_cuda(mutant: Mutant) -> bool:
    """Whether the change is on a line, or in a function, that only a CUDA device can run."""
    tree = ast.parse(mutant.kata.solution.read_text(encoding="utf-8"))
    inside = any(
        isinstance(node, ast.FunctionDef)
        and "cuda" in node.name
        and node.lineno <= mutant.line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )
    return (inside or "cuda" in mutant.change) and not torch.cuda.is_available()


def survivors(todo: list[Mutant], console: Console) -> list[Mutant]:
    """Judge all mutants, one for each core at a time, and return those that every spec accepts."""
    running: dict[int, Mutant] = {}
    alive: list[Mutant] = []
    waiting = list(reversed(todo))
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            mutant = waiting.pop()
            running[judge(mutant)] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        if status == 0:
            alive.append(mutant)
            console.print(f"  survives  line {mutant.line}: {mutant.change}", markup=False)
    return sorted(alive, key=lambda mutant: mutant.line)


def main(names: list[str]) -> int:
    """Judge the mutants of the named katas, or of all; 1 if a survivor is not explained."""
    console = Console(width=100, highlight=False, soft_wrap=True)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    explained: dict[str, dict[str, str]] = tomllib.loads(
        (ROOT / "tests" / "bench" / "survivors.toml").read_text(encoding="utf-8")
    )
    unexplained = 0
    for kata in [find_kata(name) for name in names] or all_katas():
        # Also so that what specs import on their way is imported once, and not once a mutant.
        if _run_specs(kata, "solutions"):
            console.print(f"{kata.name}: the reference itself does not pass")
            return 1
        start, made = time.monotonic(), mutants(kata)
        todo = [mutant for mutant in made if not needs_cuda(mutant)]
        console.print(
            f"{kata.name}: {len(todo)} mutants, and {len(made) - len(todo)} not checked: "
            "they are on lines that need a CUDA GPU"
        )
        alive = survivors(todo, console)
        reasons = explained.get(kata.name, {})
        new = [mutant for mutant in alive if mutant.change not in reasons]
        gone = set(reasons) - {
            mutant.change for mutant in alive + [m for m in made if m not in todo]
        }
        console.print(
            f"{kata.name}: {len(todo) - len(alive)} of {len(todo)} caught, {len(alive)} survive, "
            f"{len(new)} of them unexplained, in {time.monotonic() - start:.0f} s"
        )
        for change in sorted(gone):
            console.print(f"  explained, but caught or gone: {change}", markup=False)
        unexplained += len(new) + len(gone)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
