"""A pytest plugin of the judging process: tells the desk what happens to each spec."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest

from desk import events
from desk.events import (
    TODO_KIND,
    Broken,
    Chart,
    Collected,
    Event,
    Finished,
    Order,
    Outcome,
    Spec,
    Started,
)
from desk.explain import Judged, explain, place_in
from desk.verdict import part_of
from kit import catalog
from kit.answers import contract, loading
from kit.answers.marks import answer_of, case_of, clause_of, group_of, name_of
from kit.catalog import Kata, Section
from kit.memory.gpu import ends_the_gpu
from kit.memory.ruler import human
from kit.ranks.world import needs_world

_LAST_PRINTS = 20


class Recorder:
    """Tells the desk about each spec."""

    def __init__(self, tell: Callable[[Event], None], order: Callable[[], Order]) -> None:
        """`order` waits until the desk says what is to run."""
        self._tell, self._order = tell, order
        self._seconds = 0.0
        self._item: pytest.Item | None = None

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption(
            "--claims", default="", help="folder in which several runs share the specs"
        )
        parser.addoption(
            "--helps", action="store_true", help="leave worlds of ranks to another run"
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Bring the specs into the order of the laps, and leave out those that nobody wants.

        What is about a function that has changed comes first: the spec that failed last, then in
        the core and after it or, past the core, of all.
        """
        wanted = self._order()
        config.option.maxfail = 0 if wanted.run_all else 1
        order = {section: place for place, section in enumerate(wanted.sections)}
        subjects: dict[Section, Counter[str]] = {}
        for item in items:
            subjects.setdefault(_section(item), Counter())[_subject(item)] += 1

        def is_wanted(item: pytest.Item) -> bool:
            section = _section(item)
            return section in order or section not in _kata(item).sections

        def place(item: pytest.Item) -> tuple[bool, bool, bool, int, bool]:
            section = _section(item)
            subject = max(subjects[section], key=subjects[section].__getitem__)  # of most of it
            return (
                name_of(item) != wanted.failed or _subject(item) not in wanted.changed,
                section.lap != "core" and not wanted.past_core,
                subject not in wanted.changed,
                order.get(section, len(order)),
                _subject(item) not in wanted.changed,
            )

        items[:] = sorted(filter(is_wanted, items), key=place)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell(Collected([_spec(item) for item in session.items]))

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """As pytest's own loop, but for what another process has claimed."""
        if not session.config.getoption("--claims") or session.testsfailed:
            return None  # it knows what to say of files that cannot be collected
        claimed = _claimed(session)
        item = next(claimed, None)
        while item is not None:
            following = next(claimed, None)  # it decides which fixtures stay
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self._tell(Started(nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item = item

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        # Before pytest turns a unittest.SkipTest into a skip without the frames of the answer.
        error = call.excinfo.value if call.excinfo else None
        report = yield
        self._seconds += call.duration
        if error is None and call.when != "call":
            return report
        prints = _prints(item, report).splitlines()[-_LAST_PRINTS:]
        judged = _judged(item, importing=error is not None and _is_importing(error, item))
        if error is not None and judged.importing:
            item.session.shouldstop = "the file cannot be judged"
            self._tell(Broken(explain(error, judged), prints))
            return report
        if error is not None and ends_the_gpu(error):
            item.session.shouldstop = "each later spec would raise the same"
        charts = [_chart(value) for key, value in report.user_properties if key == "bar"]
        outcome = _outcome(item.nodeid, self._seconds, error, judged, charts, prints)
        plan: Any = dict(report.user_properties).get("plan")
        self._tell(dataclasses.replace(outcome, plan=plan))
        return report

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """An answer raised KeyboardInterrupt or pytest's Exit: the desk's own Ctrl-C kills us."""
        if self._item is None or isinstance(excinfo.value, pytest.Session.Interrupted):
            return  # it is pytest that stops, as it was told to
        judged = _judged(self._item, importing=_is_importing(excinfo.value, self._item))
        problem = explain(excinfo.value, judged)
        self._tell(Outcome(self._item.nodeid, events.FAILED, self._seconds, problem))

    def pytest_sessionfinish(self) -> None:
        self._tell(Finished())


def _claimed(session: pytest.Session) -> Iterator[pytest.Item]:
    """The specs that fall to this process: whoever makes the file named after one runs it.

    Specs that share what is slow to make fall to one process: real ranks to the first, and a group
    to whoever is there first.
    """
    folder, mine = Path(session.config.getoption("--claims")), set[str]()
    helps = session.config.getoption("--helps")
    for number, item in enumerate(session.items):
        if helps and needs_world(item):
            continue
        group = item.get_closest_marker("xdist_group")
        name = group.args[0] if group else str(number)
        with contextlib.suppress(FileExistsError):
            if name not in mine:
                (folder / name).touch(exist_ok=False)
                mine.add(name)
            yield item


def _prints(item: pytest.Item, report: pytest.TestReport) -> str:
    """What the answer has printed; what its import prints is told by the first process only."""
    unwanted = "setup" if item.config.getoption("--helps") else "nothing"
    texts = [text for name, text in report.sections if "stdout" in name and unwanted not in name]
    return "".join(texts)


def _outcome(
    id: str,
    seconds: float,
    error: BaseException | None,
    judged: Judged,
    charts: list[Chart],
    prints: list[str],
) -> Outcome:
    if error is None:
        return Outcome(id, events.PASSED, seconds, charts=charts, prints=prints)
    if isinstance(error, pytest.skip.Exception) and place_in(error, judged.path) is None:
        return Outcome(id, events.SKIPPED, seconds, reason=str(error))
    problem = explain(error, judged)
    result = events.TODO if problem.kind == TODO_KIND else events.FAILED
    return Outcome(id, result, seconds, problem, charts=charts, prints=prints)


def _chart(bar: Any) -> Chart:
    labels = ("plain", "yours", "reference", "limit")
    rows = [(label, bar[label], human(bar[label])) for label in labels if bar[label] is not None]
    return Chart(bar["title"], bar["formula"], rows)


def _judged(item: pytest.Item, importing: bool) -> Judged:
    answer = answer_of(item)
    limit = float(item.config.getoption("timeout", None) or 0)
    path, reference = (answer.path, answer.kata.solution) if answer else (Path(), Path())
    function, clause = clause_of(item)
    clauses = _clauses(item.session)
    return Judged(path, reference, function, limit, importing, clause, clauses)


@functools.cache  # every report asks
def _clauses(session: pytest.Session) -> dict[str, tuple[str, contract.Clause]]:
    """What each spec is about, by its name."""
    return {name_of(item): clause_of(item) for item in session.items}


def _is_importing(error: BaseException, item: pytest.Item) -> bool:
    """Whether the error came out of the import of the judged file, and not of the reference."""
    answer, code = answer_of(item), loading.load.__code__
    loads = (f for f, _ in walk_tb(error.__traceback__) if f.f_code is code)
    return answer is not None and any(f.f_locals["path"] == answer.path for f in loads)


def _spec(item: pytest.Item) -> Spec:
    function, clause = clause_of(item)
    return Spec(
        id=item.nodeid,
        part=part_of(item.path),
        lap=_section(item).lap,
        function=function,
        group=group_of(item),
        sentence=catalog.in_words(name_of(item)),
        case=case_of(item),
        gpu=item.get_closest_marker("gpu") is not None,
        contract=contract.sentence(_kata(item).solution, function, clause) if clause else "",
    )


def _subject(item: pytest.Item) -> str:
    """The function or class of the answer that it is about."""
    return clause_of(item)[0].partition(".")[0]


def _section(item: pytest.Item) -> Section:
    part = part_of(item.path)
    return Section(_kata(item).part(part).lap_of(group_of(item), clause_of(item)[1]), part)


def _kata(item: pytest.Item) -> Kata:
    return _kata_named(item.path.parent.name)


_kata_named = functools.cache(catalog.find_kata)  # it reads katas.toml, for each spec
