"""What the forkserver imports before its first fork: importing this module is what makes it warm.

Nothing of an answer and no spec is imported here, no thread is started and CUDA is not touched, so
that forks are safe. Only `kit.forkserver` names this module.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import kit
from kit.forkserver import FOLDER_VARIABLE, PRELOAD_FILE, PRELOAD_SIGNAL


def _prepare(folder: Path) -> None:
    # Ctrl-C at a terminal comes to the whole group: it is for those who asked for the forks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.setpgid(0, 0)
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # The server ends when nobody is left who could ask it for forks, however they have ended.
    atexit.register(_clear_away, folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Else whoever asks whether there is a GPU starts CUDA, after which a fork cannot use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no kata asks the network for a model
    # Else gloo asks for the address of the host's name, which a laptop without network has not.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def _clear_away(folder: Path) -> None:
    """What nobody else can when the process that started the server was killed."""
    shutil.rmtree(folder, ignore_errors=True)
    server: Any = forkserver._forkserver
    address = server._forkserver_address
    if address and Path(address).parent.name.startswith("pymp-"):  # the library's own
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def _modules() -> Iterator[str]:
    yield from ("numpy", "torch", "pytest", "pytest_timeout", "psutil", "tblib")
    for package in (kit, importlib.import_module("_pytest")):  # its plugins are in it
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        yield from (module.name for module in found)


def import_all() -> None:
    """Import what is slow, so that it does not count as the time of an answer."""
    gc.disable()  # while objects are made that stay
    for name in _modules():
        with contextlib.suppress(ImportError):  # whoever needs it says so better
            importlib.import_module(name)
    # The first optimizer would import it, as long as torch itself.
    importlib.import_module("kit.private_torch").put_off_dynamo()
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()


def _import_more(folder: Path) -> None:
    """Import what `forkserver.preload` names, as far as it is there."""
    gc.disable()
    for name in (folder / PRELOAD_FILE).read_text(encoding="utf-8").split():
        with contextlib.suppress(Exception):  # the spec that needs it says so better
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _tell_up(folder)


def _tell_up(folder: Path) -> None:
    """Say that forks can be had, or why they are not safe."""
    torch = sys.modules.get("torch")
    path = folder / "starting"
    path.write_text("CUDA is in use" if torch and torch.cuda.is_initialized() else "")
    path.rename(path.with_name(f"up{os.getpid()}"))


if _name := os.environ.get(FOLDER_VARIABLE):
    _folder = Path(_name)
    if not _folder.is_dir():
        os._exit(0)  # who started it is gone already
    try:
        _prepare(_folder)
        import_all()
    except BaseException:
        traceback.print_exc()  # into the log; each fork fails in the same way, and says it
    # The server's loop waits for signals too, so this runs between two forks.
    signal.signal(PRELOAD_SIGNAL, lambda *_: _import_more(_folder))
    _tell_up(_folder)
