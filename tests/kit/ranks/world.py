"""The real world: processes of one group, for values under data parallelism.

    first, second = world.run(answer, ranks.mean_gradients, 3)

`ranks` is a module beside the specs, `mean_gradients(answer, rank, 3)` runs on every rank at once,
and what it returns comes back in rank order. What it raises is raised here, with its own traceback.
The processes are started once and serve every run; a run that breaks them ends them, and the next
run has new ones, forks of the warm process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from kit import forkserver
from kit.laws import checks, draw, untouched
from kit.patience import KNOWS_TURNS, Patience
from kit.ranks.rank import InStep, Prints, Ready, Report, main
from kit.ranks.rank_failures import (
    Dead,
    Frame,
    death,
    hang,
    is_consequence,
    is_said_by,
    is_waiting,
    main_stack,
    out_of_step,
)
from kit.ranks.wire import dumps, loads

_START_LIMIT = 120.0  # torch may come from a cold disk
_GRACE = 1.5  # for the other ranks, once one of them has raised or died
_STEP_LIMIT = 3.0
# Ranks that wait in a call, and have not run once for so long, wait for nobody; where it is not
# known whether they have run, longer. What a rank has sent before its end comes at once.
_IDLE = 1.2 if KNOWS_TURNS else 3.0
_IDLE_AFTER_AN_END = 0.5 if KNOWS_TURNS else 3.0


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    ready: Ready | None = None


# What takes half a second to import, and only answers that shard need.
_SHARDING = {"torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"}


class World:
    """So many processes, each a rank of one group: gloo, or NCCL with a GPU for each."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self._device = device
        self._ranks: list[_Rank] = []
        self._folder = Path()

    @property
    def pids(self) -> list[int]:
        """The processes in rank order."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def start(self) -> None:
        """Launch the ranks if they are not there yet, without waiting until they have met."""
        if self._ranks:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="world-", dir=forkserver.start()))
        forkserver.preload(_SHARDING & sys.modules.keys())  # once, and not on each rank
        seed_shift = os.environ.get(draw.SHIFT_VARIABLE, "0")
        for number in range(self.size):
            here, there = forkserver.pipe()
            process = forkserver.fork(
                *(main, number, self.size, there, str(self._folder), self._device, seed_shift),
                log=self._folder / f"log{number}",
                has_forks=False,
            )
            there.close()
            self._ranks.append(_Rank(number, process, here))

    def close(self) -> None:
        """End the ranks at once; the next run has new ones."""
        for rank in self._ranks:
            forkserver.end(rank.process)
            rank.pipe.close()
        if self._ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks = []

    def run(
        self, answer: ModuleType, program: Callable[..., Any], *args: Any, limit: float = 10.0
    ) -> list[Any]:
        """Run `program(answer, rank, *args)` on every rank; results in rank order.

        Arguments and results are pickled; classes and functions of the answer come through as those
        of the other side's import of it. Raises what the program raises: of the lowest rank, unless
        that is only the consequence of another rank's end. SpecFailure if a rank is not done within
        `limit` seconds of work or of waiting, if one dies, or if the ranks have made different
        collective calls.
        """
        __tracebackhide__ = True
        data = dumps((program, args), answer)
        try:
            self.start()
            self._await_ready()
            for rank in self._ranks:
                self._send(rank, (str(answer.__file__), data))
            ends = self._follow(limit, may_hang=True)
            error = self._judge(ends, answer, limit)
        except BaseException:  # Ctrl-C, or the time limit of the spec
            self.close()
            raise
        if error is not None:
            raise error
        return [loads(end.data, answer) for end in ends.values() if isinstance(end, Report)]

    def _await_ready(self) -> None:
        if all(rank.ready for rank in self._ranks):
            return
        for number, end in self._follow(_START_LIMIT).items():
            if isinstance(end, Ready):
                self._ranks[number].ready = end
        if not all(rank.ready for rank in self._ranks):
            logs = [forkserver.read(path) for path in sorted(self._folder.glob("log*"))]
            raise RuntimeError("the ranks could not be started\n" + "\n".join(logs))

    def _follow(self, limit: float, *, may_hang: bool = False) -> dict[int, Any]:
        """One message of each rank, in rank order; none of a rank that takes too long."""
        ends: dict[int, Any] = {}
        patience, hurried = Patience(limit), False
        while len(ends) < self.size and not patience.is_over:
            waiting = [rank for rank in self._ranks if rank.number not in ends]
            wait([rank.pipe for rank in waiting], 0.1)
            for rank in waiting:
                message = self._receive(rank)
                if isinstance(message, Prints):
                    getattr(sys, message.stream).write(message.text)
                elif message is not None:
                    ends[rank.number] = message
                    if not hurried and _is_bad(message):
                        hurried = True
                        patience.shorten(_GRACE)
            left_over = [rank for rank in waiting if rank.number not in ends]
            pids = [rank.process.pid or 0 for rank in left_over]
            if not patience.look(functools.partial(list, pids)) or not may_hang:
                continue
            enough = _IDLE_AFTER_AN_END if ends else _IDLE
            idle = all(patience.idle_seconds(pid) >= enough for pid in pids)
            if idle and all(is_waiting(self._ask_stack(rank)) for rank in left_over):
                break  # nobody will ever make the call that they wait for
        return dict(sorted(ends.items()))

    def _send(self, rank: _Rank, message: object) -> None:
        with contextlib.suppress(OSError):  # it is dead, which `_receive` finds out
            rank.pipe.send(message)

    def _receive(self, rank: _Rank) -> Any:
        """The next message, or None."""
        with contextlib.suppress(EOFError, OSError):
            return rank.pipe.recv() if rank.pipe.poll() else None
        code, thread = forkserver.end(rank.process), rank.ready.main if rank.ready else ""
        log = forkserver.read(self._folder / f"log{rank.number}")
        return Dead(
            forkserver.ending(code), main_stack(forkserver.read(self._stacks(rank)), thread), log
        )

    def _judge(
        self, ends: dict[int, Any], answer: ModuleType, limit: float
    ) -> BaseException | None:
        """What to raise, if anything. Afterwards the world is in step, or ended."""
        hung = [rank for rank in self._ranks if rank.number not in ends]
        error = self._first_error(ends, answer)
        if error is None and hung:
            stacks = {rank.number: self._ask_stack(rank) for rank in hung}
            raised = {n: end.raised for n, end in ends.items() if isinstance(end, Report)}
            error = hang(stacks, raised, str(answer.__file__), limit)
        if hung or any(isinstance(end, Dead) for end in ends.values()):
            self.close()
            return error
        for rank in self._ranks:
            self._send(rank, None)
        # Where one rank has made more calls it fails for sure, and need not be waited for.
        even = len({end.calls for end in ends.values()}) == 1
        steps = self._follow(_STEP_LIMIT if even else _STEP_LIMIT / 6)
        if len(steps) == self.size and all(step == InStep(True) for step in steps.values()):
            return error
        self.close()
        if error or any(isinstance(s, InStep) and s.group_is_gone for s in steps.values()):
            return error
        return out_of_step(ends)

    def _first_error(self, ends: dict[int, Any], answer: ModuleType) -> BaseException | None:
        errors: list[BaseException] = []
        bars = ends[0].bars if isinstance(ends.get(0), Report) else []
        for number, end in ends.items():
            if isinstance(end, Dead):
                errors.append(death(number, end))
                continue
            untouched.called.update(end.called)
            if end.failed:
                errors.append(loads(end.data, answer))
                bars = end.bars if len(errors) == 1 else bars
        checks.bars.extend(bars)
        own = [error for error in errors if not is_consequence(error)]
        if not any(isinstance(error, checks.SpecFailure) for error in own):
            own.sort(key=lambda error: is_said_by(error, str(answer.__file__)))
        if len(errors) == 1 < self.size:  # the others have returned, or wait for it
            notes = getattr(errors[0], "__notes__", [])
            notes[:] = [f"{n} alone" if n.startswith("on rank ") else n for n in notes]
        return next(iter(own or errors), None)

    def _stacks(self, rank: _Rank) -> Path:
        return self._folder / f"stacks{rank.number}"

    def _ask_stack(self, rank: _Rank) -> list[Frame]:
        """Where the main thread is."""
        if rank.ready is None:
            return []
        text = forkserver.ask_stacks(rank.process, self._stacks(rank))
        return main_stack(text, rank.ready.main)


def _is_bad(message: object) -> bool:
    return isinstance(message, Dead) or (isinstance(message, Report) and message.failed)


def needs_world(item: Any) -> bool:
    """Whether a pytest item runs on real ranks: it takes the fixture `world` or `worlds`."""
    return not {"world", "worlds"}.isdisjoint(getattr(item, "fixturenames", ()))
