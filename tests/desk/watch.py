"""`watch`: the verdict at each save of a file, and a key for everything else."""

from __future__ import annotations

import dataclasses
import queue
import time
from pathlib import Path

from desk import board, hints, report, reset, solved
from desk.asked import Misuse, named
from desk.events import Broken, Event
from desk.inbox import Inbox, Key, Message, Run, Saved, files, keys, take
from desk.kata import planned
from desk.paper import Paper
from desk.screen import Screen
from desk.state import State
from desk.steps import next_steps
from desk.terminal import Terminal, ctrl_c_later
from desk.verdict import Job, Verdict
from desk.words import seconds_waited
from kit import catalog
from kit.answers.stubs import is_untouched
from kit.catalog import Kata, shown

KEYS = "n next   h hint   a all   p part   r reset   o place   Enter again   q quit"
# Editors write in several steps; a file that is gone or empty for longer than this is so.
_SETTLES = 1.0


def run(name: str | None, limit: float, paper: Paper) -> int:
    """Watch the named kata, or the one in hand, until q or Ctrl-C."""
    state = State(paper.note)
    if name:
        kata = named(name)
    elif found := board.in_hand(board.all_standings(state)):
        kata = found.kata
    else:
        raise Misuse("every kata is solved; say which one to watch: nox -s watch -- NAME")
    inbox: Inbox = queue.SimpleQueue()
    with keys(inbox) as terminal, files(kata.stub.parent, inbox):
        watch = Watch(paper, state, kata, inbox, terminal, limit)
        try:
            watch.go_on()
        finally:
            watch.end_run()
    return 0


class Watch:
    """What is watched, the run under way, and what the next key means."""

    def __init__(
        self,
        paper: Paper,
        state: State,
        kata: Kata,
        inbox: Inbox,
        terminal: Terminal | None,
        limit: float,
    ) -> None:
        self._paper, self._state, self._inbox = paper, state, inbox
        self._terminal, self._limit = terminal, limit
        self._run: Run | None = None
        self._asked = ""  # what the next key answers
        self._look_at(kata)

    def go_on(self) -> None:
        """Judge what is there, and take what comes until somebody quits."""
        self.judge()
        while self.answer(take(self._inbox)):
            pass

    @property
    def is_judging(self) -> bool:
        """Whether a verdict is in the making."""
        return self._run is not None and not self._run.is_shown

    def answer(self, message: Message) -> bool:
        """Do what a message asks for; False if somebody quits."""
        if isinstance(message, Saved):
            self._saved(message)
        elif isinstance(message, Key):
            if message.letter in ("q", "\x04"):
                return False
            self._press(message.letter)
        elif message[0] is self._run:
            self._show(message[0], message[1])
        return True

    def end_run(self) -> None:
        """End the run under way, if there is one, and what is ready for the next."""
        if self._run:
            self._run.end()
        self._run = None

    # Files

    def _look_at(self, kata: Kata) -> None:
        self._kata, self._part = kata, 0  # 0: the whole kata
        self._seen: bytes | None = None
        self._at, self._hinted = "", (0, "", 0)
        self._other: Kata | None = None  # was saved meanwhile

    @property
    def _numbers(self) -> list[int]:
        return [part.number for part in self._kata.parts]

    def _saved(self, saved: Saved) -> None:
        kata = next((kata for kata in catalog.all_katas() if kata.stub.name == saved.name), None)
        if kata == self._kata and _settled(kata.stub) != self._seen:
            self.judge()
        elif kata not in (None, self._kata, self._other) and kata.stub.exists():
            self._other = kata
            how = "press n to watch it" if self._terminal else f"nox -s watch -- {kata.name}"
            self._paper.line(f"{shown(kata.stub)} was saved, which is not watched: {how}")

    def judge(self, *, run_all: bool = False) -> None:
        """Judge the file as it is now; a run under way is about an older one."""
        self._asked = ""
        path, self._seen = self._kata.stub, _settled(self._kata.stub)
        now = time.strftime("%H:%M:%S")
        self._paper.line()
        part = f", part {self._part}" if self._part else ""
        self._paper.line(f"{self._kata.title}{part} - {shown(path)} at {now}", "bold")
        if self._seen is None:
            self.end_run()
            self._paper.line(f"{shown(path)} is gone. Save it again, or press r for a fresh stub.")
            self._foot()
            return
        self._before = self._state.fingerprint(self._kata)
        job = Job(self._kata, path, run_all=run_all, limit=self._limit)
        record = self._state.read(self._kata)
        if self._part:
            job = dataclasses.replace(job, sections=tuple(self._kata.sections_of(self._part)))
        elif record and not is_untouched(path):
            job = planned(job, record, may_skip=False)
        self._screen = Screen(self._paper, job)
        self._paper.status("judging")
        with ctrl_c_later():
            self._run = Run(job, self._inbox, self._terminal, self._run)

    def _show(self, run: Run, what: Event | Verdict) -> None:
        is_end = isinstance(what, Broken | Verdict)
        if is_end and _settled(self._kata.stub) != self._seen:
            self.judge()  # it may have been read while it was written
            return
        if not isinstance(what, Verdict):
            self._screen.show(what)
            return
        run.is_shown = True
        self._screen.close(what, run.started)
        steps = next_steps(what)
        self._state.keep(what, self._before, steps)
        found = report.judged("watch", [report.verdict(what, steps)], ok=what.passed)
        self._paper.report(dataclasses.replace(found, seconds=seconds_waited(run.started)))
        if what.solved:
            solved.show(self._paper, what)
            self._paper.steps([("Next", "press n for the next kata")])
        elif what.passed:
            later = [number for number in self._numbers if number > self._part]
            step = "press p for another part" if later else "press p and 0 for the whole kata"
            self._paper.steps([("Next", step)])
        problem = what.bad.problem if what.bad else None
        self._at = problem.at if problem else ""
        self._foot()

    def _foot(self) -> None:
        self._paper.line(KEYS if self._terminal else "Waiting for the next save; Ctrl-C ends it.")

    # Keys

    def _press(self, letter: str) -> None:
        asked, self._asked = self._asked, ""
        if asked == "part":
            self._choose_part(letter)
        elif asked == "reset":
            self._reset(letter)
        elif letter == "n":
            self._next()
        elif letter == "h":
            self._hint()
        elif letter == "a":
            self.judge(run_all=True)
        elif letter == "p":
            self._asked = "part"
            numbers = ", ".join(map(str, self._numbers))
            self._paper.line(f"Which part? Press one of {numbers}, or 0 for the whole kata.")
        elif letter == "r":
            self._asked = "reset"
            where = shown(self._kata.stub)
            self._paper.line(f"A fresh stub in {where}? What is there is kept beside it.")
            self._paper.line("Press y, or any other key to leave it.")
        elif letter == "o":
            place = self._at or shown(self._kata.stub)
            self._paper.line(f"{self._kata.stub.parent.parent / place}")
        elif letter in "\r\n":
            self.judge()
        else:
            self._paper.line(KEYS)

    def _choose_part(self, letter: str) -> None:
        if letter not in map(str, [0, *self._numbers]):
            no = "" if letter in "\r\n" else f"{self._kata.name} has no part {letter!r}. "
            self._paper.line(f"{no}Left as it is.")
            return
        self._part = int(letter)
        self.judge()

    def _reset(self, letter: str) -> None:
        if letter != "y":
            self._paper.line("Left as it is.")
            return
        self.end_run()
        reset.run(self._kata.name, True, self._paper)
        self.judge()

    def _next(self) -> None:
        kata = self._other or _next_unsolved(self._state, self._kata)
        if kata is None:
            self._paper.line("No other kata is unsolved.")
            return
        self._look_at(kata)
        self.judge()

    def _hint(self) -> None:
        """The first hint of the spec or the part in hand, and one more each time."""
        found = board.standing(self._kata, self._state)
        part = self._part or found.part
        spec = found.spec if part == found.part else ""
        *last, rung = self._hinted
        rung = rung + 1 if last == [part, spec] else hints.first_rung(self._kata, spec)
        try:
            hint = hints.show(self._paper, self._kata, str(part), str(rung), spec)
        except Misuse as error:
            self._paper.line(str(error))
            return
        more = hint.rung < hint.rungs
        self._hinted = (part, spec, rung if more else 0)
        self._paper.line("h shows the next one." if more else f"This was the last of part {part}.")
        self._foot()


def _next_unsolved(state: State, after: Kata) -> Kata | None:
    """The first kata behind another that is not solved, round the end."""
    standings = board.all_standings(state)
    place = [found.kata for found in standings].index(after)
    ordered = [*standings[place + 1 :], *standings[:place]]
    return next((found.kata for found in ordered if found.steps), None)


def _settled(path: Path) -> bytes | None:
    """The bytes of the file once its editor is done with it; None if it is gone."""
    until = time.monotonic() + _SETTLES
    while True:
        try:
            data: bytes | None = path.read_bytes()
        except OSError:
            data = None
        if data or time.monotonic() > until:
            return data
        time.sleep(0.02)
