"""A stub is the reference solution with its bodies taken out, so that nothing is typed twice.

What goes: the bodies of public functions and methods, everything whose name starts with an
underscore, and imports that nothing left in the file uses. What stays: docstrings, signatures, and
given code, which is every NamedTuple, Protocol, dataclass and public constant.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

# The last line of a stub: a digest of all lines before it, by which an untouched stub is known,
# whichever version of the solution it came from.
_MARK = re.compile(r"\n# untouched stub ([0-9a-f]{12})\n?\Z")


def make_stub(solution: str) -> str:
    """The stub for the text of a reference solution."""
    tree = ast.parse(solution)
    lines: list[str | None] = list(solution.splitlines())
    for node in tree.body:
        if _is_private(node):
            _drop(lines, node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _take_body(lines, node)
        elif isinstance(node, ast.ClassDef) and not _is_given(node):
            _strip_class(lines, node)
    text = _drop_unused_imports("\n".join(line for line in lines if line is not None) + "\n")
    text = re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n"
    text = re.sub(r"\n{3}(?= )", "\n\n", text)  # as formatters have it inside a class
    return f"{text}\n\n# untouched stub {_digest(text)}\n"


def is_untouched(path: Path) -> bool:
    """Whether the file is a stub that nobody has written in, of this or an older version."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    mark = _MARK.search(text)
    return mark is not None and mark.group(1) == _digest(text[: mark.start()].rstrip("\n") + "\n")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _is_private(node: ast.stmt) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name.startswith("_")
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id.startswith("_") for t in node.targets)
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id.startswith("_")
    )


def _is_given(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(part) for part in [*node.bases, *node.decorator_list]]
    given = ("NamedTuple", "Protocol", "dataclass")
    return any(kind in mark for mark in marks for kind in given)


def _strip_class(lines: list[str | None], node: ast.ClassDef) -> None:
    for member in node.body:
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if member.name.startswith("_") and not member.name.startswith("__"):
                _drop(lines, member)
            else:
                _take_body(lines, member)


def _take_body(lines: list[str | None], node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    for decorator in node.decorator_list:
        # The others, torch.no_grad for one, are part of the answer.
        if ast.unparse(decorator) not in ("property", "staticmethod", "classmethod"):
            _blank(lines, decorator.lineno, decorator.end_lineno or decorator.lineno)
    start, last = node.body[0], node.end_lineno or node.lineno
    has_docstring = ast.get_docstring(node) is not None
    first = (start.end_lineno or 0) + 1 if has_docstring else start.lineno
    raising = f"{' ' * (node.col_offset + 4)}raise NotImplementedError"
    if first <= last:
        _blank(lines, first, last)
        lines[first - 1] = raising
    else:  # a function that is only its docstring
        lines[last - 1] = f"{lines[last - 1]}\n{raising}"


def _drop(lines: list[str | None], node: ast.stmt) -> None:
    """Take a whole definition out, with its decorators and the comment that stands over it."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno] + [decorator.lineno for decorator in decorators])
    while first > 1 and (lines[first - 2] or "").lstrip().startswith("#"):
        first -= 1
    _blank(lines, first, node.end_lineno or node.lineno)


def _blank(lines: list[str | None], first: int, last: int) -> None:
    for number in range(first - 1, last):
        lines[number] = None


def _drop_unused_imports(text: str) -> str:
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines: list[str | None] = list(text.splitlines())
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        kept = [a for a in node.names if (a.asname or a.name.split(".")[0]) in used]
        if len(kept) == len(node.names):
            continue
        _blank(lines, node.lineno, node.end_lineno or node.lineno)
        if kept:
            node.names = kept
            lines[node.lineno - 1] = ast.unparse(node)
    return "\n".join(line for line in lines if line is not None) + "\n"
