"""Makes the ranks of the real worlds: one process imports torch, and every rank is a fork of it.

A world of any size is there in a tenth of a second, the first time and after it broke. On macOS a
fork may not use the system's linear algebra, so there every rank is a program of its own.
The nursery imports torch itself and not the specs, so it has no threads and nothing of an answer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kit.catalog import ROOT
from kit.patience import family

_FORKS = sys.platform == "linux"
_MESSAGE = 4096
_PATIENCE = 10.0  # for an answer that it has at once
_UP = "up"  # the file that says that it has imported everything


class Nursery:
    """The parent's side: one process for worlds of every size, started with the first of them.

    One that has died is replaced when the next ranks are asked for.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._born = 0

    @property
    def pid(self) -> int:
        """The process; 0 if there is none."""
        return self._process.pid if self._process else 0

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def family(self) -> list[int]:
        """The process and all ranks."""
        return family(self.pid) if self.is_alive else []

    def is_home_of(self, folder: Path) -> bool:
        """Whether the ranks of that folder were made here: they go when the process goes."""
        return self.is_alive and folder.parent == self._folder

    def bear(self, size: int, device: str = "cpu") -> tuple[Path, list[Connection]]:
        """Ask for ranks that meet each other: the folder of their files, and the pipes to them."""
        if not self.is_alive:
            self.close()
            self._start()
        self._born += 1
        folder = self._folder / f"world{self._born}"
        pipes = [Pipe() for _ in range(size)]
        self._ask({"bear": str(folder), "device": device}, [there.fileno() for _, there in pipes])
        for _, there in pipes:
            there.close()
        return folder, [here for here, _ in pipes]

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="memory-katas-world-"))
        self._control, there = socket.socketpair()
        self._control.settimeout(_PATIENCE)
        with (self._folder / "log").open("wb") as log, there:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from kit.ranks.nursery import serve; serve()"),
                    *(str(there.fileno()), str(self._folder), str(os.getpid())),
                ],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[there.fileno()],
            )

    def wait(self, pid: int) -> int:
        """The exit code of a rank that has ended, negative for a signal; 0 if nobody knows.

        The nursery must be the home of the rank.
        """
        self._ask({"wait": pid})
        told, code = 0, 0
        with contextlib.suppress(OSError, ValueError):
            while told != pid:  # what an interrupted question was answered comes first
                told, code = json.loads(self._control.recv(_MESSAGE))
        return int(code)

    def end(self, folder: Path) -> None:
        """End the ranks of that folder, also those that have not said yet who they are."""
        if self.is_home_of(folder):
            self._ask({"end": str(folder)})

    def _ask(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it is dead: its ranks are too, which the world notices
            socket.send_fds(self._control, [json.dumps(message).encode().ljust(_MESSAGE)], fds)

    def close(self) -> None:
        """End it and all its ranks."""
        if self._process is None:
            return
        self._control.close()
        # As long as it imports torch, it hears nothing and has no ranks.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0 if (self._folder / _UP).exists() else 0.0)
        self._process.kill()
        self._process.wait()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


def serve() -> None:
    """The nursery's own side: make ranks until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the parent, which ends us
    control, folder, parent = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    if _FORKS:
        gc.disable()  # while objects are made that stay
        importlib.import_module("kit.ranks.rank").prepare()
        gc.freeze()
        gc.enable()
    Path(folder, _UP).touch()
    children: dict[int, str] = {}  # the ranks by their process; the folder of each
    try:
        with contextlib.suppress(ConnectionError):  # the parent is gone, with an answer unread
            while _is_called(control, parent):
                data, fds, _, _ = socket.recv_fds(control, _MESSAGE, 64)
                if not data:
                    break
                _obey(json.loads(data), fds, children, control)
        _end(list(children), children)
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        traceback.print_exc()  # into the log, which the parent shows
        sys.stderr.flush()
    finally:
        _end(list(children), children)
        os._exit(0)  # Python would take a second to clear torch away


def _is_called(control: socket.socket, parent: int) -> bool:
    """Wait for a message, or for the end of the parent, whose children may hold its socket."""
    while not select.select([control], [], [], 1.0)[0]:
        if os.getppid() != parent:
            return False
    return True


def _obey(
    message: dict[str, Any], fds: list[int], children: dict[int, str], control: socket.socket
) -> None:
    if "bear" in message:
        folder, where = message["bear"], message["device"]
        Path(folder).mkdir()
        for rank, fd in enumerate(fds):
            arguments = [str(value) for value in (rank, len(fds), fd, os.getpid(), folder, where)]
            children[_bear(arguments, fds, control)] = folder
        for fd in fds:
            os.close(fd)
    elif "wait" in message:
        pid = message["wait"]
        status = os.waitpid(pid, 0)[1] if children.pop(pid, None) else 0
        answer = json.dumps([pid, os.waitstatus_to_exitcode(status)])
        control.sendall(answer.encode().ljust(_MESSAGE))
    else:
        folder = message["end"]
        _end([pid for pid, home in children.items() if home == folder], children)
        shutil.rmtree(folder, ignore_errors=True)


def _end(pids: list[int], children: dict[int, str]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
        del children[pid]


def _bear(arguments: list[str], fds: list[int], control: socket.socket) -> int:
    rank, mine = arguments[0], int(arguments[2])
    others = [control.fileno(), *(fd for fd in fds if fd != mine)]  # else their end is never seen
    with (Path(arguments[4]) / f"log{rank}").open("wb") as log:
        if not _FORKS:
            command = [sys.executable, "-c", "from kit.ranks.rank import main; main()", *arguments]
            actions: list[tuple[int, ...]] = [
                (os.POSIX_SPAWN_DUP2, log.fileno(), fd) for fd in (1, 2)
            ]
            actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in others]
            return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
        pid = os.fork()
        if pid:
            return pid
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            for fd in others:
                os.close(fd)
            sys.argv[1:] = arguments
            importlib.import_module("kit.ranks.rank").main()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    # Else whoever asks whether there is a GPU starts CUDA, after which a fork cannot use it.
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Else gloo asks for the address of the host's name, which a laptop without network has not.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        env["GLOO_SOCKET_IFNAME"] = loopback[0]
    return env
