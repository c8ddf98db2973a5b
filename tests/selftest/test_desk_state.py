"""Verdicts that are kept: what they hold for, what they survive, and what they never stop."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from desk import state as kept
from desk.events import FAILED, PASSED, Broken, Chart, Collected, Finished, Outcome, Problem, Spec
from desk.state import State
from desk.verdict import Job, Verdict
from kit import catalog
from kit.catalog import Kata, Lap, Part, Section

PARTS = (Part(1, "", 5, "core"), Part(2, "", 5, "core"), Part(3, "", 5, "stretch"))
KATA = Kata("tiny", "Tiny", "Tiny", PARTS)
LAPS: list[Lap] = ["core", "core", "stretch"]
CHART = Chart("peak", "0.6 * plain", [("plain", 4, "4 B")])


@pytest.fixture
def said(monkeypatch, tmp_path):
    """What was said, in an empty house with a kata of three parts."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    for part in (1, 2, 3):
        _write(f"tests/specs/tiny/test_part{part}_x.py", "")
    _write("tests/kit/x.py", "")
    _write("katas/tiny.py", "mine")
    kept._digest_of_tools.cache_clear()
    return []


def _write(path: str, text: str) -> None:
    file = catalog.ROOT / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _verdict(*results: str, parts: tuple[int, ...] = ()) -> Verdict:
    """A run of parts with one spec each that ended so."""
    numbers = parts or tuple(range(1, len(results) + 1))
    sections = tuple(section for part in parts for section in KATA.sections_of(part))
    verdict = Verdict(Job(KATA, KATA.stub, sections=sections))
    specs = [Spec(str(n), n, LAPS[n - 1], "", "", f"is {n}", "", False) for n in numbers]
    verdict.take(Collected(specs))
    for spec, result in zip(specs, results, strict=False):
        problem = None if result == PASSED else Problem("wrong", "1")
        verdict.take(Outcome(spec.id, result, 0.5, problem, charts=[CHART]))
    verdict.take(Finished())
    return verdict


def _keep(said: list[str], verdict: Verdict) -> None:
    state = State(said.append)
    state.keep(verdict, state.fingerprint(KATA), [("Next", "go on")])


def _read(said: list[str]) -> kept.Record:
    record = State(said.append).read(KATA)
    assert record
    return record


def test_a_verdict_comes_back_as_it_was(said):
    _keep(said, _verdict(PASSED, FAILED, parts=(2, 3)))
    record = _read(said)
    assert (record.words, record.passed) == ("failing at part 3 of 3", False)
    assert (record.failed, record.part, record.spec) == (Section("stretch", 3), 3, "test_is_3")
    assert record.steps == [("Next", "go on")]
    assert _passed(record) == [("core", 2), ("details", 2)]
    assert record.passed_sections[0].figures[0].chart == CHART
    assert not record.core_passed(KATA)
    assert record.changed(State(said.append).fingerprint(KATA)) == ""
    assert said == []


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("katas/tiny.py", "answer"),
        ("tests/specs/tiny/test_part1_x.py", "the specs"),
        ("tests/specs/common.py", "the specs"),
        ("tests/kit/deep/y.py", "the judge"),
        ("tests/conftest.py", "the judge"),
    ],
)
def test_it_holds_only_for_what_was_judged(said, path, what):
    _keep(said, _verdict(PASSED, PASSED, PASSED))
    _write(path, "other")
    kept._digest_of_tools.cache_clear()
    state = State(said.append)
    assert _read(said).changed(state.fingerprint(KATA)) == what
    assert State(said.append, "cuda").read(KATA) is None


def _passed(record: kept.Record) -> list[tuple[str, int]]:
    return [(found.section.lap, found.section.part) for found in record.passed_sections]


def test_parts_judged_one_by_one_with_the_same_code_add_up_and_the_core_is_a_lap(said):
    _keep(said, _verdict(PASSED, parts=(2,)))
    assert _read(said).words == "1 of 3 parts passed"
    _keep(said, _verdict(FAILED, parts=(3,)))
    _keep(said, _verdict(PASSED, parts=(1,)))
    record = _read(said)
    assert (record.words, record.passed) == ("failing at part 3 of 3", False)
    _keep(said, _verdict(PASSED, parts=(3,)))
    assert _read(said).passed
    _write("katas/tiny.py", "another answer")
    _keep(said, _verdict(PASSED, parts=(1,)))
    assert _passed(_read(said)) == [("core", 1), ("details", 1)]
    _keep(said, _verdict(PASSED, PASSED, FAILED))
    record = _read(said)
    assert (record.words, record.passed) == ("core passed, details 2 of 3", False)
    assert record.core_passed(KATA)
    assert record.spec == "test_is_3"


def test_a_run_that_did_not_end_or_during_which_the_answer_changed_is_not_kept(said):
    cut, broken = _verdict(PASSED, PASSED, PASSED), _verdict(PASSED, PASSED, FAILED)
    cut.finished, broken.trouble = False, "the judge itself failed"
    _keep(said, cut)
    _keep(said, broken)
    state = State(said.append)
    before = state.fingerprint(KATA)
    _write("katas/tiny.py", "while it was judged")
    state.keep(_verdict(PASSED, PASSED, PASSED), before, [])
    assert state.read(KATA) is None
    assert said == ["katas/tiny.py was changed during the run, so the verdict is not kept."]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is damaged"),
        ("[]", "it is damaged"),
        ("\x00\xff", "it is damaged"),
        ("[" * 100_000, "it is damaged"),
        ('{"version": 0}', "its version is 0, not 4"),
    ],
)
def test_what_cannot_be_used_is_set_aside_and_said(said, text, why):
    _write(".katas/tiny.json.old-1", "older")
    _write(".katas/tiny.json", text)
    assert State(said.append).read(KATA) is None
    assert said == [
        f"The kept verdict .katas/tiny.json cannot be used ({why}); "
        "it is now .katas/tiny.json.old-2."
    ]
    assert (catalog.ROOT / ".katas" / "tiny.json.old-1").read_text() == "older"
    _keep(said, _verdict(PASSED, PASSED, PASSED))
    assert _read(said).passed


def test_a_record_with_values_of_another_form_is_set_aside(said):
    _keep(said, _verdict(PASSED, PASSED, PASSED))
    path = catalog.ROOT / ".katas" / "tiny.json"
    good = json.loads(path.read_text())
    for key, value in {"of": None, "steps": [1], "passed_sections": ["x"], "failed": "no"}.items():
        path.write_text(json.dumps({**good, key: value}))
        assert State(said.append).read(KATA) is None
    assert len(said) == 4


def test_a_folder_that_takes_nothing_is_said_once_and_stops_nothing(said):
    _write(".katas", "a file where the folder should be")
    state = State(said.append)
    for _ in range(2):
        state.keep(_verdict(PASSED, PASSED, PASSED), state.fingerprint(KATA), [])
    assert said == ["The verdict could not be kept in .katas: File exists."]
    assert state.read(KATA) is None


def test_a_slip_of_the_keyboard_does_not_change_the_part_in_hand(said):
    _keep(said, _verdict(PASSED, FAILED))
    _write("katas/tiny.py", "def (")
    slip = Verdict(Job(KATA, KATA.stub))
    slip.take(Broken(Problem("syntax error", "", line=1)))
    _keep(said, slip)
    record = _read(said)
    assert (record.words, record.part) == ("broken file: syntax error, line 1", 2)


def test_runs_at_once_do_not_break_it(said):
    verdicts = [_verdict(PASSED, parts=(part,)) for part in (1, 2, 3)] * 20
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda verdict: _keep(said, verdict), verdicts))
    assert _read(said).passed_sections
    assert said == []
    assert [path.name for path in (catalog.ROOT / ".katas").iterdir()] == ["tiny.json"]


def test_a_disk_that_is_full_leaves_the_old_verdict_and_nothing_else(said, monkeypatch):
    _keep(said, _verdict(PASSED, PASSED, PASSED))

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "replace", full)
    _write("katas/tiny.py", "another answer")
    _keep(said, _verdict(FAILED))
    assert said == ["The verdict could not be kept in .katas: No space left on device."]
    assert _read(said).passed
    assert [path.name for path in (catalog.ROOT / ".katas").iterdir()] == ["tiny.json"]
