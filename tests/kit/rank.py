"""What runs in a rank of the real world: programs, one after another, and `collectives` for them.

`kit.world` starts this module in processes of its own and talks to it in pickles. A rank ends by
itself when its parent is gone.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from kit import verdict
from kit.answers import load
from kit.hygiene import clean_slate
from kit.parcel import dumps, loads, pack_error
from kit.verdict import Bar

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


@dataclass(frozen=True)
class Clock:
    """The processor time that the rank has used so far; the parent asks with this class itself."""

    seconds: float


class Collective(NamedTuple):
    """One collective call: `numel` counts the elements of this rank's input."""

    kind: str
    numel: int
    dtype: torch.dtype


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """The collective calls inside the block, one entry each, those that DDP makes included.

    Kinds are "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce",
    "gather", "scatter", "send", "recv", "barrier"; a coalesced call is one call.
    """
    seen: list[Collective] = []
    with _Watch(seen):
        yield seen


class _Watch(TorchDispatchMode):
    """Sees the operators of torch.distributed, also those that DDP issues from C++."""

    def __init__(self, seen: list[Collective]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # slower calls otherwise, see kit.ruler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, {**dict(zip(_names(func), args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, arguments: dict[str, Any]) -> None:
        kind = _KINDS.get(func._schema.name.partition("::")[2].strip("_"))
        if kind is None:
            return  # wait_tensor and the like
        name = next((name for name in _INPUTS if name in arguments), "")
        tensors = list(_flat(arguments.get(name)))
        dtype = tensors[0].dtype if tensors else torch.float32
        numel = 0 if kind == "barrier" else sum(tensor.numel() for tensor in tensors)
        self._seen.append(Collective(kind, numel, dtype))


_KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}

# What the schemas call this rank's input; the first that an operator has.
_INPUTS = ("input_tensors", "input_tensor", "inputs", "input", "tensors", "tensor", "self")


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _flat(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)


def prepare() -> None:
    """Import what the first DDP of a process needs; it must not count as the time of an answer."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")


def main() -> None:
    """Join the others and run what the parent sends, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the parent, which ends the ranks
    rank, size, pipe, nursery = (int(text) for text in sys.argv[1:5])
    folder, store = Path(sys.argv[5]), sys.argv[6]
    stacks = (folder / f"stacks{rank}").open("w", encoding="utf-8")
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks)
    wire = _Wire(Connection(pipe), nursery)
    prepare()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / store), size),  # type: ignore[attr-defined]
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
                    self._take(self._pipe.recv())
                elif os.getppid() != self._nursery:
                    break  # a child of the parent may still hold the other end
        except (EOFError, OSError):
            pass
        os._exit(1)

    def _take(self, message: Any) -> None:
        if message is Clock:  # answered by this thread, whatever the program does
            self.send(Clock(time.process_time()))
        else:
            self.tasks.put(message)


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
        clean_slate()
        verdict.bars.clear()
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        before, answer = self._calls(), ModuleType("no answer")
        try:
            if path not in self._answers:
                self._answers[path] = load(Path(path))
            answer = self._answers[path]
            program, arguments = loads(data, answer)
            result = program(answer, self._rank, *arguments)
            clean_slate()
            failed, data = False, dumps(result, answer)
        except BaseException as error:
            clean_slate()
            failed, data = True, pack_error(error, self._rank, answer)
        calls = self._calls()
        for stream in self._streams.values():
            stream.end_line()
        return Report(failed, data, list(verdict.bars), calls - before if calls >= 0 else -1)

    def step(self) -> InStep:
        """Add up a few numbers with the other ranks."""
        if dist.group.WORLD is not self._group:
            return InStep(False, group_is_gone=True)
        size = self._size
        try:
            numbers = torch.tensor([self._rank + 1, 3, 5])
            dist.all_reduce(numbers)
        except Exception:
            return InStep(False)
        return InStep(numbers.tolist() == [size * (size + 1) // 2, 3 * size, 5 * size])

    def _calls(self) -> int:
        if self._group is None or dist.group.WORLD is not self._group:
            return -1
        return int(self._group._get_sequence_number_for_group())  # type: ignore[attr-defined]
