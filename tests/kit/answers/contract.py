"""The contract of a kata as data: what the docstrings of the reference promise, clause by clause.

    The first paragraph is the summary. Then come layers, which are known by their form:

        law  of one name in a table, indented by four; two spaces or more stand after the name,
             and a line that goes on is indented deeper

    Args:
        name: of an argument.
    Returns:
        a sentence.
    Raises:
        a sentence.

    Details:
        1. A sentence.

The file is read and never imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# The name of a law or of an argument, "Returns", "Raises", or the number of a detail.
Clause = str | int

_SECTION = re.compile(r"(Args|Returns|Raises|Details):$")
_LAW = re.compile(r" {4}(\S+(?: \S+)*) {2,}(\S.*)$")
_ARGUMENT = re.compile(r" {4}(\*{0,2}\w+): +(\S.*)$")
_DETAIL = re.compile(r" {4}(\d+)\. +(\S.*)$")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Contract:
    """What the docstring of one function, class or method promises."""

    summary: str = ""
    laws: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: str = ""
    details: dict[int, str] = field(default_factory=dict)

    def clause(self, clause: Clause) -> str:
        """The sentence of a clause; nothing if there is no such clause."""
        if isinstance(clause, int):
            return self.details.get(clause, "")
        sections = {"Returns": self.returns, "Raises": self.raises}
        return sections.get(clause) or self.laws.get(clause) or self.args.get(clause, "")


def contract_of(path: Path, function: str) -> Contract:
    """The contract of a function, a class or a method ("LossScaler.update") of the file."""
    return parse(_docstrings(path.read_text(encoding="utf-8")).get(function, ""))


def sentence(path: Path, function: str, clause: Clause) -> str:
    """The clause as people read it: "train_step, detail 2: ..."; nothing if there is none.

    A law of the module holds for every function.
    """
    found = contract_of(path, function).clause(clause) or contract_of(path, "").laws.get(
        str(clause)
    )
    name = f"detail {clause}" if isinstance(clause, int) else clause
    return f"{function}, {name}: {found}" if found else ""


def functions(path: Path) -> list[str]:
    """Everything in the file that a candidate sees and that has a docstring."""
    return [name for name in _docstrings(path.read_text(encoding="utf-8")) if name]


def words(path: Path, stretch: Collection[str] = ()) -> tuple[int, int]:
    """How many words a candidate reads: in the core lap, and after it.

    The first are those without the details, and without the functions and classes of `stretch`.
    """
    core = details = 0
    for name, text in _docstrings(path.read_text(encoding="utf-8")).items():
        later = sum(len(detail.split()) for detail in parse(text).details.values())
        first = sum(len(line.split()) for section, line in _lines(text) if section != "Details")
        is_stretch = name.partition(".")[0] in stretch
        core += 0 if is_stretch else first
        details += later + (first if is_stretch else 0)
    return core, details


def parse(text: str) -> Contract:
    """What a docstring says whose own indentation is gone."""
    found = Contract(summary=" ".join(text.partition("\n\n")[0].split()))
    forms = {"": (_LAW, found.laws), "Args": (_ARGUMENT, found.args)}
    last: str | None = None  # the law or argument that a deeper line belongs to
    detail = 0
    for section, line in _lines(text):
        is_deeper = line.startswith(" " * 5)
        if section == "Details":
            if match := _DETAIL.match(line):
                detail = int(match[1])
                found.details[detail] = match[2]
            elif detail and is_deeper:
                found.details[detail] += f" {line.strip()}"
        elif section == "Returns":
            found.returns = f"{found.returns} {line.strip()}".strip()
        elif section == "Raises":
            found.raises = f"{found.raises} {line.strip()}".strip()
        else:
            form, table = forms[section]
            if match := form.match(line):
                last = match[1]
                table[last] = match[2]
            elif last in table and is_deeper:
                table[last] += f" {line.strip()}"
            else:
                last = None
    return found


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The lines of prose, each with the section that it stands in; code is left out."""
    section, is_code = "", False
    for line in text.splitlines():
        if not line.strip():
            is_code = False
        elif match := _SECTION.match(line):
            section = match[1]
        else:
            is_code = is_code or line.lstrip().startswith(">>>")
            if not line.startswith(" "):
                section = ""
            if not is_code:
                yield section, line


@cache
def _docstrings(text: str) -> dict[str, str]:
    """The docstrings of a file by name; that of the module has the name ""."""
    tree = ast.parse(text)
    nodes: dict[str, ast.Module | _Definition] = {"": tree}
    for node in _public(tree):
        nodes[node.name] = node
        if isinstance(node, ast.ClassDef):
            nodes |= {f"{node.name}.{member.name}": member for member in _public(node)}
    found = {name: ast.get_docstring(node, clean=False) or "" for name, node in nodes.items()}
    return {name: _at_the_margin(text, nodes[name]) for name, text in found.items() if text}


def _at_the_margin(text: str, node: ast.Module | _Definition) -> str:
    """Without the indentation of its definition; that of its lines may all be deeper."""
    indent = " " * (0 if isinstance(node, ast.Module) else node.col_offset + 4)
    return "\n".join(line.removeprefix(indent) for line in text.strip().splitlines())


def _public(owner: ast.Module | ast.ClassDef) -> list[_Definition]:
    """What a stub keeps of it: all but private names."""
    members = [node for node in owner.body if isinstance(node, _Definition)]
    return [node for node in members if re.match(r"__|[^_]", node.name)]
