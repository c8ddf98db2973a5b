"""Lines end between words, and never inside a figure."""

from __future__ import annotations

from desk.paper import wrap


def test_a_number_stays_with_its_unit_and_its_exponent():
    text = "peak of at most 12.5 KiB in 3 s, off by 1e-05 or 4 %, not -1.5e-07"
    for width in range(10, 40):
        rows = wrap(text, width)
        assert " ".join(rows) == text
        assert max(map(len, rows)) <= width
        for whole in ("12.5 KiB", "3 s", "1e-05", "4 %", "-1.5e-07"):
            assert any(whole in row for row in rows), (width, whole)


def test_nothing_is_a_line_too():
    assert wrap("", 10) == [""]
    assert wrap("a b", 3, "  ", " ") == ["  a", " b"]
