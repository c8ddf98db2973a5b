"""The terminal of this process: lent to a debugger, and read a key at a time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator

from kit.forkserver import blocked

_ESCAPE = b"\x1b"


class Terminal:
    """Stdin, where it is a terminal, while the breakpoint() of an answer uses it.

    Without SIGTTOU whoever is not in front may set things too, and is not stopped for it.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = os.ttyname(0) if name is None else name

    def hand_over(self, group: int) -> None:
        """Let a group of processes read from it; Ctrl-C goes to them."""
        with blocked(signal.SIGTTOU), contextlib.suppress(OSError):
            os.tcsetpgrp(0, group)

    def take_back(self) -> None:
        """Read from it again."""
        with blocked(signal.SIGTTOU), contextlib.suppress(OSError):
            os.tcsetpgrp(0, os.getpgrp())


class Keys(Terminal):
    """Every key at once, without Enter, as long as the `with` block runs; not during debugging."""

    def __init__(self, pressed: Callable[[str], None]) -> None:
        super().__init__()
        self._pressed = pressed
        self._mode = termios.tcgetattr(0)
        self._may_read, self._is_waiting = threading.Event(), threading.Event()
        self._wake, self._waker = os.pipe()
        self._is_over = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Keys:
        self._resume()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pause()
        self._is_over = True  # not before: the thread that reads would not say that it has paused
        self._may_read.set()
        self._thread.join(1.0)

    def hand_over(self, group: int) -> None:
        """Stop reading, and lend it."""
        self._pause()
        super().hand_over(group)

    def take_back(self) -> None:
        """Go on reading."""
        super().take_back()
        self._resume()

    def _pause(self) -> None:
        self._may_read.clear()
        os.write(self._waker, b".")
        self._is_waiting.wait(1.0)
        with blocked(signal.SIGTTOU), contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, self._mode)

    def _resume(self) -> None:
        with blocked(signal.SIGTTOU), contextlib.suppress(termios.error):
            tty.setcbreak(0)  # Ctrl-C is still Ctrl-C
        self._is_waiting.clear()
        self._may_read.set()

    def _read(self) -> None:
        while not self._is_over:
            if not self._may_read.is_set():
                self._is_waiting.set()
                self._may_read.wait()
                continue
            ready, _, _ = select.select([0, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 100)
            elif text := os.read(0, 1):
                if text != _ESCAPE or not _skip_rest_of_key():
                    self._pressed(text.decode(errors="replace"))
            else:
                return  # the terminal is gone


def _skip_rest_of_key() -> bool:
    """Read on behind ESC: an arrow, say, is ESC [ A. False if there is nothing: it was Esc."""
    last = b""
    while select.select([0], [], [], 0.01)[0]:
        last = os.read(0, 1)
        if last == b"~" or (last.isalpha() and last != b"O"):
            break
    return bool(last)


def own_terminal() -> Terminal | None:
    """Where somebody can answer a debugger, if there is such a place."""
    return Terminal() if os.isatty(0) and os.isatty(1) else None


def interrupt(signum: int, frame: object) -> None:
    """A handler that makes a signal the same as Ctrl-C."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Ctrl-C, or SIGTERM, counts at the end of this: nothing is begun and then forgotten.

    To block the signal in this thread is not enough: another one takes it, and this one hears of it
    all the same.
    """
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)
