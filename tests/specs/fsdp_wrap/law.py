"""The law: ranks train what one process trains, in every scenario of a group.

    hold(answer, world, "gradients", cause="...")

Each rank compares with one process on its own device. It also computes what likely mistakes would
give; if the answer gives the same, that mistake is named as the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kit.laws.checks import SpecFailure, check_close, check_equal, fail, in_scenario
from kit.ranks.world import World
from specs.fsdp_wrap.cases import GROUPS
from specs.fsdp_wrap.play import Alone, Trace, alone, seen, vector

# bfloat16 has 8 bits, 1 / 256 in each number; the worst of 150 seeds was 2.7 % of the gradient.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.05}

# The right value, and the value that each likely mistake gives.
Guesses = tuple[Tensor, dict[str, Tensor]]

# Laws of train_step whose names are those of observables.
LAWS = ("loss", "gradients", "grad_norm")

CAUSES = {
    "names": "a wrapper stands between a module and its parameters",
    "dtype of the output": "the model's output is left in bfloat16, so a loss has 8 bits; or it is "
    "cast although dtype is float32",
    "kind of": "a DTensor, a Python number, or a tensor with a graph is returned",
    "dtype of shards": "the model itself is cast, or its frozen part: a shard has 8 bits",
    "weights": "the step does not use the gradients that are there after it",
    "steps of": "optimizer.step() is not called, or too often",
    "grad_norm": "it is not over all shards of all ranks, or it is the norm after clipping, or "
    "max_norm itself",
}


def hold(answer: Any, world: World, group: str, *, cause: str) -> None:
    """Fail unless every rank trains as one process, in all scenarios of the group."""
    __tracebackhide__ = True
    world.run(answer, _holds, group, cause)


def _holds(answer: Any, rank: int, group: str, cause: str) -> None:
    __tracebackhide__ = True
    names = [f"{group}: {name}" for name in GROUPS[group]]
    size = dist.get_world_size()
    found: dict[str, tuple[str, Any] | None] = {}
    traces: dict[str, Trace] = {}
    for name in names:
        try:
            traces[name] = seen(answer, rank, name)
            found[name] = first(traces[name], alone(name, rank, size))
        except Exception:
            if not any(found.values()):
                raise
            break  # the earlier difference says more
    broken = [name for name in found if found[name]]
    if broken:
        name, (observable, got) = broken[0], found[broken[0]] or ("", None)
        one = alone(name, rank, size)
        try:
            _fail(one, observable, got, cause, traces[name])
        except SpecFailure as failure:
            law = observable.partition(" ")[0]
            if law in LAWS and one.contributions and not group.startswith("checkpoint"):
                failure.clause = law
            tried = len(names) if len(found) == len(names) else 0
            raise in_scenario(failure, *broken, tried=tried) from None


def first(got: Trace, one: Alone) -> tuple[str, Any] | None:
    """The first observable that is wrong, and its value."""
    wrong = (name for name in [*one.trace, *got] if not _is_right(name, got, one))
    name = next(wrong, None)
    return None if name is None else (name, got.get(name))


def _is_right(name: str, got: Trace, one: Alone) -> bool:
    """Whether this observable is right."""
    mine, true = got.get(name), one.trace.get(name)
    near = NEAR[one.case.wrap.get("dtype", torch.float32)]
    if name == "weights" and near > 0.01:  # compare how far they moved
        mine, true = ({n: w - one.start[n] for n, w in v.items()} for v in (mine, true))
    return _alike(mine, true, near)


def _alike(got: Any, want: Any, near: float) -> bool:
    if isinstance(want, dict) and any(isinstance(v, Tensor) for v in want.values()):
        if not isinstance(got, dict) or got.keys() != want.keys():
            return False
        if [n for n, v in got.items() if v is None] != [n for n, v in want.items() if v is None]:
            return False
        if near > 0.01:  # as one vector
            pairs = [(got[n].flatten(), w.flatten()) for n, w in want.items() if w is not None]
            got, want = (torch.cat([pair[i].float() for pair in pairs]) for i in (0, 1))
            return bool((got - want).norm() <= near * want.norm())
        return all(w is None or _alike(got[n], w, near) for n, w in want.items())
    if isinstance(want, Tensor):
        same = isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype
        return same and torch.allclose(got, want, rtol=near, atol=1e-6 if near < 0.01 else 0.02)
    return type(got) is type(want) and bool(got == want)


def _fail(one: Alone, observable: str, got: Any, cause: str, trace: Trace) -> None:
    __tracebackhide__ = True
    likely = next((c for start, c in CAUSES.items() if observable.startswith(start)), cause)
    want, suspects = one.trace.get(observable), dict[str, Tensor]()
    what = observable
    law, _, step = observable.partition(" of ")
    if one.contributions and law in LAWS and step == one.first:
        suspects = beliefs(one, law)
    if law == "gradients" and isinstance(got, dict):  # a mistake explains all of them, or none
        mine = vector(got, one.parameters)
        near = {b: torch.allclose(mine, v, rtol=1e-3, atol=1e-6) for b, v in suspects.items()}
        suspects = {belief: mine for belief in near if near[belief]}
        if suspects:
            got, want = mine, vector(want, one.parameters)
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        bad = next((n for n in want if not _alike(got[n], want[n], 1e-4)), "")
        if law == "runs":
            likely = _of_runs(got, want)
        got, want, what = got[bad], want[bad], f"{what}, {bad}"
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        check_close(got, want, what, cause=likely, rtol=1e-4, atol=1e-6, suspects=suspects)
    if want is None or isinstance(want, Tensor):
        missing = "they are never reduced, or cleared before the step uses them"
        if _is_right("weights", trace, one):
            missing = "the step uses them, and then they are cleared"
        if "by hand" in observable:
            missing = cause
        fail(
            expected=f"{what}: {'none' if want is None else 'there'}",
            got="none" if got is None else "there is one",
            cause=likely if want is None else missing,
        )
    check_equal(got, want, what, cause=likely)


def _of_runs(got: dict[str, int], want: dict[str, int]) -> str:
    """Why blocks run too often, or not often enough."""
    if all(got[name] <= want[name] for name in want):
        return "checkpoint=True is ignored here, or the outermost block is not checkpointed"
    return "an inner block, or the model, is checkpointed too, so blocks run once too often"


def beliefs(one: Alone, law: str) -> dict[str, Tensor]:
    """What each likely mistake gives for a law, if it differs from the right value."""
    if law == "grad_norm":
        want, found = norms(one)
    elif law == "gradients" and "max_norm" in one.case.step:
        want, found = clipped(one)
    elif len(one.members) == 1 or one.case.half:
        return {}
    else:
        want, found = shares(one, law)
    near = 2e-4 if law == "grad_norm" else 1e-3  # norms are asked for to 0.01 %
    return {belief: v for belief, v in found.items() if not torch.allclose(v, want, rtol=near)}


def shares(one: Alone, law: str) -> Guesses:
    """The first step's loss or gradients, right and with each likely mistake."""
    parts = one.contributions
    total, ranks = sum(part[2] for part in parts), len(one.members)
    of_rank = {r: sum(p[2] for p in parts if p[0] == r) for r in one.members}
    last = {r: max(p[1] for p in parts if p[0] == r) for r in one.members}
    # The weight of a micro-batch, by its rank, number and samples.
    weights: dict[str, Callable[[int, int, int], float]] = {
        "FSDP divides by the number of ranks, and that is not undone": lambda r, m, n: (
            n / total / ranks
        ),
        "it is multiplied by the number of ranks once too often": lambda r, m, n: n / total * ranks,
        "every rank counts the same, whatever its samples": lambda r, m, n: n / of_rank[r] / ranks,
        "every micro-batch counts the same, whatever its samples": lambda r, m, n: 1 / len(parts),
        "the micro-batches' means are added up": lambda r, m, n: 1 / ranks,
        "it is of this rank's micro-batches only": lambda r, m, n: (r == one.rank) * n / of_rank[r],
        "it is this rank's share only": lambda r, m, n: (r == one.rank) * n / total,
        "it is of the last micro-batches only": lambda r, m, n: (m == last[r]) * n / total,
        "it is of all but the last micro-batches": lambda r, m, n: (m != last[r]) * n / total,
    }

    def weighted(counts: Callable[[int, int, int], float]) -> Tensor:
        values = [part[3 if law == "loss" else 4] * counts(*part[:3]) for part in parts]
        return torch.stack(values).sum(0)

    want = weighted(lambda r, m, n: n / total)
    found = {belief: weighted(counts) for belief, counts in weights.items()}
    return want, found


def clipped(one: Alone) -> Guesses:
    """The first step's clipped gradients, right and with each likely mistake."""
    limit, parameters = one.case.step["max_norm"], one.parameters
    grads, distinct = whole(one)
    total = norm(distinct.values())
    each = {name: grad * (limit / grad.norm()).clamp(max=1) for name, grad in grads.items()}
    found = {
        "they are not clipped in place: copies are, or nothing is": vector(grads, parameters),
        "they are scaled to max_norm although the norm is below it": vector(
            {name: grad * limit / total for name, grad in grads.items()}, parameters
        ),
        "each gradient is clipped by its own norm, not by the norm of all": vector(
            each, parameters
        ),
    }
    want = vector(one.trace[f"gradients of {one.first}"], parameters)
    return want, found


def whole(one: Alone) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """The gradients before clipping: by name, and by parameter."""
    there = {name: grad for name, grad in one.whole.items() if grad is not None}
    return there, {p: there[name] for name, p in one.parameters if name in there}


def norm(grads: Iterable[Tensor]) -> Tensor:
    return torch.stack([grad.norm() for grad in grads]).norm()


def norms(one: Alone) -> Guesses:
    """The first step's norm, right and with each likely mistake."""
    there, distinct = whole(one)
    groups = one.optimizer.param_groups[0]["params"]
    ranks, place = len(one.members), one.members.index(one.rank)
    want = norm(distinct.values())
    found = {
        "it is over this rank's shards only": norm(
            torch.cat((*g.chunk(ranks)[place : place + 1], g[:0])) for g in distinct.values()
        ),
        "it is the norm after clipping": want.clamp(max=one.case.step.get("max_norm", math.inf)),
        "a tied parameter is counted once for each of its names": norm(there.values()),
        "it is over the optimizer's first parameter group only": norm(
            g for p, g in distinct.items() if any(p is held for held in groups)
        ),
    }
    return want, found
