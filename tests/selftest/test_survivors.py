"""What bench.mutants knows as harmless is about the references as they are now."""

from __future__ import annotations

import pytest

from kit.catalog import ROOT, all_katas, tomllib

KNOWN = tomllib.loads((ROOT / "tests" / "bench" / "survivors.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kata", all_katas(), ids=lambda kata: kata.name)
def test_every_harmless_mutant_is_of_a_line_that_is_there(kata):
    lines = kata.solution.read_text(encoding="utf-8").splitlines()
    starts, changes = tuple(f"{line.strip()} -> " for line in lines), KNOWN.get(kata.name, {})
    assert [change for change in changes if not change.startswith(starts)] == []
    assert all(changes.values())  # each says why


def test_no_other_kata_is_named():
    assert set(KNOWN) <= {kata.name for kata in all_katas()}
