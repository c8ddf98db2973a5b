"""How answers meet specs: `--answers` says whose, `--device` says where.

A spec takes the fixture `answer` and is run once for each answer that was selected. The candidate's
answer, the reference and other right answers must pass. A mistake runs only under the spec that it
names and must fail there, with the words that it names. A stub must fail everywhere with
NotImplementedError and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import signal
import threading
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import pytest_timeout
import torch

from kit.answers import causes, figures
from kit.answers.blame import blamed
from kit.answers.contract import functions
from kit.answers.loading import Answer, load, sources
from kit.answers.marks import answer_of, case_of, name_of
from kit.answers.reset_torch import note_classes, reset_torch
from kit.answers.stubs import is_untouched
from kit.catalog import find_kata
from kit.laws import checks, draw, untouched
from kit.laws.suspects import note_passed
from kit.memory import gpu
from kit.patience import Patience, family
from kit.private_torch import put_off_dynamo
from kit.ranks import worlds


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memory katas")
    group.addoption(
        "--answers",
        default="katas",
        help="katas (default), solutions, right, stubs, mistakes, or a file; commas join them",
    )
    group.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where to run")
    group.addoption(
        "--seed-shift", type=int, help="move every seed: a verdict must not depend on N"
    )


def pytest_configure(config: pytest.Config) -> None:
    shift = config.getoption("--seed-shift")
    if shift is not None:
        os.environ[draw.SHIFT_VARIABLE] = str(shift)
    config.pluginmanager.register(worlds)
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist hears of its share only
        config.pluginmanager.register(causes.Causes())
        config.pluginmanager.register(figures.Figures())
    put_off_dynamo()
    # The shapes are small: threads cost more than they bring, and two runs side by side would
    # fight for the cores.
    torch.set_num_threads(1)
    # Objects by the hundred thousand stay alive: looking through them as often costs some 3 %.
    gc.set_threshold(200_000)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Before the first spec is announced: no clock runs yet.
    if session.config.getoption("--device") == "cuda":
        gpu.prepare(torch.device("cuda"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A number alone says nothing to whoever reads it."""
    return f"{argname}={val}" if isinstance(val, int | float) else None


_sources = functools.cache(sources)  # it writes a file for each mistake


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "answer" not in metafunc.fixturenames:
        return
    kata = find_kata(metafunc.definition.path.parent.name)
    try:
        answers = _sources(kata, metafunc.config.getoption("--answers"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    name = metafunc.function.__name__
    answers = [a for a in answers if not a.mistake or a.mistake.spec == name]
    metafunc.parametrize("answer", answers, ids=str, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a mistake only under the case that it names; skip what this device cannot show."""
    named = {a.mistake for item in items if (a := answer_of(item)) and _is_named(item, a)}
    kept, dropped = [], []
    for item in items:
        answer = answer_of(item)
        # A mistake that names no case that there is stays under all of them, which say so.
        elsewhere = answer and answer.mistake in named and not _is_named(item, answer)
        (dropped if elsewhere else kept).append(item)
        if item.get_closest_marker("gpu") and config.getoption("--device") != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    _refuse_untouched_stubs(config, kept)


def _refuse_untouched_stubs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Plain `pytest` before anything is written is a question, not hundreds of failures."""
    stubs = {a.path for item in items if (a := answer_of(item)) and a.kind == "katas"}
    plugins = config.pluginmanager.get_plugins()
    judging = any(type(plugin).__module__ == "desk.recorder" for plugin in plugins)
    if judging or config.option.collectonly or not stubs or not all(map(is_untouched, stubs)):
        return
    raise pytest.UsageError(
        "nothing is written in katas/ yet, so there is nothing to test. `nox` says what to do "
        "first, `nox -s kata` judges your work, `pytest --answers=solutions` the references."
    )


def _is_named(item: pytest.Item, answer: Answer) -> bool:
    """Whether a mistake names this spec, and this case of it if it names one."""
    wanted = answer.mistake.caught_by if answer.mistake else ""
    return wanted in (_spec_of(item), name_of(item))


def _spec_of(item: pytest.Item) -> str:
    """The spec's name and the id of its case, without the id of the answer."""
    case = case_of(item)
    return f"{name_of(item)}[{case}]" if case else name_of(item)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Turn the outcome round for answers that must fail."""
    __tracebackhide__ = True
    answer = answer_of(pyfuncitem)
    if answer is None or answer.kind not in ("stubs", "mistakes"):
        try:
            result = yield
        except Exception as error:
            load_one = functools.partial(_module, pyfuncitem.config)
            is_written = not isinstance(error, NotImplementedError)
            if answer and is_written and (told := blamed(pyfuncitem, answer, error, load_one)):
                raise told from None
            raise
        if answer:
            note_passed(answer.path, _spec_of(pyfuncitem))
        return result
    if answer.mistake and not _is_named(pyfuncitem, answer):
        mistake = answer.mistake
        pytest.fail(f"{mistake.place}: no spec has the case {mistake.caught_by}", pytrace=False)
    try:
        yield
    except Exception as error:
        if answer.mistake is None:
            if isinstance(error, NotImplementedError):
                return True
            raise
        honest = answer.mistake.raises or checks.SpecFailure
        if not isinstance(error, honest):
            raise
        if answer.mistake.says not in str(error):
            pytest.fail(
                f"{answer} is caught, but not for the reason that it names: "
                f"{answer.mistake.says!r} is not in the message:\n{error}"
            )
        causes.note(pyfuncitem, answer.kata.name, answer.mistake, error)
        return True
    what = answer.mistake.belief if answer.mistake else "a stub"
    pytest.fail(f"the spec accepts {answer}: {what}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    if call.when == "call":
        item.user_properties += [("bar", dataclasses.asdict(bar)) for bar in checks.bars]
        checks.bars.clear()
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A time limit that counts the work, or the waiting, of this process and all its children."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # as pytest-timeout has it
    patience = Patience(settings.timeout)

    def look(signum: int, frame: object) -> None:
        __tracebackhide__ = True
        patience.look(lambda: [*family(), *worlds.ranks(item.config)])
        if patience.is_over:
            _stop_the_timer()  # once only: the failure takes a while to be shown
            pytest_timeout.timeout_sigalrm(item, settings)
        signal.setitimer(signal.ITIMER_REAL, often)  # not before: a look may take longer than that

    item.cancel_timeout = _stop_the_timer  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, look)
    often = min(1.0, settings.timeout / 4)
    signal.setitimer(signal.ITIMER_REAL, often)
    return True


def _stop_the_timer() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    # Not SIG_DFL: a last alarm that is on its way to another thread would end the process.
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> ModuleType:
    """The module under judgement, imported once for a whole run."""
    return _module(request.config, request.param)


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> ModuleType:
    """The reference solution of the same kata, for the bars."""
    kata = find_kata(request.path.parent.name)
    return _module(request.config, _sources(kata, "solutions")[0])


_MODULES = pytest.StashKey[dict[str, ModuleType]]()


def _module(config: pytest.Config, answer: Answer) -> ModuleType:
    modules = config.stash.setdefault(_MODULES, {})
    key = str(answer.path)
    if key not in modules:
        modules[key] = load(answer.path)
        # Nobody watches yet where a kata does not say what its functions may change.
        if (answer.kata.specs / "changes.py").is_file():
            changes = import_module(f"specs.{answer.kata.name}.changes").CHANGES
            untouched.watch(modules[key], functions(answer.kata.solution), changes)
    return modules[key]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the spec runs: `--device`."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """What is there stays: an answer that collects garbage need not look through all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_torch() -> None:
    """Every spec starts from the same torch, whatever an answer before it has left behind."""
    note_classes()
    reset_torch()
    untouched.called.clear()
    checks.bars.clear()
