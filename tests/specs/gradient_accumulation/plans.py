"""The windows of all ranks, and their law."""

from dataclasses import dataclass, field
from functools import partial

import torch

from kit.laws import twists
from kit.laws.checks import ERRORS, in_scenario
from kit.laws.law import Law
from kit.laws.suspects import suspects
from kit.laws.trace import World, observe
from specs.gradient_accumulation import oracle
from specs.gradient_accumulation import tokens as of_tokens
from specs.gradient_accumulation.laws import FREE, MEANINGS, OF_TOKENS, law
from specs.gradient_accumulation.scenarios import tag
from specs.gradient_accumulation.tokens import UNEQUAL, labelled, tokens

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """Shapes for each rank; a bad micro-batch of some, with words of the message."""

    windows: tuple
    twists: tuple = ()
    bad: dict = field(default_factory=dict)
    ignore_index: int = -100
    own_group: bool = False  # each rank's model has a process group of that rank alone


UNEVEN = UNEQUAL, ((2, 5, 6),)
NAMED = "names the value that is wrong"  # what a message does
BAD = {name: batch for name, *batch in of_tokens.BAD} | {"nothing": (None, 0)}


def _bad(names, windows=UNEVEN):
    return Plan(windows, twists.refused(), {rank: BAD[name] for rank, name in names.items()})


def _unlabelled(*windows):
    return Plan(windows, (tag("no labels"),))


GROUPS = {  # by the clause of the contract
    "divisor": {
        "1 micro-batch and 3": Plan((((2, 5, 6),), ((1, 4, 3), (3, 3, 8), (2, 2, 1)))),
        "older gradients, a group for each parameter": Plan(
            UNEVEN, (twists.put(groups=True), twists.trained_before)
        ),
        "ignore_index 0, logits transposed": Plan(UNEVEN, (of_tokens.transposed,), ignore_index=0),
        "2,049 tokens and 4, a model in bfloat16": Plan(
            (((3, 700, 2049),), ((1, 4, 4),)), (of_tokens.IN_BFLOAT16,)
        ),
    },
    1: {
        "rank 0 without labels": _unlabelled(((2, 3, 0), (1, 3, 0)), ((3, 4, 12),)),
        "the last without labels": _unlabelled(((2, 5, 6), (1, 2, 2)), ((1, 4, 3), (2, 3, 0))),
    },
    2: {"each rank has a group of its own": Plan(UNEVEN, own_group=True)},
    "Raises": {
        "6 x 2 targets for 2 x 6 tokens, on rank 1": _bad({1: "6 x 2 targets for 2 x 6 tokens"}),
        "no micro-batch on rank 1": _bad({1: "nothing"}),
        "bad on both ranks": _bad({0: "4 targets for 5 tokens in each row", 1: "nothing"}),
        "no label on any rank": _bad({}, (((2, 3, 0), (1, 4, 0)), ((3, 2, 0),))),
    },
}
PLANS = {name: plan for group in GROUPS.values() for name, plan in group.items()}


def windows(plan):
    """Each rank's window; no two have the same data."""
    seeds = enumerate(plan.windows, 5)
    made = [labelled(shapes, plan.ignore_index, seed) for seed, shapes in seeds]
    for rank, (batch, *_) in plan.bad.items():
        made[rank] = [] if batch is None else [*made[rank], batch]
    return made


def scenario(name, rank):
    """The world of one rank."""
    plan, world = PLANS[name], tokens()
    world.batches = windows(plan)[rank]
    world.options = {"ignore_index": plan.ignore_index} if plan.ignore_index != -100 else {}
    for twist in plan.twists:
        twist(world)
    world.mentions = tuple(plan.bad.get(rank, [""])[1:])
    return world


class RankLaw(Law):
    """What all ranks do; a run on real ranks is one call."""

    def hold_on(self, world, answer, clause):
        """Fail unless the answer does as the oracle on every rank, in each plan of the clause."""
        __tracebackhide__ = True
        self.world = world
        self.hold(answer, CPU, clause, clause)

    def _see(self, answer, scenario, device):
        __tracebackhide__ = True
        from specs.gradient_accumulation import ranks

        try:
            return _side_by_side(self.world.run(answer, ranks.observed, scenario), set())
        except Exception as error:
            raise in_scenario(error, scenario) from error.__cause__

    def _wanted(self, scenario, device):
        if scenario not in self._right:
            rows = [_right(scenario, n) for n in (0, 1)]
            tags = {tag for row in rows for tag in row.pop("_world").tags}
            self._right[scenario] = _side_by_side(rows, tags)
        return self._right[scenario]

    def _clause(self, difference):
        is_late = difference.scenario in GROUPS["Raises"] and "outcome" not in difference.observable
        return ERRORS if is_late else super()._clause(difference)

    def _suspects(self, answer):
        """The mistakes that this spec must catch, except those that hang: each run takes ranks."""
        found = next(suspects(self.kata, answer))
        yield [s for s in found if "waits in a collective" not in s.entry.says]

    def _load(self, suspect):
        return suspect.load(as_file=True)


def _right(name, rank):
    """What the oracle does as this rank."""
    every, number = windows(PLANS[name]), rank
    if PLANS[name].own_group:
        every, number = [every[rank]], 0

    call = partial(oracle.accumulate_on_ranks, rank=number, windows=every)
    seen = observe(call, partial(scenario, name, rank), CPU)
    del seen["_error"]
    return seen | {"message": NAMED}


def _side_by_side(rows, tags):
    both = {f"{key} on rank {n}": value for n, row in enumerate(rows) for key, value in row.items()}
    world = World(torch.nn.Identity(), [], tags=tags)
    return both | {"_world": world, "_error": None, "outcome": "returns"}


FOUND = MEANINGS | {
    "gradients at": "another divisor than the tokens of all ranks, old gradients, or DDP's hooks "
    "are bypassed",
    "result": "it is not this rank's share of the mean over the tokens of all ranks",
    "kept gradients": "another divisor, or the window begins before those of all ranks are checked",
    "weights": "another step was taken: other tokens or ranks count, or old gradients do",
}
ON_RANKS = law(None, oracle.accumulate_on_ranks, tokens, FREE, OF_TOKENS, FOUND, RankLaw)
ON_RANKS.groups = {group: [*plans] for group, plans in GROUPS.items()}
ON_RANKS.scenarios = dict.fromkeys(PLANS, tokens)
