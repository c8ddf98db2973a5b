"""One law over several scenarios: the first that breaks it is shown, and the cause is computed.

    @scenarios("bytes")
    def counts(answer, device, name, want, model):
        return answer.state_bytes(model), want

    class TestPart1:
        @pytest.mark.exact("state_bytes", "sharing")
        @counts("a guess at the cause")
        def test_counts_a_storage_once(self):
            yield "tied weights", 4 * 19 * 6, tied_model()
            with torch.no_grad():
                yield "the caller's no_grad", 4 * 12, torch.nn.Linear(3, 3)

A spec yields its scenarios, each with a name; what it makes lies on the device that is judged, and
what it has entered is in force while the scenario runs. A function like `counts` runs one and says
what the answer gave and what it should give. Where a mistake of the catalogue gives the same in
every scenario, its belief is the cause; that of another spec's mistake is a guess.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from kit.answers.marks import subject_of
from kit.answers.reset_torch import reset_torch
from kit.laws.checks import SpecFailure, check_equal, in_scenario
from kit.laws.equal import Raised, narrowed, same
from kit.laws.suspects import Suspect, ending, explained, suspects
from kit.memory.gpu import ends_the_gpu
from kit.private_torch import ENGINE

Judge = Callable[..., tuple[object, object]]
Worlds = Callable[[], Iterator[tuple[Any, ...]]]
Given = dict[str, tuple[object, object]]
Computed = Callable[[Any, Any], str | None]

_NO_ERROR = "no error in the backward pass"

_known: dict[tuple[str, torch.device, str], Any] = {}


def once(scenario: str, make: Callable[[], Any]) -> Any:
    """What `make` gives in a scenario of this spec; it is called for the first answer alone.

    For what should be, which is the same for each answer and suspect. Such scenarios set the random
    streams themselves.
    """
    spec = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0]
    key = (spec, torch.get_default_device(), scenario)
    if key not in _known:
        _known[key] = make()
    return _known[key]


def scenarios(
    what: str,
    computed: Computed = lambda got, want: None,
    rule: Callable[[ModuleType], str] = lambda answer: "",
    clauses: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Judge], Callable[[str], Callable[[Any], Any]]]:
    """Make of a function that judges one scenario a decorator for specs that yield some.

    Args:
        what: is compared, in words.
        computed: what a difference can only mean, if it is one of that kind.
        rule: which wrong rule an answer follows, if it does so wherever one looks.
        clauses: what the name of a part that differs begins with, to the clause about it, where
            that is another than the spec's own.
    """

    def with_judge(judge: Judge) -> Callable[[str], Callable[[Any], Any]]:
        def with_cause(cause: str) -> Callable[[Any], Any]:
            def with_worlds(worlds: Any) -> Any:
                def hold(self: object, answer: ModuleType, device: torch.device) -> None:
                    __tracebackhide__ = True
                    here = functools.partial(worlds, self)
                    known = lambda got, want: computed(got, want) or rule(answer)  # noqa: E731
                    function = subject_of(spec)[0]
                    _hold(answer, device, judge, here, what, cause, known, function, clauses)

                spec = as_spec(worlds, hold)
                return spec

            return with_worlds

        return with_cause

    return with_judge


def as_spec(worlds: Any, hold: Callable[[object, ModuleType, torch.device], None]) -> Any:
    """`hold` as a spec, under the name and at the place of a function that yields scenarios."""

    def spec(self: object, answer: ModuleType, device: torch.device) -> None:
        __tracebackhide__ = True
        hold(self, answer, device)

    signature = inspect.signature(spec)
    functools.update_wrapper(spec, worlds)
    vars(spec)["__signature__"] = signature  # pytest reads it: answer and device
    return spec


def _hold(
    answer: ModuleType,
    device: torch.device,
    judge: Judge,
    worlds: Worlds,
    what: str,
    cause: str,
    computed: Computed,
    function: str,
    clauses: Mapping[str, str],
) -> None:
    __tracebackhide__ = True
    given, error = _given(answer, device, judge, worlds)
    broken = [name for name, (got, want) in given.items() if not same(got, want)]
    kata = Path(os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]).parent.name
    if not broken:
        if error:
            run = functools.partial(_given_again, len(given), device, judge, worlds)
            raise explained(error, answer, kata, function, run)
        return
    got, want = given[broken[0]]
    believed = None
    mine, groups = [got for got, _ in given.values()], suspects(kata, answer, function)
    mine += [ending(error, answer)] if error else []
    fitting = functools.partial(_fitting, mine, device, judge, worlds)
    if own := next(fitting(next(groups, [])), None):
        believed = own.belief
    else:
        # In one scenario alone many may give the same by chance: two are told, more are not.
        most = 1 if len(broken) > 1 else 3
        others = [*itertools.islice(fitting(next(groups, [])), most)]
        if 0 < len(others) < 3:
            entries = [other.entry for other in others]
            cause = "; or ".join(f'{each.heading} ("{each.belief}")' for each in entries)
    if want is not _NO_ERROR:
        believed = believed or computed(got, want)
    known, first = {believed: got} if believed else {}, narrowed(got, want, what)[2]
    clause = next((c for start, c in clauses.items() if first.startswith(start)), "")
    try:
        check_equal(got, want, what, cause=cause, suspects=known, clause=clause)
    except SpecFailure as failure:
        raise in_scenario(failure, *broken, tried=0 if error else len(given)) from None


def _given(
    answer: ModuleType, device: torch.device, judge: Judge, worlds: Worlds
) -> tuple[Given, BaseException | None]:
    """What the answer gives and should give in each scenario, as far as it comes."""
    given: Given = {}
    reset_torch()  # of a suspect the same scenarios are wanted
    with _made_on(device), closing(worlds()) as found:  # type: ignore[type-var]
        name = ""
        try:
            for name, *world in found:
                given[name] = _judged(judge, answer, device, name, world)
        except Exception as error:
            return given, in_scenario(error, name) if name and name not in given else error
    return given, None


def _given_again(
    place: int, device: torch.device, judge: Judge, worlds: Worlds, answer: ModuleType
) -> object:
    """What a mistake gives in the scenario at this place, with no other tried before."""
    reset_torch()
    with _made_on(device), closing(worlds()) as found:  # type: ignore[type-var]
        name, *world = next(itertools.islice(found, place, None))
        return judge(answer, device, name, *world)


def _judged(
    judge: Judge, answer: ModuleType | None, device: torch.device, name: str, world: list[Any]
) -> tuple[object, object]:
    """What a scenario gives and should give; an error of a backward pass is seen like a value."""
    try:
        return judge(answer, device, name, *world)
    except RuntimeError as error:
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        is_answers = getattr(answer, "__file__", None) in files  # and its line says more
        if files[-1] != ENGINE or is_answers or ends_the_gpu(error):
            raise
        return Raised(error), _NO_ERROR


def _made_on(device: torch.device) -> AbstractContextManager[Any]:
    """New tensors lie there; it is asked at every call of torch, so not where nothing changes."""
    return nullcontext() if device.type == "cpu" else device


def _fitting(
    mine: list[object],
    device: torch.device,
    judge: Judge,
    worlds: Worlds,
    known: list[Suspect],
) -> Iterator[Suspect]:
    """Those of these mistakes that give just what the answer has given."""
    for suspect in known:
        gave = once(f"what {suspect.entry.name} gives", _Gave)
        if not gave.differs(mine) and not gave.is_all:
            gave.run(suspect, mine, device, judge, worlds)
        if gave.is_all and len(gave.values) == len(mine) and not gave.differs(mine):
            yield suspect


class _Gave:
    """What a mistake gives in the scenarios of a spec, as far as anybody had to know."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.is_all = False

    def differs(self, mine: list[object]) -> bool:
        """Whether it has given something else than an answer."""
        return not all(map(same, self.values, mine))

    def run(
        self,
        suspect: Suspect,
        mine: list[object],
        device: torch.device,
        judge: Judge,
        worlds: Worlds,
    ) -> None:
        """Try it in one scenario after another, until it gives something else than the answer."""
        mistake, self.values = suspect.load(), []
        reset_torch()
        with _made_on(device), closing(worlds()) as found:  # type: ignore[type-var]
            try:
                for name, *world in found:
                    self.values.append(_judged(judge, mistake, device, name, world)[0])
                    if self.differs(mine):
                        return
            except Exception as error:
                self.values.append(ending(error, mistake))
        self.is_all = True
