"""What to tell of ranks that come to no end: they hang, die, or are out of step.

Where a rank was is known from faulthandler, which answers even from native code.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

from tblib import Traceback

from kit.laws.checks import SpecFailure, is_raised_on_purpose
from kit.private_torch import GLOO_ABORTS, PASSES_ON, RANK_IS_GONE, WAITS
from kit.ranks.rank import Report

# A file, a line and a function, as in a traceback.
Frame = tuple[str, int, str]


@dataclass(frozen=True)
class Dead:
    """A rank that is no more: exit code or signal, where it was, what native code has written."""

    how: str
    stack: list[Frame]
    log: str


def hang(
    stacks: dict[int, list[Frame]], done: dict[int, str], file: str, limit: float
) -> SpecFailure:
    """Say where each rank of `stacks` is; the traceback is that of the one to blame.

    Of those that are done, `done` has the last error that came out of the answer.
    """
    busy = [number for number, stack in stacks.items() if not is_waiting(stack)]
    blamed = (busy or list(stacks))[0]
    states = ", ".join(
        f"rank {number} {'is still' if busy else 'waits'} {_where(stacks[number], file)}"
        if number in stacks
        else f"rank {number} has finished{done[number] and f', after {done[number]}'}"
        for number in sorted({*stacks, *done})
    )
    expected, got = "every rank comes to its end", f"standstill: {states}"
    same = "every rank must make the same calls in the same order"
    if busy:
        expected, got = f"every rank done within {limit:g} s", f"time-out: {states}"
        cause = f"a loop that does not end; rank {blamed} ran this line when the time was up"
    elif done:
        other = next((number for number in done if done[number]), min(done))
        cause = f"rank {blamed} waits in a collective call that rank {other} never makes: "
        cause += (
            "it has raised before that, and the others were not told"
            if done[other]
            else f"{same}; a backward pass of DDP or FSDP makes some"
        )
    else:
        cause = f"the ranks wait for each other in different collective calls: {same}"
    error = SpecFailure(expected, got, cause)
    return error.with_traceback(_traceback(stacks[blamed]))


def is_consequence(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    return isinstance(error, RuntimeError) and bool(re.search(RANK_IS_GONE, str(error)))


def is_said_by(error: BaseException, file: str) -> bool:
    """Whether a `raise` in the file raises it: it may speak of what another rank has met with."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_code.co_filename == file and is_raised_on_purpose(error)


def death(number: int, end: Dead) -> SpecFailure:
    """Say that a rank died, and where if it crashed."""
    cause = "os._exit(), a crash in native code, or the system's answer to memory running out"
    if GLOO_ABORTS in end.log:
        cause = "the ranks called collectives that do not fit: another kind, or another size"
    got = f"rank {number} has ended ({end.how})"
    error = SpecFailure("a call that returns or raises on every rank", got, cause)
    return error.with_traceback(_traceback(end.stack))


def out_of_step(ends: dict[int, Report]) -> SpecFailure:
    """Say that every rank has finished, and yet a collective of all of them does not work."""
    counts = {number: end.calls for number, end in ends.items()}
    got = "after the program, a collective call of all ranks fails"
    if len(set(counts.values())) > 1 and -1 not in counts.values():
        got = ", ".join(f"rank {number} made {calls}" for number, calls in counts.items())
    return SpecFailure(
        "the same collective calls in the same order on every rank",
        got,
        "a rank makes one more call than another, or does not wait for one that it has begun",
    )


def main_stack(dump: str, main: str) -> list[Frame]:
    """The frames of the main thread in what faulthandler wrote, outermost first."""
    if not main:
        return []
    found = re.findall(rf"hread 0x{main}\b.*\n((?:  File .*\n)+)", dump)
    lines = re.findall(r'  File "(.*)", line (\d+) in (.*)', found[-1]) if found else []
    return [(file, int(line), name) for file, line, name in reversed(lines)]


def is_waiting(stack: list[Frame]) -> bool:
    """Whether the innermost frame is one in which torch waits for other ranks.

    What passes a call on inside torch does not count.
    """
    # A collective of a DTensor is an operator like others: who has called it counts.
    inner = [frame for frame in stack if not re.search(PASSES_ON, Path(frame[0]).as_posix())]
    if not inner:
        return False
    file, line, _ = inner[-1]
    if re.search(WAITS, Path(file).as_posix()):
        return True
    # The wait() of a collective that was begun with async_op=True is no Python function.
    return "wait(" in linecache.getline(file, line)


def _where(stack: list[Frame], file: str) -> str:
    """The last line of the file in a few words, or the innermost function."""
    for frame, line, _ in reversed(stack):
        if frame == file:
            return f"at line {line} ({linecache.getline(frame, line).strip()})"
    return f"in {stack[-1][2]}" if stack else "at work"


def _traceback(stack: list[Frame]) -> TracebackType | None:
    """A traceback that looks as if an error had come up through these frames."""
    trace: dict[str, Any] | None = None
    for file, line, name in reversed(stack):
        code = {"co_filename": file, "co_name": name}
        frame = {"f_globals": {"__file__": file}, "f_code": code, "f_lineno": line}
        trace = {"tb_frame": frame, "tb_lineno": line, "tb_next": trace}
    return Traceback.from_dict(trace).as_traceback() if trace else None
