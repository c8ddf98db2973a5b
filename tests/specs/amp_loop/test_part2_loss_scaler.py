"""The hand-written scaler beside torch.amp.GradScaler, through scripts of calls."""

from functools import partial
from itertools import cycle, product
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from kit.laws.bars import bar
from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.scenarios import scenarios
from kit.laws.scripts import play
from kit.laws.sequences import for_all
from kit.laws.trace import kept
from kit.memory.ruler import measure
from specs.amp_loop.laws import held, laid_otherwise

GROWING = {"init_scale": 8.0, "growth_interval": 2}
SHAPES = ((7,), (2, 2), ())  # of an optimizer's parameters, in two groups
COUNT = 7 + 4 + 1


class Side:
    """A scaler, the optimizers a and b that it is called with, and what scripts call."""

    def __init__(self, make, device, **options):
        self.make, self.device = make, device
        self.start(make(**options))
        self.a, self.b = self.optimizer(), self.optimizer()

    def start(self, scaler):
        self.scaler = scaler
        scaler.scale(torch.zeros((), device=self.device))  # GradScaler makes its scale here

    def optimizer(self):
        params = [nn.Parameter(torch.ones(shape, device=self.device)) for shape in SHAPES]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.25}]
        return torch.optim.SGD(groups, lr=0.125, momentum=0.5)

    def __getattr__(self, name):  # unscale_, step, update
        return getattr(self.scaler, name)

    def clip(self, optimizer):
        """Removes infinities."""
        nn.utils.clip_grad_value_(held(optimizer), 0.5)

    def backward(self, optimizer, bad=None, value=0.75, at=0, missing=None):
        """Gradients of `value`, scaled; one element is `bad`, and one parameter gets none."""
        sizes = [p.numel() for p in held(optimizer)]
        flat = torch.full((sum(sizes),), value * self.get_scale(), device=self.device)
        if bad is not None:
            flat[at] = bad
        for n, (p, part) in enumerate(zip(held(optimizer), flat.split(sizes), strict=True)):
            p.grad = None if n == missing else laid_otherwise(part.view(p.shape).to(p.dtype))

    def scaled(self, dtype):
        """A loss of 1.1, scaled, whether it has a graph, and the loss afterwards."""
        leaf = torch.full((), 1.1, dtype=getattr(torch, dtype), device=self.device)
        scaled = self.scale(loss := leaf.requires_grad_() * 1)
        return scaled.item(), scaled.dtype, scaled.requires_grad, loss.item()

    def reload(self, kind="own"):
        """Continue with a new scaler; the old one overflows after the save."""
        old, state, other = self.scaler, self.state_dict(), self.optimizer()
        self.backward(other, inf)
        old.unscale_(other)
        old.update()
        new = self.make() if kind == "own" else GradScaler(self.device.type)
        new.load_state_dict(state)
        self.start(new)

    def seen(self):
        params = [*held(self.a), *held(self.b)]
        grads = [p.grad if p.grad is None else p.grad.nan_to_num(7, 7, 7) for p in params]
        return kept({"state": self.state_dict(), "weights": params, "gradients": grads})


def beside(answer, device, name, script, options=GROWING):
    makes = answer.LossScaler, partial(GradScaler, device.type)
    return tuple(play(Side(make, device, **options), script) for make in makes)


agrees = scenarios("LossScaler")(beside)


def rounds(*bads, calls="step(a)"):
    """Backward passes, each with a step and an update."""
    return "; ".join(f"backward(a, {bad}); {calls}; update()" for bad in bads)


def scripts(st):
    """Rounds with one optimizer or both, and sometimes a reload."""
    bads, missing = ("", ", inf", ", inf, at=8"), ("", ", missing=0", ", missing=2")
    ways = "step({0})", "unscale_({0}); step({0})", "unscale_({0})"
    calls = [f"backward({{0}}{''.join(b)}); {way}; " for *b, way in product(bads, missing, ways)]
    one = lambda name: st.sampled_from(["", *(call.format(name) for call in calls)])  # noqa: E731
    both = st.tuples(one("a"), one("b")).filter(any).map("".join)
    end = st.sampled_from(("update()", "update()", "update(); reload()"))
    return st.lists(st.tuples(both, end).map("".join), min_size=1, max_size=4).map("; ".join)


class TestPart2LossScaler:
    @pytest.mark.works("LossScaler", "unscale_")
    @agrees("compute it by hand and compare")
    def test_a_step_by_hand(self):
        """Gradients of 0.75 are 6 when scaled by 8; with lr 0.125 weights of 1 become 0.90625."""
        yield "one step", "backward(a); unscale_(a); step(a); update()"

    @pytest.mark.exact("LossScaler", "scale")
    @agrees("a Python number does not widen a 16-bit loss")
    def test_scales_in_float32(self):
        """1.1 times 70001 is infinite in float16."""
        for dtype in ("float32", "bfloat16", "float16"):
            for scale in (70001.0, 1.0):
                yield f"{dtype}, scale {scale}", f"scaled({dtype!r})", {"init_scale": scale}

    @pytest.mark.exact("LossScaler", "unscale_")
    @agrees("an element is not looked at, only infinities are looked for, or a sum overflows")
    def test_finds_an_overflow_anywhere(self):
        """Infinite, minus infinite or NaN, in any element of any parameter of any group."""
        for at, bad in zip(range(COUNT), cycle((inf, -inf, nan))):
            yield f"{bad} at {at}", f"backward(a, {bad}, at={at}); step(a); update()"
        yield "3e38 everywhere", "backward(a, value=1.5e38); step(a); update()", {"init_scale": 2.0}

    @pytest.mark.exact("LossScaler", "update")
    @agrees("back off at once; count good updates in a row; reset the count after both")
    def test_tracks_gradscaler_through_every_pattern_of_overflows(self):
        """All 16 scripts of four good and bad steps; the scale grows after two good ones."""
        for bads in product((None, inf), repeat=4):
            steps = ["good" if bad is None else "overflow" for bad in bads]
            yield ", ".join(steps), rounds(*bads), GROWING | {"init_scale": 1.0}
        yield "growing at every step", rounds(None, None, inf, None), {"growth_interval": 1}

    @pytest.mark.exact("LossScaler", "step")
    @agrees("gradients are unscaled twice, or not at all")
    def test_step_unscales_unless_that_was_done(self):
        """With and without unscale_ and clipping before it."""
        ways = "unscale_(a); step(a)", "step(a)", "unscale_(a); clip(a); step(a)"
        for bad, calls in product((None, inf, nan), ways):
            yield f"{bad}: {calls}", f"{rounds(bad, calls=calls)}; {rounds(None)}"

    @pytest.mark.exact("LossScaler", "state")
    @agrees("a number is not saved or not loaded, is a tensor, or changes after the save")
    def test_its_state_goes_on_where_it_was(self):
        """Saved between good steps; loaded into a scaler with other options, or into torch's."""
        options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        before, after = rounds(None, inf, None, None), rounds(None, None, inf, None, None)
        for load in ("reload()", "reload('torch')"):
            yield load, f"{before}; {load}; {after}", options
        yield "the defaults", "update()", {}

    @pytest.mark.saves("LossScaler", 3)
    @bar(
        "peak of unscale_ above its baseline",
        "3 x one gradient of eight",
        "a copy or mask of every gradient is kept until the end, or one tensor joins them all",
    )
    def test_unscales_in_place(self, device):
        """Eight gradients of G bytes each; isfinite() of one takes 1.75 G."""
        size = 64 * 1024

        def peak(module):
            params = [nn.Parameter(torch.ones(size, device=device)) for _ in range(8)]
            optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
            for p in params:
                p.grad = torch.full_like(p, 4.0)
            scaler, known = module.LossScaler(), [optimizer, *params, *(p.grad for p in params)]
            return measure(lambda: scaler.unscale_(optimizer), device, known=known).above_baseline

        return peak, 3 * 4 * size, 8 * 4 * size

    @pytest.mark.survives("LossScaler", 1)
    @agrees("overflows are noted for all optimizers together, or for the last one only")
    def test_optimizers_share_one_scale(self):
        """Two optimizers, each with an overflow or without, stepped in either order."""
        once = "backward(a, {}); backward(b, {}); step({}); step({}); update()".format
        for *bads, order in product((None, inf), (None, inf), ("ab", "ba")):
            yield f"{bads}, {order}", f"{once(*bads, *order)}; {once(None, None, *order)}"
        one = "backward(a); backward(b); unscale_(a); step(b); update()"
        yield "one of them is only unscaled", f"{one}; {once(None, None, *'ab')}"

    @pytest.mark.survives("LossScaler", 1)
    def test_tracks_gradscaler_through_other_scripts(self, answer, device):
        """Random scripts from hypothesis; the shortest one that fails is shown."""

        def check_script(script):
            got, want = beside(answer, device, "", script)
            cause = "something is remembered after the next update, or forgotten before it"
            check_equal(got, want, "LossScaler", cause=cause)

        for_all(scripts, check_script, examples=15)

    @pytest.mark.survives("LossScaler", 2)
    def test_refuses_float16_gradients(self, answer, device):
        """The model was cast: divided in float16, small gradients underflow again."""
        side = Side(answer.LossScaler, device, **GROWING)
        last = held(side.a)[-1]
        last.data = last.data.half()
        side.backward(side.a)
        unscale, before = partial(side.unscale_, side.a), side.seen()
        check_raises(unscale, ValueError, mentions=["float16"], when="for a float16 gradient")
        cause, what = "divided before the dtype was checked", "the world after the refused call"
        check_equal(side.seen(), before, what, cause=cause, clause=ERRORS)
        cause = "the refused call counts as an unscale_"
        check_raises(side.update, RuntimeError, when="for an update after it", cause=cause)

    @pytest.mark.survives("LossScaler", 4)
    @agrees("a parameter without a gradient is stepped, or stops the step")
    def test_leaves_parameters_without_a_gradient_alone(self):
        for missing, bad in product(range(3), (None, inf)):
            middle = f"backward(a, {bad}, missing={missing}); step(a); update()"
            yield f"none for {missing}, {bad}", f"{rounds(None)}; {middle}; {rounds(None)}"

    @pytest.mark.survives("LossScaler", 5)
    @agrees("calls since the last update are not remembered for each optimizer")
    def test_refuses_calls_out_of_order(self):
        """Any two calls in a row, or with an update or another optimizer's step between them."""
        for bad, between in product((None, inf), ("", "step(b); ", "update(); ")):
            for first, last in product(("unscale_(a)", "step(a)", "update()"), repeat=2):
                script = f"backward(a, {bad}); backward(b); {first}; {between}{last}"
                yield f"{first}; {between}{last}, {bad}", script
