"""`hint`: one hint at a time, so that nobody reads more than they need."""

from __future__ import annotations

from collections.abc import Iterable

from desk import board, report, schema
from desk.asked import Misuse, named, there_are
from desk.board import Standing
from desk.hint_file import Hints, parse
from desk.paper import Paper
from desk.state import State
from kit.catalog import Kata, in_words, shown


def run(name: str | None, part: str | None, rung: str | None, paper: Paper) -> int:
    """Print one hint, and the command for the next.

    Without a part it is for the part in hand. In that part it is first for the spec that failed, if
    it has one.
    """
    found = _in_hand(name, State(paper.note))
    is_in_hand = part in (None, str(found.part))
    rung = rung or str(first_rung(found.kata, found.spec) if is_in_hand else 1)
    hint = show(paper, found.kata, part or str(found.part), rung, found.spec)
    if hint.rung == hint.rungs:
        paper.line(f"This was the last hint of part {hint.part}.")
    paper.steps([(step.label, step.text) for step in hint.next])
    paper.report(hint)
    return 0


def first_rung(kata: Kata, spec: str) -> int:
    """0 if the spec has a hint of its own, which comes before those of its part."""
    return 0 if kata.hints.exists() and spec in _hints(kata).specs else 1


def show(paper: Paper, kata: Kata, part_text: str, rung_text: str, spec: str = "") -> schema.Hint:
    """Print one rung; 0 is the hint of a spec. Misuse says which parts and rungs there are."""
    hints = _hints(kata)
    part = _number(part_text, hints.parts, f"{kata.name} has no part", "part")
    ladder, rung = hints.parts[part], 0
    if rung_text == "0" and spec in hints.specs:
        heading, paragraphs = in_words(spec), [hints.specs[spec]]
        which = "a hint for the spec that failed"
    else:
        spec = ""
        refusal = f"part {part} of {kata.name} has no hint"
        rung = _number(rung_text, ladder.rungs, refusal, "hint")
        heading, lines = ladder.rungs[rung]
        # The terminal's width, not the file's.
        paragraphs = [" ".join(text.split()) for text in "\n".join(lines).split("\n\n")]
        which = f"hint {rung} of {len(ladder.rungs)}"
    paper.line(f"{kata.title}, part {part}: {ladder.title} - {which}", "bold")
    paper.line(heading)
    paper.line()
    for paragraph in paragraphs:
        paper.line(f"  {paragraph}")
        paper.line()
    step = f"nox -s hint -- {kata.name} {part} {rung + 1}"
    if rung + 1 not in ladder.rungs:
        step = f"nox -s kata -- {kata.name}"
    return schema.Hint(
        command="hint",
        ok=True,
        kata=report.kata_name(kata),
        part=part,
        part_title=ladder.title,
        rung=rung,
        rungs=len(ladder.rungs),
        spec=spec,
        title=heading,
        paragraphs=paragraphs,
        next=report.steps([("Next", step)]),
    )


def _hints(kata: Kata) -> Hints:
    try:
        return parse(kata.hints.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Misuse(
            f"there are no hints for {kata.name} yet ({shown(kata.hints)} is missing)"
        ) from None


def _in_hand(name: str | None, state: State) -> Standing:
    """Where the named kata stands, or the one in hand."""
    if name is not None:
        return board.standing(named(name), state)
    found = board.in_hand(board.all_standings(state))
    if found is None:
        raise Misuse("every kata is solved; say which hint: nox -s hint -- NAME [PART] [HINT]")
    return found


def _number(text: str, known: Iterable[int], refusal: str, what: str) -> int:
    if text.isdecimal() and int(text) in known:
        return int(text)
    raise Misuse(f"{refusal} {text}: {there_are(what, known)}")
