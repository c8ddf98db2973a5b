"""What runs in a rank of the real world: programs, one after another.

`kit.ranks.world` starts this module in processes of its own and talks to it in pickles. A rank ends
by itself when its parent is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import io
import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from kit.answers.loading import load
from kit.answers.reset_torch import reset_torch
from kit.laws import checks
from kit.laws.checks import Bar
from kit.memory import gpu
from kit.ranks.wire import dumps, loads, pack_error

# By default nobody asks for the stacks, since this signal ends a process that does not expect it.
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Ready:
    """The rank has met the others; `main` is its main thread as faulthandler names it."""

    pid: int
    main: str


@dataclass(frozen=True)
class Prints:
    """Whole lines that the answer has printed to sys.stdout or sys.stderr."""

    stream: str
    text: str


@dataclass(frozen=True)
class Report:
    """How a program ended: `data` is the pickle of its result, or of what it raised.

    `calls` counts the collective calls that it made; -1 if torch does not say.
    """

    failed: bool
    data: bytes
    bars: list[Bar]
    calls: int


@dataclass(frozen=True)
class InStep:
    """Whether the collective that every rank makes after a program gave the right sum."""

    ok: bool
    group_is_gone: bool = False


_device = torch.device("cpu")


def device() -> torch.device:
    """Where this rank's models and data are to be: the cpu, or a GPU of its own."""
    return _device


def prepare() -> None:
    """Import what DDP, FSDP and checkpoints need: it must not count as the time of an answer."""
    torch.set_num_threads(1)
    # The first takes as long as torch itself; most of FSDP comes with it, the others add 0.15 s.
    for name in ("_dynamo", "distributed.fsdp", "distributed.checkpoint.state_dict"):
        importlib.import_module(f"torch.{name}")
    with contextlib.suppress(ImportError):  # what the first checkpoint would import
        importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")


def main() -> None:
    """Join the others and run what the parent sends, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the parent, which ends the ranks
    rank, size, pipe, nursery = (int(text) for text in sys.argv[1:5])
    folder, where = Path(sys.argv[5]), sys.argv[6]
    stacks = (folder / f"stacks{rank}").open("w", encoding="utf-8")
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks)
    wire = _Wire(Connection(pipe), nursery)
    prepare()
    if where == "cuda":
        _take_gpu(rank)
    else:
        # Where init_device_mesh sees a GPU it makes a group of its own beside the one of gloo, and
        # the calls in it would go uncounted.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if where == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    member = _Member(rank, size, wire)
    member.step()
    wire.send(Ready(os.getpid(), f"{threading.get_ident():016x}"))
    while True:
        task = wire.tasks.get()
        wire.send(member.run(*task) if task else member.step())


def _take_gpu(number: int) -> None:
    global _device
    # A wait for other ranks sleeps in the collective call that waits, as with gloo; else it would
    # spin in whatever call looks at the GPU next, and pass for work.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    _device = torch.device("cuda", number)
    torch.cuda.set_device(_device)
    gpu.prepare(_device)


class _Wire:
    """The pipe to the parent. A thread reads it, which sees at once that the parent is gone."""

    def __init__(self, pipe: Connection, nursery: int) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pipe, self._nursery = pipe, nursery
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: object) -> None:
        with self._lock:
            self._pipe.send(message)

    def _listen(self) -> None:
        try:
            while True:
                if self._pipe.poll(1.0):
                    self.tasks.put(self._pipe.recv())
                elif os.getppid() != self._nursery:
                    break  # a child of the parent may still hold the other end
        except (EOFError, OSError):
            pass
        os._exit(1)


class _Stream(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank: whole lines, with the rank before each."""

    def __init__(self, wire: _Wire, name: str, rank: int) -> None:
        self._wire, self._name, self._rank = wire, name, rank
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            whole = "".join(f"rank {self._rank}: {line}\n" for line in lines)
            self._wire.send(Prints(self._name, whole))
        return len(text)

    def end_line(self) -> None:
        if self._rest:
            self.write("\n")


class _Member:
    """One rank at work."""

    def __init__(self, rank: int, size: int, wire: _Wire) -> None:
        self._rank, self._size = rank, size
        self._group = dist.group.WORLD
        self._answers: dict[str, ModuleType] = {}
        self._streams = {name: _Stream(wire, name, rank) for name in ("stdout", "stderr")}

    def run(self, path: str, data: bytes) -> Report:
        """Load the answer, run the program, and report."""
        reset_torch()
        checks.bars.clear()
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        before, answer = self._calls(), ModuleType("no answer")
        try:
            if path not in self._answers:
                self._answers[path] = load(Path(path))
            answer = self._answers[path]
            program, arguments = loads(data, answer)
            result = program(answer, self._rank, *arguments)
            reset_torch()
            failed, data = False, dumps(result, answer)
        except BaseException as error:
            reset_torch()
            failed, data = True, pack_error(error, self._rank, answer)
        calls = self._calls()
        for stream in self._streams.values():
            stream.end_line()
        return Report(failed, data, list(checks.bars), calls - before if calls >= 0 else -1)

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
        return int(self._group._get_sequence_number_for_group())  # type: ignore[attr-defined]
