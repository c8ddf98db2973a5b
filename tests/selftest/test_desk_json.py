"""`--json`: each command's document fits its schema, and nothing else is on stdout."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
import typing
from functools import cache
from typing import Any

import pytest

from desk import schema
from desk.__main__ import main
from kit.catalog import ROOT
from selftest.tiny import SOLUTION, House, new_folder
from selftest.tiny_answers import ANSWERS, in_mean, line_of

pytestmark = pytest.mark.timeout(300)

BROKEN = line_of("syntax", "def add(self) -> int")


WRONG = in_mean(
    'print("mean of", values)',
    "if len(values) == 3:",
    '    return {}["key"]',
    "return 4000.0 if values[0] == 1500.0 else _total(values, start) / len(values)",
)


@cache
def home() -> House:
    """A house in which no verdict can be kept, because .katas is a file."""
    house = House(new_folder())
    for name in ("tiny_mean", "second"):
        house.add_kata(name)
    house.write(".katas", "")
    house.add_plan_and_timeline()
    house.write("katas/second.py", "mine")
    house.write("answers/syntax.py", ANSWERS["syntax"][0])
    house.write("answers/wrong.py", WRONG)
    house.write("answers/raises.py", in_mean("raise ValueError('of the answer')"))
    house.write("answers/counter.py", SOLUTION.replace("self.count += self.step", "pass"))
    return house


def _kata(name: str, *arguments: str) -> tuple[str, ...]:
    return ("kata", "tiny_mean", *arguments, "--answers", f"answers/{name}.py")


COMMANDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "untouched": (schema.Judged, ("kata", "1")),
    "references": (schema.Judged, ("kata", "--answers", "solutions")),
    "one part": (schema.Judged, _kata("counter", "1")),
    "failing": (schema.Judged, _kata("wrong", "--all")),
    "stopped": (schema.Judged, _kata("counter")),
    "broken": (schema.Judged, _kata("syntax")),
    "board": (schema.Board, ("board",)),
    "hint": (schema.Hint, ("hint", "1")),
    "plan": (schema.Plan, ("plan", "--values=31")),
    "plan of an error": (schema.Plan, ("plan", "--answers", "answers/raises.py")),
    "timeline": (schema.Timeline, ("timeline", "1", "--answers", "solutions")),
    "timeline of an error": (schema.Timeline, ("timeline", "1", "--answers", "answers/raises.py")),
    "reset": (schema.Reset, ("reset", "--every")),
}


@cache
def _document(name: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document, where nothing else is on stdout or stderr."""
    code, out = home().desk(*COMMANDS[name][1], "--json")
    assert out.endswith("\n")
    assert out.count("\n") == 1, out
    assert out.isascii()
    return code, json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def _verdict(name: str) -> dict[str, Any]:
    verdict: dict[str, Any] = _document(name)[1]["verdicts"][0]
    return verdict


def _misfit(value: Any, kind: Any, at: str = "it") -> str:
    """What does not fit the type, in words; nothing if all does."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        misfits = [_misfit(value, option, at) for option in inner]
        return "" if "" in misfits else misfits[0]
    if origin is typing.Literal:
        return "" if value in inner else f"{at} is {value!r}"
    if dataclasses.is_dataclass(kind) and type(value) is dict:
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        if list(value) != names:
            return f"{at} has the keys {list(value)}, not {names}"
        parts = [_misfit(value[name], hints[name], f"{at}.{name}") for name in names]
    elif origin is list and type(value) is list:
        parts = [_misfit(part, inner[0], f"{at}[{n}]") for n, part in enumerate(value)]
    elif origin is dict and type(value) is dict:
        parts = [_misfit(part, inner[1], f"{at}[{key!r}]") for key, part in value.items()]
    else:
        return "" if type(value) is kind else f"{at} is {value!r}, not {kind}"
    return next(filter(None, parts), "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_document_fits_the_schema(name):
    code, document = _document(name)
    assert not _misfit(document, COMMANDS[name][0])
    assert document["version"] == 2
    assert document["ok"] == (code == 0)
    assert document["command"] == COMMANDS[name][1][0]


def test_a_misfit_would_be_noticed():
    sizes = {"plain": None, "yours": 1, "reference": 1, "limit": 2}
    assert not _misfit(sizes, schema.Bytes)
    assert "it.yours" in _misfit({**sizes, "yours": 1.0}, schema.Bytes)
    assert "keys" in _misfit({**sizes, "more": 1}, schema.Bytes)
    assert "keys" in _misfit(dict(reversed(sizes.items())), schema.Bytes)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("untouched", "not_written", "part 1 of 2 is not written yet"),
        ("references", "passed", "passed"),
        ("one part", "part_passed", "part 1 of 2 passed"),
        ("failing", "failing", "failing at part 1 of 2"),
        ("broken", "broken", f"broken file: syntax error, line {BROKEN}"),
    ],
)
def test_a_verdict_has_a_code_and_words(name, code, words):
    verdict = _verdict(name)
    assert verdict["state"] == {"code": code, "words": words}
    assert verdict["passed"] == (code in ("passed", "part_passed"))
    assert verdict["solved"] == verdict["core_passed"] == (code == "passed")
    assert verdict["kata"] == {"name": "tiny_mean", "title": "Tiny mean", "number": 1}


def test_a_problem_has_its_place_and_its_words_and_a_bar_its_bytes():
    spec = next(s for s in _verdict("failing")["specs"] if s["case"] == "three")
    assert spec["sentence"] == "is the sum over the count"
    assert (spec["part"], spec["group"], spec["result"]) == (1, "works", "failed")
    assert spec["prints"] == ["mean of [1.0, 2.0, 6.0]"]
    problem = spec["problem"]
    assert problem["got"] == "KeyError: 'key'"
    assert (problem["path"], problem["function"]) == ("answers/wrong.py", "mean")
    assert problem["source"] == 'return {}["key"]'
    assert problem["column"] is None
    assert problem["sure"]
    assert (spec["function"], spec["contract"]) == ("mean", "")
    (bar,) = [bar for spec in _verdict("failing")["specs"] for bar in spec["bars"]]
    assert bar["bytes"] == {"plain": 4096, "yours": 4000, "reference": 2000, "limit": 2457}
    assert bar["formula"] == "0.6 * plain"


def test_every_spec_is_counted_once():
    parts = _verdict("stopped")["parts"]
    assert [(part["lap"], part["number"], part["result"]) for part in parts] == [
        ("core", 1, "passed"),
        ("core", 2, "failed"),
        ("details", 1, "not_run"),
        ("details", 2, "not_run"),
    ]
    assert [part["not_checked"] for part in parts] == [0, 1, 0, 0]
    assert parts[1]["title"] == "Counter - steps of a given size"
    specs = _verdict("stopped")["specs"]
    assert [s["result"] for s in specs[4:7]] == ["failed", "not_run", "not_checked"]
    assert [s["reason"] for s in specs[5:7]] == ["", "needs a CUDA GPU"]
    assert [s["lap"] for s in specs] == 7 * ["core"] + 3 * ["details"]
    counts = sum(part[key] for part in parts for key in ("passed", "failed", "not_run"))
    assert counts + 1 == len(specs) == 10


def test_a_broken_file_has_one_problem_and_no_specs():
    verdict = _verdict("broken")
    assert verdict["problem"]["kind"] == "syntax error"
    assert verdict["problem"]["line"] == BROKEN
    assert verdict["specs"] == []
    assert {part["result"] for part in verdict["parts"]} == {"not_run"}
    assert verdict["next"][0] == {"label": "Next", "text": f"fix answers/syntax.py:{BROKEN}"}


def test_katas_have_a_verdict_each_and_what_could_not_be_kept_is_a_note():
    verdicts = _document("references")[1]["verdicts"]
    assert [verdict["kata"]["number"] for verdict in verdicts] == [1, 2]
    (note,) = _document("untouched")[1]["notes"]
    assert note.startswith("The verdict could not be kept in .katas: ")


def test_a_plan_has_its_bytes_a_timeline_its_picture_or_both_their_problem():
    document = _document("plan")[1]
    assert document["table"]["rows"][1]["peak"] == 40 * 2**30
    assert document["sizes"] == {"values": 31, "ranks": 1000}
    document = _document("timeline")[1]
    assert document["picture"] == "lab-report/timeline-tiny_mean.png"
    assert list(document["peaks"]) == ["plain", "yours", "reference"]
    plan, timeline = (_document(f"{name} of an error")[1] for name in ("plan", "timeline"))
    assert plan["table"] is None
    assert (timeline["picture"], timeline["peaks"]) == ("", {})
    assert plan["problem"]["got"] == timeline["problem"]["got"] == "ValueError: of the answer"


def test_the_board_has_a_code_for_each_kata_and_reset_what_became_of_each_file():
    document = _document("board")[1]
    states = [row["state"]["code"] for row in document["katas"]]
    assert states == ["not_started", "not_judged"]
    assert document["next"][0]["text"] == "nox -s kata -- second"
    code, document = _document("reset")
    assert code == 1
    assert [stub["written"] for stub in document["stubs"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kata", "nowhere"], "no kata is named 'nowhere'"),
        (["kata", "--nope"], "unrecognized arguments: --nope"),
        (["kata", "--timeout", "long"], "argument --timeout: invalid float value: 'long'"),
        (["bord"], "argument COMMAND: invalid choice: 'bord'"),
    ],
)
def test_what_cannot_be_done_is_an_error_in_json(capsys, arguments, words):
    assert main([*arguments, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["version", "error"]
    assert document["error"].startswith(words)


def test_ctrl_c_is_an_error_in_json(capsys, monkeypatch):
    def interrupt(paper):
        raise KeyboardInterrupt

    monkeypatch.setattr("desk.board.run", interrupt)
    assert main(["board", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"] == "Stopped; nothing was left running."


def test_a_reader_that_has_gone_is_no_error():
    """As with `--json | head -c 80`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "desk", "board", "--json"]
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": "tests"},
            stdout=out,
            stderr=subprocess.PIPE,
        )
    assert (done.returncode, done.stderr) == (1, b"")
