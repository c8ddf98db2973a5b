"""Verdicts that outlive the run: one JSON file a kata in ROOT/.katas, kept by content.

A verdict holds for one answer, byte for byte, and for what it was judged with: specs, kit, torch,
Python, device. Nothing here fails a command: what cannot be kept or read is said in one sentence.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from desk import events, source, words
from desk.verdict import Figure, Passed, Verdict
from desk.words import Code
from kit import catalog
from kit.catalog import Kata, Lap, Section, shown

VERSION = 4
_CODES: dict[str, Code] = {code: code for code in get_args(Code)}
_LAPS: dict[str, Lap] = {lap: lap for lap in get_args(Lap)}


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of an answer and of each thing that it is judged with."""

    answer: str
    judge: dict[str, str]


@dataclass(frozen=True)
class Record:
    """What is kept of a kata: `words` say where it stands, `failed` and `spec` what is to fix.

    `functions` are the digests of the answer's functions.
    """

    of: Fingerprint
    words: str
    passed: bool
    failed: Section | None = None
    spec: str = ""
    code: Code = "part_passed"
    steps: list[tuple[str, str]] = field(default_factory=list)
    passed_sections: list[Passed] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)

    @property
    def part(self) -> int:
        """The part to work at."""
        return self.failed.part if self.failed else 1

    def core_passed(self, kata: Kata) -> bool:
        """Whether everything that is core has passed with this answer."""
        known = {found.section for found in self.passed_sections}
        return known >= {section for section in kata.sections if section.lap == "core"}

    def changed_functions(self, path: Path) -> tuple[str, ...]:
        """What in the answer is not as it was at the verdict; nothing if it cannot be read."""
        now = source.digests(path)
        return tuple(name for name in now if self.functions.get(name) != now[name])

    def changed(self, now: Fingerprint) -> str:
        """What is not as it was at the verdict: "answer", "the specs", "torch" ...; or nothing."""
        if self.of.answer != now.answer:
            return "answer"
        ours, theirs = self.of.judge, now.judge
        return next((word for word in theirs if ours.get(word) != theirs[word]), "")


class State:
    """The records of all katas on one device; `say` gets a sentence where one cannot be kept."""

    def __init__(self, say: Callable[[str], None], device: str = "cpu") -> None:
        self._say, self._device = functools.cache(say), device  # each sentence once
        self._folder = catalog.ROOT / ".katas"

    def fingerprint(self, kata: Kata) -> Fingerprint:
        """Of the candidate's file as it is now, and of all that it is judged with."""
        return Fingerprint(_digest([kata.stub]), _judge_of(kata, self._device))

    def read(self, kata: Kata) -> Record | None:
        """What is kept of this kata; a file that cannot be understood is set aside."""
        path = self._path(kata)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._set_aside(path, f"it cannot be read: {error.strerror}")
            return None
        try:
            data = json.loads(text)
            if data["version"] == VERSION:
                return _record(data)
            self._set_aside(path, f"its version is {data['version']!r}, not {VERSION}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._set_aside(path, "it is damaged")
        return None

    def keep(
        self, verdict: Verdict, before: Fingerprint, steps: Iterable[tuple[str, str]]
    ) -> Record | None:
        """Keep a verdict that came to its end on the answer with that fingerprint."""
        job = verdict.job
        if not is_complete(verdict):
            return None
        if self.fingerprint(job.kata) != before:
            self._say(f"{shown(job.path)} was changed during the run, so the verdict is not kept.")
            return None
        old = self.read(job.kata)
        functions = source.digests(job.path)
        if verdict.broken and old:
            functions = old.functions  # as if it had not been saved
        record = _merged(old, verdict, before, list(steps))
        record = dataclasses.replace(record, functions=functions)
        self._write(self._path(job.kata), record)
        return record

    def _path(self, kata: Kata) -> Path:
        device = "" if self._device == "cpu" else f"-{self._device}"
        return self._folder / f"{kata.name}{device}.json"

    def _write(self, path: Path, record: Record) -> None:
        data = {"version": VERSION, **dataclasses.asdict(record)}
        try:
            self._folder.mkdir(exist_ok=True)
            write_whole(path, json.dumps(data, indent=1))
        except OSError as error:
            why = error.strerror or error
            self._say(f"The verdict could not be kept in {shown(self._folder)}: {why}.")

    def _set_aside(self, path: Path, why: str) -> None:
        for number in itertools.count(1):
            other = path.with_name(f"{path.name}.old-{number}")
            if not other.exists():
                break
        what = f"The kept verdict {shown(path)} cannot be used ({why})"
        try:
            os.replace(path, other)
        except FileNotFoundError:
            return  # another run was faster
        except OSError as error:
            self._say(f"{what}, nor be renamed: {error.strerror or error}.")
            return
        self._say(f"{what}; it is now {shown(other)}.")


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once, so that an interruption leaves the old one or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def is_complete(verdict: Verdict) -> bool:
    """Whether it says something about the answer that will be so next time."""
    if verdict.trouble or verdict.broken:
        return not verdict.trouble
    return verdict.first_bad is not None or verdict.passed


def _merged(
    old: Record | None, verdict: Verdict, now: Fingerprint, steps: list[tuple[str, str]]
) -> Record:
    """With what is known of the other sections, where they were judged with the same code."""
    kata = verdict.job.kata
    same = old if old and not old.changed(now) else None
    known = {found.section: found for found in same.passed_sections} if same else {}
    known |= {found.section: found for found in verdict.passed_sections}
    failed, spec = None, ""
    if verdict.first_bad:
        failed, spec = verdict.first_bad[0].section, verdict.first_bad[0].name
    elif verdict.broken and old:
        failed, spec = old.failed, old.spec  # a slip of the keyboard changes nothing in hand
    if failed:
        known.pop(failed, None)  # it may have passed before, with a spec that is not steady
    sections = list(known.values())
    if failed or verdict.broken:
        state, code = words.state(verdict), words.code(verdict)
        record = Record(now, state, False, failed, spec, code, steps, sections)
        if verdict.broken or not record.core_passed(kata):
            return record
        return dataclasses.replace(record, words=words.progress(kata, known))
    if same and same.failed and same.failed not in known:
        return dataclasses.replace(same, passed_sections=sections)
    if {*known} >= {*kata.sections}:
        unchecked = sum(found.unchecked for found in sections)
        text = "passed" + (f" ({unchecked} not checked)" if unchecked else "")
        return Record(now, text, True, None, "", "passed", steps, sections)
    whole = [part for part in kata.parts if {*known} >= {*kata.sections_of(part.number)}]
    text = f"{len(whole)} of {len(kata.parts)} parts passed"
    record = Record(now, text, False, None, "", "part_passed", steps, sections)
    if record.core_passed(kata):
        return dataclasses.replace(record, words=words.progress(kata, known))
    return record


def _record(data: dict[str, Any]) -> Record:
    """What `dataclasses.asdict` made of it; an error if anything has another form."""
    judge = {str(key): str(value) for key, value in data["of"]["judge"].items()}
    return Record(
        of=Fingerprint(str(data["of"]["answer"]), judge),
        words=str(data["words"]),
        passed=data["passed"] is True,
        failed=_section(data["failed"]) if data["failed"] else None,
        spec=str(data["spec"]),
        code=_CODES[data["code"]],
        steps=[(str(label), str(text)) for label, text in data["steps"]],
        passed_sections=[_passed(found) for found in data["passed_sections"]],
        functions={str(name): str(digest) for name, digest in data["functions"].items()},
    )


def _section(data: dict[str, Any]) -> Section:
    return Section(_LAPS[data["lap"]], int(data["part"]))


def _passed(data: dict[str, Any]) -> Passed:
    counts = {key: int(data[key]) for key in ("passed", "unchecked")}
    figures = [
        Figure(int(figure["part"]), str(figure["case"]), events.chart(figure["chart"]))
        for figure in data["figures"]
    ]
    section, seconds = _section(data["section"]), float(data["seconds"])
    return Passed(section, **counts, seconds=seconds, figures=figures)


def _judge_of(kata: Kata, device: str) -> dict[str, str]:
    return {
        "the specs": digest_of_specs(kata),
        "the judge": _digest_of_tools(catalog.ROOT / "tests"),
        "torch": version_of_torch(),
        "Python": platform.python_version(),
        "device": device,
    }


def digest_of_specs(kata: Kata) -> str:
    """What the specs of a kata come to, with the files that they share with others."""
    shared = [path for path in kata.specs.parent.glob("*.py") if path.is_file()]
    return _digest([*_files(kata.specs), *shared])


@functools.cache
def _digest_of_tools(tests: Path) -> str:
    desk = [tests / "desk" / name for name in ("recorder.py", "explain.py")]
    return _digest([*_files(tests / "kit"), *desk, tests / "conftest.py"])


@functools.cache
def version_of_torch() -> str:
    """What is installed."""
    try:
        return metadata.version("torch")  # without the import, which takes seconds
    except metadata.PackageNotFoundError:
        return "none"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix != ".pyc" and path.is_file()]


def _digest(paths: Iterable[Path]) -> str:
    """Of the names and the bytes of the files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        try:
            data = path.read_bytes()
        except OSError as error:
            data = repr(error).encode()
        total.update(f"{shown(path)} {len(data)}\n".encode() + data)
    return total.hexdigest()
