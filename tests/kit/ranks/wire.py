"""What crosses between the processes of the real world: values, and errors with their lines."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Iterator
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from tblib import pickling_support

from kit.laws.checks import SpecFailure

_MOST_FRAMES = 60


def dumps(value: object, answer: ModuleType) -> bytes:
    """A pickle in which what the answer defines stands by its name.

    Every process imports the answer under another module name, so that pickle itself would not find
    its classes again on the other side.
    """
    file = io.BytesIO()
    _Pickler(file, answer).dump(value)
    return file.getvalue()


def loads(data: bytes, answer: ModuleType) -> Any:
    """What `dumps` has pickled, with the classes of this process's `answer`."""
    return _Unpickler(io.BytesIO(data), answer).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, answer: ModuleType) -> None:
        super().__init__(file)
        self._answer = answer

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, (type, FunctionType)) and value.__module__ == self._answer.__name__:
            name = value.__qualname__
            return None if "<" in name else name  # <locals>: pickle says what is wrong with it
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, answer: ModuleType) -> None:
        super().__init__(file)
        self._answer = answer

    def persistent_load(self, name: str) -> Any:
        return operator.attrgetter(name)(self._answer)


def pack_error(error: BaseException, rank: int, answer: ModuleType) -> bytes:
    """The pickle of what a program raised, with the traceback and the rank."""
    trace = error.__traceback__
    error = error.with_traceback((trace and trace.tb_next) or trace)  # without the frame of `run`
    _shorten(error)
    if isinstance(error, SpecFailure):
        error = error.but(got=f"on rank {rank}: {error.got}")
    notes = [*getattr(error, "__notes__", []), f"on rank {rank}"]  # Python 3.10 has no add_note
    if not isinstance(error, SpecFailure):
        vars(error)["__notes__"] = notes
    pickling_support.install(error)
    if isinstance(error, SpecFailure) and not _crosses(error, answer):
        error.__cause__ = None  # which is the answer's; what the spec says of it crosses
    return dumps(error if _crosses(error, answer) else _StandIn(error, notes, answer), answer)


def _crosses(error: BaseException, answer: ModuleType) -> bool:
    try:
        loads(dumps(error, answer), answer)
    except Exception:
        return False
    return True


def _shorten(error: BaseException) -> None:
    """Cut the middle out of the tracebacks of endless recursions: pickle would recurse as deep."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traces = list(_traces(chain.__traceback__))
        if len(traces) > _MOST_FRAMES:
            traces[_MOST_FRAMES // 2 - 1].tb_next = traces[-_MOST_FRAMES // 2]
        chain = chain.__cause__ or chain.__context__


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


class _StandIn:
    """Becomes an error of the same name and message, for one that cannot be pickled."""

    def __init__(self, error: BaseException, notes: list[str], answer: ModuleType) -> None:
        try:
            text = str(error)
        except Exception:
            text = "(it has no message that can be shown)"
        base = next(kind for kind in type(error).__mro__ if _is_known(kind, answer))
        self._parts = (type(error).__name__, base, text, notes, error.__traceback__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_in, self._parts


def _stand_in(
    name: str, base: type[BaseException], text: str, notes: list[str], trace: TracebackType
) -> BaseException:
    kind: Any = type(name, (base,), {"__str__": lambda self: text})
    error: BaseException = kind.__new__(kind, text)
    error.__notes__ = notes
    return error.with_traceback(trace)


def _is_known(kind: type, answer: ModuleType) -> bool:
    try:
        return loads(dumps(kind, answer), answer) is kind
    except Exception:
        return False
