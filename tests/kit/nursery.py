"""Makes the ranks of the real world: one process imports torch, and every rank is a fork of it.

A world that broke is there again in a tenth of a second, and four ranks cost no more than two. On
macOS a fork may not use the system's linear algebra, so there every rank is a program of its own.
The nursery imports torch itself and not the specs, so it has no threads and nothing of an answer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from kit.catalog import ROOT

_FORKS = sys.platform == "linux"
_MESSAGE = 4096


class Nursery:
    """The parent's side: it imports from the start, and does what it is asked for after that."""

    def __init__(self, folder: Path) -> None:
        self._control, there = socket.socketpair()
        self._control.settimeout(5.0)
        with (folder / "log").open("wb") as log, there:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from kit.nursery import serve; serve()"),
                    *(str(there.fileno()), str(folder)),
                ],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[there.fileno()],
            )

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def bear(self, size: int, store: str) -> list[Connection]:
        """Ask for ranks that meet in the file `store`; the pipes to them."""
        pipes = [Pipe() for _ in range(size)]
        message = json.dumps({"store": store}).encode().ljust(_MESSAGE)
        socket.send_fds(self._control, [message], [there.fileno() for _, there in pipes])
        for _, there in pipes:
            there.close()
        return [here for here, _ in pipes]

    def wait(self, pid: int) -> int:
        """The exit code of a rank that has ended, negative for a signal; 0 if nobody knows."""
        try:
            self._control.sendall(json.dumps({"pid": pid}).encode().ljust(_MESSAGE))
            return int(self._control.recv(_MESSAGE))
        except (OSError, ValueError):
            return 0

    def close(self, *, wait: float) -> None:
        """End it and its ranks; it is given so many seconds to do that itself."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """The nursery's own side: make ranks until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the parent, which ends us
    control, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    if _FORKS:
        gc.disable()  # while objects are made that stay
        importlib.import_module("kit.rank").prepare()
        gc.freeze()
        gc.enable()
    children: set[int] = set()
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(control, _MESSAGE, 64)
            if not data:
                break
            message = json.loads(data)
            if "store" in message:
                for rank, fd in enumerate(fds):
                    arguments = [rank, len(fds), fd, os.getpid(), folder, message["store"]]
                    children.add(_bear([str(value) for value in arguments], fds, control))
                for fd in fds:
                    os.close(fd)
            else:
                _, status = os.waitpid(message["pid"], 0)
                children.discard(message["pid"])
                control.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # Python would take a second to clear torch away


def _bear(arguments: list[str], fds: list[int], control: socket.socket) -> int:
    rank, mine = arguments[0], int(arguments[2])
    others = [control.fileno(), *(fd for fd in fds if fd != mine)]  # else their end is never seen
    with (Path(arguments[4]) / f"log{rank}").open("wb") as log:
        if not _FORKS:
            command = [sys.executable, "-c", "from kit.rank import main; main()", *arguments]
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
            importlib.import_module("kit.rank").main()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    # Else gloo asks for the address of the host's name, which a laptop without network has not.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        env["GLOO_SOCKET_IFNAME"] = loopback[0]
    return env
