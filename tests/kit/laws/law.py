"""One law: what is seen of an answer is what is seen of the oracle, apart from what is free.

    STEP = Law("amp_loop", "train_step", call, oracle.train_step, one_step, FREE, CLAUSES)

    @STEP.spec("fp32", "fp16")
    def test_no_foreign_parameter_counts(self):
        yield "a frozen parameter", frozen
        yield "a foreign parameter, clipped", foreign, option(max_norm=0.5)

A spec is one sentence of the contract, and yields the scenarios in which it is tried. `FREE` is
what the contract leaves open. The cause of a failure is computed: each mistake of the catalogue is
put into the same scenarios, and where the answer differs just as a mistake does, in all that are
tried, that mistake is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import torch

from kit.answers.marks import subject_of
from kit.laws.checks import ERRORS, SpecFailure, in_scenario
from kit.laws.compare import NEAR, Difference, is_named, narrowed, same
from kit.laws.differences import certain, in_another_order, shown
from kit.laws.mentions import in_words
from kit.laws.scenarios import as_spec
from kit.laws.suspects import Suspect, explained, suspects
from kit.laws.trace import (
    MEANINGS,
    Planted,
    PlantedInterrupt,
    Trace,
    World,
    observe,
)
from kit.laws.twists import in_precision, twisted

_NOTHING = "nothing"  # an observable that was not seen
_RETURNED = "what is returned"

# All that is otherwise in a scenario than it should be; None where the call cannot be compared.
Pattern = Trace | None

# (observable, when): nothing is asked of an observable that matches, in such a world.
Free = tuple[str, Callable[[Trace, World], bool]]


@dataclass
class Law:
    """What holds for one function of a kata, in all of its scenarios.

    Attributes:
        call: how an answer is called in a world.
        oracle: what it should do there.
        base: the plain world, which each scenario changes.
        free: what the contract leaves open.
        clauses: what an observable's name begins with, a pattern, to the clause of the contract
            about it.
        meanings: what a difference most likely means, by what the observable's name begins with;
            what comes first is shown first.
        rounding: by how much of its length a tensor may be off in a world.
    """

    kata: str
    function: str
    call: Callable[[ModuleType, World], Any]
    oracle: Callable[[World], Any]
    base: Callable[[], World]
    free: tuple[Free, ...]
    clauses: Mapping[str, str | int]
    meanings: Mapping[str, str] = field(default_factory=lambda: MEANINGS)
    rounding: Callable[[World], float] = lambda _: NEAR
    _right: dict[str, Trace] = field(default_factory=dict)
    _guesses: dict[tuple[str, str], Pattern] = field(default_factory=dict)
    _mistakes: dict[str, ModuleType | None] = field(default_factory=dict)
    _frees: dict[str, list[Callable[[Trace, World], bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups: dict[str, list[str]] = {}  # names of scenarios
        self.scenarios: dict[str, Callable[[], World]] = {}

    def spec(self, *precisions: str) -> Callable[[Any], Any]:
        """Make a spec of a function that yields scenarios: a name, and what it changes in a world.

        Each is tried in these precisions, or as it is.
        """

        def with_scenarios(function: Any) -> Any:
            group = function.__name__
            self.add(group, function(None), *precisions)
            spec = as_spec(
                function,
                lambda _, answer, device: self.hold(answer, device, group, subject_of(spec)[1]),
            )
            return spec

        return with_scenarios

    def add(self, group: str, rows: Iterable[tuple[Any, ...]], *precisions: str) -> None:
        """Have scenarios, rows as a spec yields them, to which a spec can hold an answer."""
        made = {
            f"{name}, {precision}" if precision else name: twisted(
                self.base, *([in_precision(precision)] if precision else []), *twists
            )
            for name, *twists in rows
            for precision in precisions or ("",)
        }
        self.groups[group] = [*made]
        self.scenarios |= made

    def hold(
        self, answer: ModuleType, device: torch.device, group: str, clause: str | int = ""
    ) -> None:
        """Fail unless the answer does as the oracle in each scenario of the group.

        Of all that differs, what the spec's own clause is about is shown first.
        """
        __tracebackhide__ = True
        found: list[Difference] = []
        seen: dict[str, Pattern] = {}
        for scenario in self.groups[group]:
            try:
                got = self._see(answer, scenario, device)
            except Exception as error:
                if found and not isinstance(error, NotImplementedError):
                    break  # what was seen before says more
                run = partial(self._see, scenario=scenario, device=device)
                raise explained(error, answer, self.kata, self.function, run) from error.__cause__
            want = self._wanted(scenario, device)
            found += self._differences(scenario, got, want, clause)[:1]
            seen[scenario] = self._otherwise(got, want)
        if found:
            self._fail(found, group, answer, device, seen)

    def _wanted(self, scenario: str, device: torch.device) -> Trace:
        if scenario not in self._right:
            want = observe(self.oracle, self.scenarios[scenario], device)
            world, error = want["_world"], want["_error"]
            if "planted" in world.tags and error is None:
                raise RuntimeError(f"the error that is planted never comes: {scenario}")
            if error is not None and "planted" not in world.tags and world.refused_at is None:
                raise RuntimeError(f"an error that nobody asked for: {scenario}") from error
            self._right[scenario] = want
        return self._right[scenario]

    def _see(self, answer: ModuleType, scenario: str, device: torch.device) -> Trace:
        __tracebackhide__ = True
        seen = observe(partial(self.call, answer), self.scenarios[scenario], device)
        error = seen["_error"]
        if error is not None and self._is_unexpected(error, self._wanted(scenario, device)):
            raise in_scenario(error, scenario)
        return seen

    def _is_unexpected(self, error: BaseException, want: Trace) -> bool:
        """Whether the error itself is the news, with the answer's own line in its traceback."""
        if isinstance(error, (NotImplementedError, SpecFailure)) or not _is_seen(error):
            return True
        if isinstance(want["_error"], (Planted, PlantedInterrupt)):
            return not _is_planted(error)  # it comes in its place
        returns: bool = want["outcome"] == "returns"
        return returns

    def _differences(
        self, scenario: str, got: Trace, want: Trace, clause: str | int
    ) -> list[Difference]:
        """Where the law is broken; the first is the one to show."""
        near = self.rounding(want["_world"])
        if "result" in got and "result" not in want and want["outcome"] == "returns":
            names = [name for name in want if name not in got and name.isidentifier()]
            wanted = f"an object with {' and '.join(names)}"
            return [Difference(scenario, _RETURNED, wanted, got["result"])]
        found = [
            narrowed(scenario, name, want.get(name, _NOTHING), got.get(name, _NOTHING), near)
            for name in dict.fromkeys([*want, *got])
            if self._is_otherwise(name, got, want)
        ]
        if not found and not is_named(got, want):
            asked = f"one that holds {in_words(want['_world'].mentions)}"
            found.append(Difference(scenario, "message", asked, str(got["_error"])))
        found.sort(key=lambda d: (self._clause(d) != clause, self._rank(d)))
        # What differs at a step makes later ones differ.
        steps = [_step(d) for d in found if _step(d)]
        if found and _step(found[0]) > min(steps, default=0):
            found.sort(key=lambda d: _step(d) != min(steps))
        return found

    def _clause(self, difference: Difference) -> str | int:
        """The clause of the contract about it."""
        name = difference.observable
        return next((c for pattern, c in self.clauses.items() if re.match(pattern, name)), "")

    def _is_otherwise(self, name: str, got: Trace, want: Trace) -> bool:
        """Whether an observable is not free, and is otherwise than it should be."""
        world = want["_world"]
        if name.startswith("_") or any(when(want, world) for when in self._free_when(name)):
            return False
        return not same(got.get(name, _NOTHING), want.get(name, _NOTHING), self.rounding(world))

    def _free_when(self, name: str) -> list[Callable[[Trace, World], bool]]:
        """In which worlds an observable is free; the patterns are tried once a name."""
        if name not in self._frees:
            self._frees[name] = [when for pattern, when in self.free if re.match(pattern, name)]
        return self._frees[name]

    def _rank(self, difference: Difference) -> int:
        starts = enumerate(self.meanings)
        known = (number for number, s in starts if difference.observable.startswith(s))
        return next(known, len(self.meanings))

    def _fail(
        self,
        found: list[Difference],
        group: str,
        answer: ModuleType,
        device: torch.device,
        seen: dict[str, Pattern],
    ) -> NoReturn:
        __tracebackhide__ = True
        first = found[0]
        name = first.observable
        meaning = next((m for start, m in self.meanings.items() if name.startswith(start)), "")
        suspect = self._suspect(first.scenario, group, answer, device, seen)
        late = self._too_late(first.scenario, seen)
        belief = suspect.belief if suspect else late or certain(first.got, first.want, name)
        if name == _RETURNED:
            belief = belief or "the result is not what the stub says"
        if not belief and name == "message":  # which was looked at
            belief = meaning or None
        if not belief and in_another_order(first.got, first.want):
            belief = (
                "everything is there, but in another order: something is done too early or too late"
            )
        is_of_errors = bool(late) or name == "message"
        failure = SpecFailure(
            expected=f"{first.observable} = {shown(first.want)}",
            got=shown(first.got, first.want),
            cause=belief or meaning or self._known(answer),
            sure=belief is not None,
            clause=ERRORS if is_of_errors else self._clause(first),
            home=suspect.entry.spec if suspect and not is_of_errors else "",
        )
        tried = len(seen) if len(seen) == len(self.groups[group]) else 0
        raise in_scenario(failure, *[d.scenario for d in found], tried=tried)

    def _too_late(self, scenario: str, seen: dict[str, Pattern]) -> str | None:
        """What it means that a call is refused at once, and something else is otherwise."""
        pattern, world = seen[scenario], self._right[scenario]["_world"]
        if world.refused_at != 0 or pattern is None or {"outcome", "message"} & {*pattern}:
            return None
        more = len(pattern.get("passes forward", ())) - len(self._right[scenario]["passes forward"])
        times = "once" if more == 1 else f"{more} times"
        ran = f", after the model ran {times}" if more > 0 else ""
        return f"it is refused too late{ran}: check everything before you change anything"

    def _suspect(
        self,
        first: str,
        group: str,
        answer: ModuleType,
        device: torch.device,
        mine: dict[str, Pattern],
    ) -> Suspect | None:
        """The known mistake that would be seen just so, in this scenario and in others."""
        few, more = [first, *mine], list[str]()
        # Where an error has ended the spec, more of them would come from the others.
        if len(mine) == len(self.groups[group]):
            few, more = [*few, *self._spread()], [*self.scenarios]
        enough = len({*few})
        for fitting in self._suspects(answer):
            for number, scenario in enumerate(dict.fromkeys([*few, *more])):
                # All others are for two that are still alike.
                if not fitting or (number >= enough and len(fitting) == 1):
                    break
                if scenario not in mine:
                    mine[scenario] = self._pattern(answer, scenario, device)
                want = mine[scenario]
                fitting = [s for s in fitting if same(want, self._guess(s, scenario, device))]
            if fitting:
                return fitting[0]
        return None

    def _known(self, answer: ModuleType) -> str:
        """Two mistakes that the spec must catch, where nothing better is known."""
        names = [suspect.entry.heading for suspect in next(self._suspects(answer), [])]
        return "; or ".join(names[:2]) or "compare with the contract"

    def _suspects(self, answer: ModuleType) -> Iterator[list[Suspect]]:
        return suspects(self.kata, answer, self.function)

    def _spread(self) -> list[str]:
        """Seven scenarios or so, from all over."""
        return [*self.scenarios][:: 1 + len(self.scenarios) // 7]

    def _guess(self, suspect: Suspect, scenario: str, device: torch.device) -> Pattern:
        """The pattern of a mistake; it is imported once, which takes as long as a scenario."""
        name = suspect.entry.name
        if (name, scenario) not in self._guesses:
            if name not in self._mistakes:
                self._mistakes[name] = self._load(suspect)
            self._guesses[name, scenario] = self._pattern(self._mistakes[name], scenario, device)
        return self._guesses[name, scenario]

    def _load(self, suspect: Suspect) -> ModuleType | None:
        return suspect.load()

    def _pattern(self, module: ModuleType | None, scenario: str, device: torch.device) -> Pattern:
        """What is otherwise where an answer runs; None if the call cannot be compared."""
        if module is None:
            return None
        try:
            return self._otherwise(
                self._see(module, scenario, device), self._wanted(scenario, device)
            )
        except Exception:
            return None

    def _otherwise(self, got: Trace, want: Trace) -> Pattern:
        """All that is otherwise than it should be."""
        pattern = {name: v for name, v in got.items() if self._is_otherwise(name, got, want)}
        return pattern if is_named(got, want) else pattern | {"message": "another"}


def _step(difference: Difference) -> int:
    """The number of the step or the result that it is seen in; 0 where it is in none."""
    number = re.search(r" (?:at step|of result) (\d+)", difference.observable)
    return int(number[1]) if number else 0


def _is_planted(error: BaseException | None) -> bool:
    """Whether it is the error that a scenario raises, or was raised while that was handled."""
    return error is not None and (
        isinstance(error, (Planted, PlantedInterrupt)) or _is_planted(error.__context__)
    )


def _is_seen(error: BaseException) -> bool:
    """Whether the error belongs to the trace; a real Ctrl-C or a time-out does not."""
    return isinstance(error, (Exception, PlantedInterrupt))
