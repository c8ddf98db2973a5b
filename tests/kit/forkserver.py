"""One warm process, of which verdicts and ranks are forks: multiprocessing's forkserver.

It imports torch, pytest and the kit once (`kit.warm`); a fork of it is at work in some 20 ms. Where
a fork is not safe, each process starts afresh (spawn): on macOS it may not use the system's linear
algebra, and nowhere a GPU that is in use already.
Every process stands in a group of its own, with all that an answer starts in it, and the group ends
when the process that asked for it ends, even by SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from kit.catalog import ROOT

FOLDER_VARIABLE = "MEMORY_KATAS_FORKSERVER"
_FORKS = sys.platform == "linux"
STACKS_SIGNAL = signal.SIGUSR1
PRELOAD_SIGNAL = signal.SIGUSR2
PRELOAD_FILE = "modules"
MOST_FORKS = 256  # of one process and its descendants together
_TOO_MANY = ".too-many-forks"
_START_LIMIT = 180.0  # torch may come from a cold disk
_forking: Any = multiprocessing.get_context("forkserver") if _FORKS else None
_spawning: Any = multiprocessing.get_context("spawn")
_server: Any = forkserver._forkserver  # the library's own, of which too little is public
_folder: Path | None = None


def start() -> Path:
    """Start the server, without waiting for it; its folder, for files that go when it goes."""
    global _folder
    if _is_fork():
        return Path(os.environ[FOLDER_VARIABLE])
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="memory-katas-"))
        atexit.register(stop)
    if _FORKS:
        _forking.set_forkserver_preload(["kit.warm"])
        _server.ensure_running = _ensure_running  # which the library calls too, at each fork
        _server.ensure_running()
    return _folder


def _ensure_running() -> None:
    assert _folder is not None
    resource_tracker.ensure_running()  # here, for at its end it unblocks what is blocked below
    # It ignores Ctrl-C from its first moment, for it inherits what is blocked.
    with blocked(signal.SIGINT), _environment(_folder):
        forkserver.ForkServer.ensure_running(_server)


def stop() -> None:
    """End the server; its forks end with those who asked for them. `start` makes a new one."""
    global _folder
    if _is_fork() or _folder is None:
        return
    if number := pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)  # by itself it takes a second to clear torch away
        _server._stop()
    shutil.rmtree(_folder, ignore_errors=True)
    _folder = None


def pid() -> int:
    """The process of the server; 0 if there is none."""
    return os.getppid() if _is_fork() else _server._forkserver_pid or 0


def is_warm() -> bool:
    """Whether a process is to be had at once."""
    start()
    return _FORKS and _mark().exists()


def wait_until_warm(given_up: Callable[[], bool] = lambda: False) -> bool:
    """Wait for the server's imports; False if they were given up, RuntimeError if they failed."""
    folder, until = start(), time.monotonic() + _START_LIMIT
    while _FORKS and not _mark().exists():  # not is_warm(): it would start a dead one again
        if given_up():
            return False
        if is_gone(pid()) or time.monotonic() > until:
            raise RuntimeError(f"the warm process could not be started\n{read(folder / 'log')}")
        time.sleep(0.01)
    return True


def preload(modules: Collection[str]) -> None:
    """Have the server import these too, for the forks that come after it; nobody waits for it.

    A fork that is asked for meanwhile comes a little later. What is not there is left out.
    """
    if modules and is_warm():
        (start() / PRELOAD_FILE).write_text("\n".join(modules), encoding="utf-8")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid(), PRELOAD_SIGNAL)


def _mark() -> Path:
    """What the server leaves in its folder when it has imported everything."""
    folder = Path(os.environ[FOLDER_VARIABLE]) if _is_fork() else _folder
    return (folder or Path()) / f"up{pid()}"


def read(log: Path) -> str:
    """What a process has written so far; nothing if it has not come so far."""
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def pipe() -> tuple[Connection, Connection]:
    """Two ends, one of them to give to a process."""
    here, there = _spawning.Pipe()
    return here, there


def fork(target: Callable[..., None], *arguments: Any, log: Path, has_forks: bool) -> BaseProcess:
    """Run `target(*arguments)` in a process of its own; `log` takes its stdout and stderr.

    Target and arguments are pickled; a Connection may be one. `has_forks`: it may call this too.
    """
    wait_until_warm()
    context = _forking if _is_safe() else _spawning
    process: BaseProcess = context.Process(
        target=_main, args=(target, arguments, str(log)), daemon=not has_forks
    )
    try:
        process.start()
    except (EOFError, ConnectionError):
        _await_end(pid())  # the server has been killed, and as long as it is not gone it counts
        wait_until_warm()
        process.start()
    return process


def stack_of_last_fork(log: Path) -> str:
    """Where the process with this log was ended because of more than MOST_FORKS; or nothing."""
    return read(Path(f"{log}{_TOO_MANY}"))


def ask_stacks(process: BaseProcess, stacks: Path) -> str:
    """Where a process is, once it has `stacks` registered with faulthandler for STACKS_SIGNAL.

    It answers even in native code. By default nobody asks: the signal would end another process.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid or 0, STACKS_SIGNAL)
    text, until = "", time.monotonic() + 3.0
    while time.monotonic() < until:
        time.sleep(0.05)
        before, text = text, read(stacks)
        if text and text == before:
            break
    return text


def ending(code: int) -> str:
    """An exit code in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.Signals(-code).name}"


def end(process: BaseProcess) -> int:
    """Kill a process with its group; its exit code, negative for a signal. A dead one keeps its."""
    for kill in (os.killpg, os.kill):  # it may not have a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return process.exitcode or 0


def _is_fork() -> bool:
    parent = multiprocessing.parent_process()
    return _FORKS and parent is not None and FOLDER_VARIABLE in os.environ


def _is_safe() -> bool:
    """Whether the server can be forked: it is there, and has not touched a GPU."""
    return _FORKS and not read(_mark())


def is_gone(number: int) -> bool:
    """Whether a process has ended, if nobody has asked how yet."""
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _await_end(number: int) -> None:
    until = time.monotonic() + 10.0
    while not is_gone(number) and time.monotonic() < until:
        time.sleep(0.01)


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """This thread hears of a signal at the end of this; what it starts has it blocked too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), before]))
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[FOLDER_VARIABLE], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _main(target: Callable[..., None], arguments: tuple[Any, ...], log: str) -> None:
    os.setpgid(0, 0)
    _die_with_parent()
    _limit_forks(f"{log}{_TOO_MANY}")
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if _server._forkserver_address:
        _ask_the_same_server()
    else:  # a process of its own
        importlib.import_module("kit.warm").import_all()
    target(*arguments)


def _limit_forks(note: str) -> None:
    """End the whole group before the forks of an answer have taken the machine; `note` says so."""
    # Appending is one step for all who do it at once; a counter in shared memory loses some.
    count = open(f"{note}-count", "ab", buffering=0)  # noqa: SIM115

    def about_to_fork() -> None:
        count.write(b".")
        number = os.fstat(count.fileno()).st_size
        if number > MOST_FORKS:
            own = f"{note}-{os.getpid()}"  # whole before it counts: another one may end this one
            with open(own, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            os.replace(own, note)
            os.killpg(os.getpgrp(), signal.SIGKILL)

    os.register_at_fork(before=about_to_fork)


def _ask_the_same_server() -> None:
    """Let forks of this fork come from the server that it came from.

    The library's own words say so, and yet it would start another one: `ensure_running` looks for a
    process that it has started itself. Where later versions ask for more than the address, they get
    their second server.
    """
    if not hasattr(_server, "_forkserver_authkey"):
        _server.ensure_running = lambda: None


def _die_with_parent() -> None:
    """End this group when whoever asked for it ends: the other end of a pipe is closed then."""
    parent, group = multiprocessing.parent_process(), os.getpgrp()
    assert parent is not None
    sentinel = parent.sentinel
    if hasattr(fcntl, "F_SETSIG"):  # Linux: the kernel does it, whatever runs here
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -group)
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
        if connection.wait([sentinel], 0):
            os.killpg(group, signal.SIGKILL)
        return

    def watch() -> None:
        connection.wait([sentinel])
        os.killpg(group, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
