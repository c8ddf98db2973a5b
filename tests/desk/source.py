"""What can be told about an answer by reading it: whether it compiles, and where its parts are."""

from __future__ import annotations

import ast
import copy
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from desk.events import Problem
from kit.catalog import shown

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Place:
    """A line of a file; `function` is what it stands in."""

    path: Path
    line: int
    function: str = ""

    @property
    def source(self) -> str:
        """The text of the line."""
        lines = read(self.path).splitlines()
        return lines[self.line - 1].strip() if 0 < self.line <= len(lines) else ""

    def fields(self) -> dict[str, Any]:
        """The place as the fields of a Problem."""
        return {
            "path": shown(self.path),
            "line": self.line,
            "function": self.function,
            "source": self.source,
        }


def read(path: Path) -> str:
    """The text of a file, whatever its bytes; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_file(path: Path) -> Problem | None:
    """What keeps a file from being imported at all, or None."""
    kind, where = "unreadable file", shown(path)
    if not path.exists():
        return Problem(kind, "there is no such file", expected=f"an answer in {where}", path=where)
    if path.is_dir():
        return Problem(kind, "it is a folder", expected="a Python file", path=where)
    try:
        data = path.read_bytes()
    except OSError as error:
        return Problem(kind, f"it cannot be read: {error.strerror}", path=where)
    if not data.strip():
        return Problem(kind, "the file is empty", expected=f"an answer in {where}", path=where)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        got = f"byte 0x{data[error.start]:02x} in line {line}"
        return Problem(kind, got, expected="text in UTF-8", path=where, line=line)
    return _check_syntax(path, data)


def _check_syntax(path: Path, data: bytes) -> Problem | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return syntax_problem(error, path)
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or nested too deep
        return Problem("syntax error", f"Python cannot read it: {error}", path=shown(path))
    return None


def syntax_problem(error: SyntaxError, path: Path) -> Problem:
    """A syntax error with its line and a caret."""
    line = error.lineno or 0
    text = (error.text or "").rstrip("\n") or Place(path, line).source
    indent = len(text) - len(text.lstrip())
    return Problem(
        "syntax error",
        f"{type(error).__name__}: {error.msg}",
        path=shown(path),
        line=line,
        source=text.strip(),
        caret=max((error.offset or 0) - indent, 0) if text else 0,
    )


def definitions(path: Path) -> dict[str, Definition]:
    """The functions and classes of a file by name; methods as Class.method."""
    found: dict[str, Definition] = {}
    for node in _statements(path):
        if isinstance(node, Definition):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            members = [member for member in node.body if isinstance(member, Definition)]
            found |= {f"{node.name}.{member.name}": member for member in members}
    return found


def digests(path: Path) -> dict[str, str]:
    """What each function and class of a file comes to, with all of the file that it leans on.

    Comments and spaces do not count. Nothing for a file that cannot be read.
    """
    statements, loose = _statements(path), list[ast.stmt]()  # what binds no name is for everything
    bound: dict[str, list[ast.stmt]] = {}  # a name may be bound twice
    for statement in statements:
        names = _bound_names(statement)
        for name in names:
            bound.setdefault(name, []).append(statement)
        loose += [] if names else [statement]
    definitions = [node.name for node in statements if isinstance(node, Definition)]
    try:
        return {name: _digest([*loose, *_leans_on(name, bound)]) for name in definitions}
    except RecursionError:  # nested too deep to be written out
        return {}


def _statements(path: Path) -> list[ast.stmt]:
    """Those at the top of a file; none if Python cannot read it, which `check_file` says better."""
    try:
        return ast.parse(read(path)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _bound_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, Definition):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _leans_on(name: str, bound: dict[str, list[ast.stmt]]) -> list[ast.stmt]:
    """The statements that bind a name, and those that bind what they use, and so on."""
    seen, ahead = {name}, [name]
    while ahead:
        nodes = [node for found in bound[ahead.pop()] for node in ast.walk(found)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        ahead += (fresh := (used & bound.keys()) - seen)
        seen |= fresh
    return [statement for name in sorted(seen) for statement in bound[name]]


def _digest(statements: list[ast.stmt]) -> str:
    text = "\n".join(ast.dump(statement) for statement in statements)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def imports(path: Path) -> list[str]:
    """The modules that a file imports at its top."""
    nodes = _statements(path)
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]


def find(path: Path, name: str) -> Place:
    """Where a function, class or Class.method is defined; line 0 if it is not.

    A method that is inherited is looked for in the class.
    """
    nodes = definitions(path)
    found = name if name in nodes else name.partition(".")[0]
    return Place(path, nodes[found].lineno, found) if found in nodes else Place(path, 0)


def signature(path: Path, name: str) -> str | None:
    """How a function, a method, or for a class its constructor is called, without types."""
    nodes = definitions(path)
    node = nodes.get(name)
    if isinstance(node, ast.ClassDef):
        node = nodes.get(f"{name}.__init__")
    if node is None or isinstance(node, ast.ClassDef):
        return None
    arguments = copy.deepcopy(node.args)
    if (name != node.name or node.name == "__init__") and arguments.args:
        del arguments.args[0]  # self
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"{name.removesuffix('.__init__')}({ast.unparse(arguments)})"
