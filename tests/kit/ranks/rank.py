"""What runs in a rank of the real world: programs, one after another.

`kit.ranks.world` has it run in a fork of the warm process and talks to it in pickles.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from kit import forkserver
from kit.answers.contract import functions
from kit.answers.loading import load
from kit.answers.reset_torch import note_classes, reset_torch
from kit.catalog import find_kata
from kit.laws import checks, draw, untouched
from kit.laws.checks import Bar
from kit.memory import gpu
from kit.private_torch import collective_count
from kit.ranks.wire import dumps, loads, pack_error

Send = Callable[[object], None]


@dataclass(frozen=True)
class Ready:
    """The rank has met the others; `main` is its main thread as faulthandler names it."""

    main: str


@dataclass(frozen=True)
class Prints:
    """Whole lines that the answer has printed to sys.stdout or sys.stderr."""

    stream: str
    text: str


@dataclass(frozen=True)
class Report:
    """How a program ended: `data` is the pickle of its result, or of what it raised.

    `calls` counts the collective calls that it made; -1 if torch does not say. `raised` is the last
    error that came out of the answer, whether the program expected it or not, and `called` are the
    functions of the contract that were called.
    """

    failed: bool
    data: bytes
    bars: list[Bar]
    calls: int
    raised: str = ""
    called: tuple[str, ...] = ()


@dataclass(frozen=True)
class InStep:
    """Whether the collective that every rank makes after a program gave the right sum."""

    ok: bool
    group_is_gone: bool = False


_device = torch.device("cpu")


def device() -> torch.device:
    """Where this rank's models and data are to be: the cpu, or a GPU of its own."""
    return _device


def main(rank: int, size: int, pipe: Connection, folder: str, where: str, seed_shift: str) -> None:
    """Join the others and run what the parent sends, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the parent, which ends the ranks
    torch.set_num_threads(1)
    stacks = (Path(folder) / f"stacks{rank}").open("w", encoding="utf-8")
    faulthandler.enable(stacks)
    faulthandler.register(forkserver.STACKS_SIGNAL, stacks)
    os.environ[draw.SHIFT_VARIABLE] = seed_shift
    if where == "cuda":
        _take_gpu(rank)
    else:
        # Where init_device_mesh sees a GPU it makes a group of its own beside the one of gloo, and
        # the calls in it would go uncounted.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if where == "cuda" else "gloo",
        store=dist.FileStore(str(Path(folder, "store")), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    send = _sender(pipe)
    member = _Member(rank, size, send)
    member.step()
    send(Ready(f"{threading.get_ident():016x}"))
    with contextlib.suppress(EOFError):  # the world is closed
        while True:
            task = pipe.recv()
            send(member.run(*task) if task else member.step())


def _sender(pipe: Connection) -> Send:
    lock = threading.Lock()  # a thread of the answer may print at any time

    def send(message: object) -> None:
        with lock:
            pipe.send(message)

    return send


def _take_gpu(number: int) -> None:
    global _device
    # A wait for other ranks sleeps in the collective call that waits, as with gloo; else it would
    # spin in whatever call looks at the GPU next, and pass for work.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    _device = torch.device("cuda", number)
    torch.cuda.set_device(_device)
    gpu.prepare(_device)


class _Stream(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank: whole lines, with the rank before each."""

    def __init__(self, send: Send, name: str, rank: int) -> None:
        self._send, self._name, self._rank = send, name, rank
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            whole = "".join(f"rank {self._rank}: {line}\n" for line in lines)
            self._send(Prints(self._name, whole))
        return len(text)

    def end_line(self) -> None:
        if self._rest:
            self.write("\n")


class _Member:
    """One rank at work."""

    def __init__(self, rank: int, size: int, send: Send) -> None:
        self._rank, self._size = rank, size
        self._group = dist.group.WORLD
        self._answers: dict[str, ModuleType] = {}
        self._guarded: list[ModuleType] = []
        self._streams = {name: _Stream(send, name, rank) for name in ("stdout", "stderr")}

    def run(self, path: str, data: bytes) -> Report:
        """Load the answer, run the program, and report."""
        reset_torch()
        checks.bars.clear()
        untouched.raised.clear()
        untouched.called.clear()
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        before, answer = self._calls(), ModuleType("no answer")
        try:
            if path not in self._answers:
                self._answers[path] = load(Path(path))
            answer = self._answers[path]
            program, arguments = loads(data, answer)
            self._guard(answer, program)
            note_classes()
            result = program(answer, self._rank, *arguments)
            reset_torch()
            failed, data = False, dumps(result, answer)
        except BaseException as error:
            reset_torch()
            failed, data = True, pack_error(error, self._rank, answer)
        calls = self._calls()
        for stream in self._streams.values():
            stream.end_line()
        made = calls - before if calls >= 0 else -1
        raised, called = "".join(untouched.raised), tuple(untouched.called)
        return Report(failed, data, list(checks.bars), made, raised, called)

    def _guard(self, answer: ModuleType, program: Callable[..., object]) -> None:
        """Watch what the contract leaves alone, if changes.py beside the program asks for it."""
        if answer in self._guarded:
            return
        self._guarded.append(answer)
        folder = program.__module__.rpartition(".")[0]
        name = f"{folder}.changes"
        changes = importlib.import_module(name) if find_spec(name) else None
        if getattr(changes, "ON_RANKS", False):
            names = functions(find_kata(folder.rpartition(".")[2]).solution)
            untouched.watch(answer, names, vars(changes)["CHANGES"], vars(changes)["MAY_DRAW"])

    def step(self) -> InStep:
        """Add up a few numbers with the other ranks."""
        if dist.group.WORLD is not self._group:
            return InStep(False, group_is_gone=True)
        size, sums = self._size, []
        try:
            # On both backends where there are two; NCCL makes its communicator at the first call.
            for where in dict.fromkeys([torch.device("cpu"), _device]):
                numbers = torch.tensor([self._rank + 1, 3, 5], device=where)
                dist.all_reduce(numbers)
                sums.append(numbers.tolist())
        except Exception:
            return InStep(False)
        want = [size * (size + 1) // 2, 3 * size, 5 * size]
        return InStep(all(numbers == want for numbers in sums))

    def _calls(self) -> int:
        if self._group is None or dist.group.WORLD is not self._group:
            return -1
        if _device.type == "cuda":
            return -1  # two backends, and each counts for itself
        return collective_count(self._group)
