"""A stub is its solution without the bodies, and is known as long as nobody has written in it."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

from desk.source import signature
from kit.answers.stubs import is_untouched, make_stub
from kit.catalog import all_katas, shown

SAMPLE = '''\
"""What the kata is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

LIMIT = 3
_HIDDEN = 4


class Pair(NamedTuple):
    """Given."""

    low: float
    high: float

    def width(self) -> float:
        """Given too."""
        return self.high - self.low


class Writes(Protocol):
    """Given."""

    def write(self) -> int: ...


@dataclass
class State:
    """Given."""

    steps: int = 0

    def advance(self) -> None:
        """Given too."""
        self.steps += 1


def first(values: Sequence[float], *, start: float = 0.0) -> float:
    """The first part.

    On two lines.
    """
    # A comment of the solution.
    return _total(values) + start


# What only the solution needs.
def _total(values: Iterable[float]) -> float:
    """Not the candidate's."""
    return math.fsum(values)


@torch.no_grad()
def second(
    values: Sequence[float],
) -> float:
    if values:
        return 1.0
    return os.getpid()


def only_words() -> None:
    """Nothing but a docstring."""


class Writer:
    """A class to fill in."""

    kind = "given"

    def __init__(self, size: int) -> None:
        """Remember the size."""
        self._size = size

    @property
    def size(self) -> int:
        """How large."""
        return self._size

    def _helper(self) -> int:
        return 1

    async def later(self) -> int:
        return self._helper()


class _Inner:
    """Not the candidate's."""
'''


@pytest.fixture(scope="module")
def stub() -> str:
    return make_stub(SAMPLE)


def _body(stub: str, name: str) -> list[str]:
    """The statements of a function of the stub, as text."""
    for node in ast.walk(ast.parse(stub)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return [ast.unparse(statement) for statement in node.body]
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["first", "only_words", "__init__", "size", "second", "later"])
def test_of_every_public_body_the_docstring_is_left_and_a_raise(stub, name):
    docstring = _body(SAMPLE, name)[: name not in ("second", "later")]
    assert _body(stub, name) == [*docstring, "raise NotImplementedError"]


def test_nothing_private_stays(stub):
    for name in ("_HIDDEN", "_total", "_helper", "_Inner", "_size", "A comment", "What only"):
        assert name not in stub


def test_given_code_stays_as_it_is(stub):
    for given in (
        "return self.high - self.low",
        "self.steps += 1",
        "LIMIT = 3",
        "-> int: ...",
        'kind = "given"',
    ):
        assert given in stub


def test_decorators_go_unless_they_say_how_it_is_called(stub):
    """The others are part of the answer."""
    assert "no_grad" not in stub
    assert "    @property\n    def size(self) -> int:" in stub


def test_imports_that_nothing_uses_go(stub):
    for gone in ("import math", "import os", "Iterable", "import torch"):
        assert gone not in stub
    for kept in (
        "from __future__ import annotations",
        "from collections.abc import Sequence",
        "from typing import NamedTuple, Protocol",
        "from dataclasses import dataclass",
    ):
        assert f"{kept}\n" in stub


def test_a_stub_is_python_and_says_what_it_is(stub, tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(stub)
    assert is_untouched(path)
    assert signature(path, "first") == "first(values, *, start=0.0)"
    assert stub == make_stub(SAMPLE)


def test_one_changed_character_is_somebodys_work(stub, tmp_path):
    path = tmp_path / "stub.py"
    changes = {
        "a body": stub.replace("raise NotImplementedError", "raise NotImplementedErrors", 1),
        "a docstring": stub.replace("On two lines.", "On two lines!"),
        "the end": stub + "x",
        "the digest": stub.rstrip()[:-1] + "g\n",
        "a line before the mark": stub.replace("\n\n# untouched", "\nx = 1\n# untouched"),
        "no mark": stub.partition("# untouched")[0],
    }
    for what, text in changes.items():
        assert text != stub
        path.write_text(text)
        assert not is_untouched(path), what


def test_what_is_not_text_is_somebodys_work(tmp_path):
    path = tmp_path / "stub.py"
    assert not is_untouched(path)
    path.write_bytes(b"\xff\xfe")
    assert not is_untouched(path)
    assert not is_untouched(tmp_path)


def test_a_stub_of_an_older_solution_is_untouched(tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(make_stub(textwrap.dedent(SAMPLE).replace("first", "earlier")))
    assert is_untouched(path)


@pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)
def test_the_stubs_of_the_repository_are_in_step(kata):
    fresh, advice = make_stub(kata.solution.read_text("utf-8")), f"nox -s reset -- {kata.name}"
    assert kata.stub.exists(), advice
    text = kata.stub.read_text("utf-8")
    if not is_untouched(kata.stub) and bodies(text) != bodies(fresh):
        pytest.skip(f"not compared: {shown(kata.stub)} has a candidate's work in it")
    assert text == fresh, advice


def bodies(text: str) -> list[str]:
    """What the functions do: where that is nothing, a formatter has been at work, and nobody."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [ast.unparse(node.body[ast.get_docstring(node) is not None :]) for node in functions]


@pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)
def test_a_stub_says_which_part_is_the_stretch(kata):
    stub = make_stub(kata.solution.read_text(encoding="utf-8"))
    comments = re.findall(r"^# .*part (\d), the stretch", stub, re.MULTILINE | re.IGNORECASE)
    assert {*map(int, comments)} == {p.number for p in kata.parts if p.lap == "stretch"}
