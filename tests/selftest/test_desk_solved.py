"""What follows a solved kata: the figures, and the questions of its walk-through."""

from __future__ import annotations

import pytest

from desk import solved
from desk.events import Chart
from desk.paper import Paper
from desk.verdict import Figure, Job, Passed, Verdict
from kit.catalog import Kata, Section, all_katas


def _figure(title: str, yours: int, reference: int | None, case: str = "") -> Figure:
    rows = [("yours", yours, f"{yours} B"), ("limit", 999, "999 B")]
    rows += [] if reference is None else [("reference", reference, f"{reference} B")]
    return Figure(1, case, Chart(title, "", rows))


@pytest.fixture
def shown(capsys, monkeypatch):
    """The screen for these figures, of a part that has passed before."""
    monkeypatch.setenv("COLUMNS", "80")
    kata = Kata("tiny", "Tiny", "Tiny", ())

    def show(*figures: Figure) -> str:
        part = Passed(Section("core", 1), 2, 0, 0.1, list(figures))
        solved.show(Paper(), Verdict(Job(kata, kata.stub, before=(part,))))
        out: str = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        return out

    return show


def test_a_bar_far_above_the_reference_is_a_question(shown):
    out = shown(_figure("peak", 110, 100), _figure("saved", 111, 100), _figure("bare", 5, None))
    assert "saved: yours 111 B, reference 100 B: what is there that need not be?" in out
    assert out.count("what is there that need not be?") == 1
    assert "bare" not in out


def test_of_several_cases_and_of_many_bars_the_worst_are_shown(shown):
    out = shown(_figure("peak", 10, 10, "bf16"), _figure("peak", 12, 10, "fp16"))
    assert "peak (fp16)" in out
    assert "bf16" not in out
    out = shown(*(_figure(f"bar {number}", 100 + number, 100) for number in range(12)))
    assert "bar 11" in out
    assert "bar 0 " not in out
    assert "... and 2 more" in out


def test_a_kata_without_bars_or_walk_through_has_no_table_and_no_questions(shown):
    out = shown()
    assert "yours" not in out
    assert "asks next" not in out


def test_every_walk_through_has_two_questions():
    for kata in all_katas():
        found = solved.questions(kata.solution.with_suffix(".md"))
        assert len(found) == 2, kata.name
        assert all(question.endswith("?") for question in found)
