"""The windows of all ranks: what each rank is given, and the law of it."""

from dataclasses import dataclass, field
from functools import partial

import torch

from kit.laws import twists
from kit.laws.checks import in_scenario
from kit.laws.law import Law
from kit.laws.suspects import suspects
from kit.laws.trace import PlantedInterrupt, World, observe
from kit.laws.twists import fails, foreign, frozen, stale
from specs.gradient_accumulation import oracle, scenarios
from specs.gradient_accumulation import tokens as of_tokens
from specs.gradient_accumulation.laws import FREE, law
from specs.gradient_accumulation.scenarios import IN_AUTOCAST, in_float64, runs_before_the_step, tag
from specs.gradient_accumulation.tokens import NO_TOKENS, UNEQUAL, labelled, never, tokens

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """Shapes for each rank; a bad micro-batch of some, or an error, with words of the message."""

    windows: tuple
    twists: tuple = ()
    bad: dict = field(default_factory=dict)
    ignore_index: int = -100
    own_group: bool = False  # each rank's model has a process group of that rank alone
    bucket_view: bool = False  # gradients are parts of DDP's buckets


UNEVEN, SEVERAL = (UNEQUAL, ((2, 5, 6),)), (UNEQUAL, UNEQUAL[2:])
NAMED = "names the value that is wrong"  # what a message does
UNREADABLE = "a micro-batch on a broken disk"
BAD = {name: batch for name, *batch in NO_TOKENS} | {"nothing": (None, 0)}


def _bad(bad, windows=UNEVEN):
    return Plan(windows, twists.refused(), bad)


def _unlabelled(*windows, more=()):
    return Plan(windows, (*more, never(4), stale, tag("no labels")), ignore_index=4)


def fixed_length(w):
    """The model has a weight for each of four places, and takes no other length."""
    w.model.places = torch.nn.Parameter(torch.linspace(0.5, 2.0, 4)[:, None])
    w.model.register_forward_hook(lambda model, _, out: out * model.places)


GROUPS = {
    "divisor": {
        "1 micro-batch and 3": Plan((((2, 5, 6),), ((1, 4, 3), (3, 3, 8), (2, 2, 1)))),
        "2,049 tokens and 4, a model in bfloat16, which is the default dtype": Plan(
            (((3, 700, 2049),), ((1, 4, 4),)),
            (of_tokens.IN_BFLOAT16, scenarios.in_default_dtype(torch.bfloat16)),
        ),
        "infinite losses": Plan((((3, 4, 12),), ((4, 3, 1),)), (never(4),)),
        "ignore_index 0, logits transposed": Plan(UNEVEN, (of_tokens.transposed,), ignore_index=0),
        "ignore_index 255, logits of hundreds": Plan(
            UNEVEN, (of_tokens.hundreds,), ignore_index=255
        ),
    },
    "two windows": {"two windows in a row": Plan(UNEVEN, (tag("twice"),))},
    "no labels": {
        "rank 0 without labels": _unlabelled(((2, 3, 0), (1, 3, 0)), ((3, 4, 12),)),
        "the last without labels": _unlabelled(((2, 5, 6), (1, 2, 2)), ((1, 4, 3), (2, 3, 0))),
        "rank 1 without labels, frozen weights, and one length": _unlabelled(
            ((3, 4, 12), (1, 4, 2)), ((2, 4, 0),), more=(frozen, fixed_length, tag("frozen"))
        ),
    },
    "older": {
        "older gradients, a group for each parameter, a fused optimizer": Plan(
            UNEVEN, (twists.unused, scenarios.FUSED, twists.put(groups=True), twists.trained_before)
        ),
        "older gradients in buckets": Plan(SEVERAL, (stale, twists.unused), bucket_view=True),
        "a foreign parameter": Plan(UNEVEN, (foreign, tag("foreign"))),
        "inside the caller's autocast": Plan(SEVERAL, (*IN_AUTOCAST, runs_before_the_step)),
        "eval mode, and other modes of torch than usual": Plan(
            UNEVEN, (twists.in_unusual_modes, lambda w: w.model.eval())
        ),
    },
    "after errors": {
        "the model fails in float64, and the next call": Plan(
            SEVERAL, (in_float64, fails("model", 2), tag("retried"))
        ),
        "Ctrl-C in the model, a foreign parameter, and the next call": Plan(
            SEVERAL, (foreign, fails("model", 1, PlantedInterrupt), tag("retried", "foreign"))
        ),
    },
    "groups": {"each rank has a group of its own": Plan(UNEVEN, own_group=True)},
    "bad": {
        "6 x 2 targets for 2 x 6 tokens, on rank 1": _bad(
            {1: BAD["6 x 2 targets for 2 x 6 tokens"]}
        ),
        "no length, on rank 0": _bad({0: BAD["no length"]}),
        "one tensor of two rows, on rank 1": _bad({1: BAD["one tensor of two rows"]}),
        "no micro-batch on rank 1": _bad({1: BAD["nothing"]}),
        "data that cannot be read on rank 1": _bad({1: (UNREADABLE,)}),
        "a window that cannot be read on rank 0": _bad({0: (UNREADABLE,)}, ((), UNEQUAL)),
        "no label on any rank": _bad({}, (((2, 3, 0), (1, 4, 0)), ((3, 2, 0),))),
    },
    "names": {
        "bad on both ranks": _bad({0: BAD["4 targets for 5 tokens in each row"], 1: BAD["nothing"]})
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
    """What each rank does, side by side; a run on real ranks is one call."""

    def hold_on(self, world, answer, group):
        """Fail unless the answer does as the oracle on every rank, in each plan of the group."""
        __tracebackhide__ = True
        self.world = world
        self.hold(answer, CPU, group)

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

    def _suspects(self, answer):
        """Only what this spec must catch, and nothing that hangs: each takes a run on the ranks."""
        found = next(suspects(self.kata, answer))
        yield [s for s in found if "waits in a collective" not in s.entry.says]

    def _load(self, suspect):
        return suspect.load(as_file=True)


def _right(name, rank):
    """What the oracle does as this rank."""
    every, number = windows(PLANS[name]), rank
    if PLANS[name].own_group:
        every, number = [every[rank]], 0

    def call(w):
        return oracle.retried(partial(oracle.accumulate_on_ranks, w, number, every), w)

    seen = observe(call, partial(scenario, name, rank), CPU)
    flags = [m.training for m in seen["_world"].model.modules()]
    del seen["_error"]
    kept = {"data untouched": True, "synchronises": True, "message": NAMED}
    return {**seen, "training flags": flags, **kept}


def _side_by_side(rows, tags):
    both = {f"{key} on rank {n}": value for n, row in enumerate(rows) for key, value in row.items()}
    world = World(torch.nn.Identity(), [], tags=tags)
    return both | {"_world": world, "_error": None, "outcome": "returns"}


FOUND = {
    "outcome": ("Raises", "no check refuses this input, or one rank does not raise"),
    "message": (4, "the message does not say which value was wrong on this rank"),
    "optimizer steps": ("divisor", "a rank does not step, or steps at each micro-batch"),
    "gradients at": (
        "divisor",
        "another divisor than the tokens of all, or DDP's hooks are passed by",
    ),
    "result of the call before": (
        "Returns",
        "it is changed by the next call: both have one tensor",
    ),
    "result": ("Returns", "it is no share of the mean over the tokens of all ranks"),
    "output for": (5, "the caller's autocast keeps copies of older weights"),
    "kept gradients": ("Raises", "this rank has begun its window before it knew of the others"),
    "weights": ("", "another step was taken: other tokens or ranks count, or old gradients do"),
    "synchronises": (3, "no_sync() is entered and not left, or its flag is set by hand"),
    "training flags": ("untouched", "train() or eval() is called"),
    "data untouched": ("untouched", "the caller's tensors are changed in place"),
}
ON_RANKS = law(None, oracle.accumulate_on_ranks, tokens, FREE, FOUND, RankLaw)
ON_RANKS.groups = {group: [*plans] for group, plans in GROUPS.items()}
ON_RANKS.scenarios = dict.fromkeys(PLANS, tokens)
