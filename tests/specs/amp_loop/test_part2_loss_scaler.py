"""The hand-written scaler beside torch.amp.GradScaler, through scripts of calls."""

from functools import partial
from itertools import chain, cycle, product
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from kit.laws.again import fails_once
from kit.laws.bars import bar
from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.precisions import default_dtype
from kit.laws.scenarios import scenarios
from kit.laws.scripts import play
from kit.laws.sequences import for_all
from kit.laws.snapshot import Snapshot
from kit.laws.trace import kept
from kit.memory.ruler import measure
from specs.amp_loop.laws import laid_otherwise

GROWING = {"init_scale": 8.0, "growth_interval": 2}
OUT_OF_RANGE = {
    "init_scale": (0.0, -4.0, 1e39, float("inf"), nan),  # not math's own object
    "growth_factor": (1.0, 0.5, nan),
    "backoff_factor": (1.0, 1.5, 0.0, -0.5, nan),
    "growth_interval": (0, -1),
}
SIZES = (7, 4, 1)  # of an optimizer's parameters, in two groups


class Side:
    """A scaler, the optimizers a and b that it is called with, and what scripts call."""

    def __init__(self, make, device, sizes=SIZES, **options):
        self.make, self.device, self.loaded = make, device, None
        self.start(make(**options))
        self.a, self.b = self.optimizer_of(sizes), self.optimizer_of(SIZES)

    def start(self, scaler):
        self.scaler = scaler
        scaler.scale(torch.zeros((), device=self.device))  # GradScaler makes its scale here

    def optimizer_of(self, sizes):
        shapes = [{4: (2, 2), 1: ()}.get(n, (n,)) for n in sizes]
        params = [nn.Parameter(torch.ones(shape, device=self.device)) for shape in shapes]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.25}]
        return torch.optim.SGD(groups, lr=0.125, momentum=0.5)

    def __getattr__(self, name):  # unscale_, step, update
        return getattr(self.scaler, name)

    fail = staticmethod(fails_once)

    def drop(self):
        """The optimizer b is gone, and another is there."""
        self.b = self.optimizer_of(SIZES)

    def clip(self, optimizer):
        """No infinity and no NaN is left."""
        for p in held(optimizer):
            p.grad.nan_to_num_(nan=0.5).clamp_(-0.5, 0.5)

    def backward(self, optimizer, bad=None, value=0.75, at=0, missing=None):
        """True gradients of `value`, scaled; `bad` at one place, none for one parameter."""
        sizes = [p.numel() for p in held(optimizer)]
        flat = torch.full((sum(sizes),), value * self.get_scale(), device=self.device)
        if bad is not None:
            flat[at] = bad
        for n, (p, part) in enumerate(zip(held(optimizer), flat.split(sizes), strict=True)):
            p.grad = None if n == missing else laid_otherwise(part.view(p.shape))

    def scaled(self, dtype):
        """A loss of 1.1, scaled, whether it has a graph, and the loss afterwards."""
        leaf = torch.full((), 1.1, dtype=getattr(torch, dtype), device=self.device)
        scaled = self.scale(loss := leaf.requires_grad_() * 1)
        return scaled.item(), scaled.dtype, scaled.requires_grad, loss.item()

    def reload(self, kind="own"):
        """Go on with a new scaler; what the old one does after the save must not leak into it."""
        old, state, other = self.scaler, self.state_dict(), self.optimizer_of([1])
        held(other)[0].grad = torch.tensor(inf, device=self.device)
        old.unscale_(other)
        old.update()
        new = self.make() if kind == "own" else GradScaler(self.device.type)
        new.load_state_dict(state)
        self.start(new)
        self.loaded = state

    def load(self, **changed):
        """Its own state, of which something is changed."""
        self.scaler.load_state_dict(self.state_dict() | changed)

    def seen(self):
        params = [*held(self.a), *held(self.b)]
        grads = [p.grad if p.grad is None else p.grad.nan_to_num(7, 7, 7) for p in params]
        now = {"state": self.state_dict(), "the state that was loaded": self.loaded}
        return kept({**now, "weights": params, "gradients": grads})


def held(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def beside(answer, device, name, script, options=GROWING):
    makes = answer.LossScaler, partial(GradScaler, device.type)
    return tuple(play(Side(make, device, **options), script) for make in makes)


agrees = scenarios("LossScaler")(beside)


def rounds(*bads, calls="step(a)"):
    """Backward passes, each with a step and an update."""
    return "; ".join(f"backward(a, {bad}); {calls}; update()" for bad in bads)


def calls(st, optimizer):
    """Calls with one optimizer between two updates: unscaled, stepped, both, or not used at all."""
    bad = st.integers(0, sum(SIZES) - 1).map(lambda at: f", inf, at={at}")
    missing = st.sampled_from((", missing=0", ", missing=2"))
    first = st.builds(
        "backward({}{}{})".format, st.just(optimizer), st.just("") | bad, st.just("") | missing
    )
    ways = ("step({0})", "unscale_({0}); step({0})", "unscale_({0})")
    used = st.tuples(first, st.sampled_from([way.format(optimizer) for way in ways]))
    return st.just(()) | used


def scripts(st):
    """Rounds with two optimizers, of which one is used at least, and now and then a reload."""
    used = st.tuples(calls(st, "a"), calls(st, "b")).filter(any)
    end = st.sampled_from((("update()",), ("update()",), ("update()", "reload()")))
    one = st.tuples(used, end).map(lambda parts: [*parts[0][0], *parts[0][1], *parts[1]])
    return st.lists(one, min_size=1, max_size=4).map(lambda rounds: "; ".join(chain(*rounds)))


class TestPart2LossScaler:
    @pytest.mark.works("LossScaler", "unscale_")
    @agrees("do it by hand and compare")
    def test_a_step_by_hand(self):
        """Gradients of 0.75 are 6 when scaled by 8; with lr 0.125 weights of 1 become 0.90625."""
        yield "one step", "backward(a); unscale_(a); step(a); update()"

    @pytest.mark.exact("LossScaler", "scale")
    @agrees("a Python number does not widen a 16-bit loss, or a float64 one is narrowed")
    def test_scales_in_float32(self):
        """1.1 times 70001 is infinite in float16; float32 has seven of float64's digits."""
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            for scale in (70001.0, 1.0):
                yield f"{dtype}, scale {scale}", f"scaled({dtype!r})", {"init_scale": scale}
        with default_dtype(torch.bfloat16):
            yield "torch's default is bfloat16", "scaled('float32')", {"init_scale": 70001.0}

    @pytest.mark.exact("LossScaler", "unscale_")
    @agrees("not every element of every gradient is looked at")
    def test_finds_an_overflow_anywhere(self):
        """Infinite, minus infinite or NaN, in any element of any parameter of any group."""
        for at, bad in zip(range(sum(SIZES)), cycle((inf, -inf, nan))):
            yield f"{bad} at {at}", f"backward(a, {bad}, at={at}); step(a); update()"
        long = {"sizes": (7, 4, 2**22 + 7)}
        yield "inf at the last of many", "backward(a, inf, at=-1); step(a); update()", long

    @pytest.mark.gpu
    @pytest.mark.exact("LossScaler", "unscale_")
    def test_finds_an_overflow_on_every_device(self, answer, device):
        """A model may have its embedding on the CPU."""
        for grads, stepped in (((6, 6), 0.90625), ((inf, 6), 1.0), ((6, inf), 1.0)):
            weights = [torch.ones(3, device=device), torch.ones(2)]
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = torch.full_like(weight, grad)
            answer.LossScaler(8.0).step(torch.optim.SGD(weights, lr=0.125))
            got, what = [float(w[-1]) for w in weights], f"weights after gradients of {grads}"
            check_equal(got, [stepped] * 2, what, cause="gradients of one device are looked at")

    @pytest.mark.exact("LossScaler", "update")
    @agrees("back off at once, count good steps in a row, and start over after both")
    def test_tracks_gradscaler_through_every_pattern_of_overflows(self):
        """All 16 scripts of four good and bad steps, growing after two good ones, or each."""
        for bads in product((None, inf), repeat=4):
            steps = ["good" if bad is None else "overflow" for bad in bads]
            yield ", ".join(steps), rounds(*bads), GROWING | {"init_scale": 1.0}
        yield "growing at every step", rounds(None, None, inf, None), {"growth_interval": 1}

    @pytest.mark.exact("LossScaler", "step")
    @agrees("gradients are unscaled twice or not at all, or update() asks who has stepped")
    def test_step_unscales_unless_that_was_done(self):
        """With unscale_ and clipping before it, without, and with an update without a step."""
        ways = "unscale_(a); step(a)", "step(a)", "unscale_(a)", "unscale_(a); clip(a); step(a)"
        for bad, calls in product((None, inf, nan), ways):
            yield f"{bad}: {calls}", f"{rounds(bad, calls=calls)}; {rounds(None)}"

    @pytest.mark.exact("LossScaler", "state")
    @agrees("a number is not saved or not loaded, is a tensor, or changes after the save")
    def test_its_state_goes_on_where_it_was(self):
        """Saved in the middle of good steps, loaded into one with other options, or torch's."""
        options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        before, after = rounds(None, inf, None, None), rounds(None, None, inf, None, None)
        for loads in ("reload()", "reload('torch')", "reload('torch'); reload()"):
            yield loads, f"{before}; {loads}; {after}", options
        yield "the defaults", "update()", {}
        many = "load(_growth_tracker=5); "  # as where the interval was lowered afterwards
        yield "more good steps than the interval", many + rounds(inf, None, None, None)

    @pytest.mark.saves("LossScaler", 4)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @bar(
        "peak of unscale_ above its baseline",
        "3 x one gradient of eight",
        "gradients are divided into copies, widened, or joined into one long tensor",
    )
    def test_unscales_in_place(self, device, dtype):
        """Of eight gradients of G bytes isfinite() of one takes 1.75 G, 2.5 G in bfloat16."""
        size = 64 * 1024

        def peak(module):
            params = [nn.Parameter(torch.ones(size, device=device, dtype=dtype)) for _ in range(8)]
            optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
            for p in params:
                p.grad = torch.full_like(p, 4.0)
            scaler, known = module.LossScaler(), [optimizer, *params, *(p.grad for p in params)]
            return measure(lambda: scaler.unscale_(optimizer), device, known=known).above_baseline

        return peak, 3 * dtype.itemsize * size, 8 * dtype.itemsize * size

    @pytest.mark.survives("LossScaler", 1)
    @agrees("overflows, or good steps, are kept for all together or for the last one only")
    def test_optimizers_share_one_scale(self):
        """Two of them, each with overflows or without, in either order; one update for both."""
        once = "backward(a, {}); backward(b, {}); step({}); step({}); update()".format
        for *bads, order in product((None, inf), (None, inf), ("ab", "ba")):
            yield f"{bads}, {order}", f"{once(*bads, *order)}; {once(None, None, *order)}"
        gone = "backward(b, inf); step(b); drop(); backward(a); step(a); update()"
        yield "one that is gone before the update", gone

    @pytest.mark.survives("LossScaler", 1)
    def test_tracks_gradscaler_through_other_scripts(self, answer, device):
        """Made by hypothesis, longer than all that are tried in turn; the shortest that fails."""

        def check_script(script):
            got, want = beside(answer, device, "", script)
            cause = "something is kept for longer than to the next update, or not as long"
            cause += ", or for one of two optimizers only"
            check_equal(got, want, "LossScaler", cause=cause)

        for_all(scripts, check_script, examples=15)

    @pytest.mark.survives("LossScaler", 2)
    def test_refuses_float16_gradients(self, answer, device):
        """They mean a model that was cast: divided in float16, small gradients underflow again."""
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        params = [nn.Parameter(torch.ones(3, dtype=dtype, device=device)) for dtype in dtypes]
        for p in params:
            p.grad = torch.full_like(p, 6.0)
        params[1].grad *= 1e300  # is finite in float64
        scaler, optimizer = answer.LossScaler(init_scale=8.0), torch.optim.SGD(params, lr=1.0)
        before, unscale = Snapshot(nn.ParameterList(params), optimizer), scaler.unscale_
        check_raises(
            partial(unscale, optimizer), ValueError, mentions=["float16"], when="in float16"
        )
        cause = "divided before it was checked"
        before.check_unchanged("the refused call", cause=cause, clause=ERRORS)
        cause = "the refused call has left a trace, or all but float32 is refused or narrowed"
        check_raises(scaler.update, RuntimeError, when="for an update after it", cause=cause)
        params[3].grad = None
        for overflowed in (None, *params[:3]):
            if overflowed is not None:
                for p in params[:3]:
                    p.grad = torch.full_like(p, inf if p is overflowed else 6.0)
                scaler.update()
                cause = f"a gradient of {overflowed.dtype} is divided, but not looked at"
            scaler.step(optimizer)
            got, want = [p.detach()[-1].item() for p in params], [0.25, 1 - 6e300 / 8, 0.25, 1.0]
            check_equal(got, want, "weights of four dtypes", cause=cause)

    @pytest.mark.survives("LossScaler", 3)
    @agrees("a sum or a norm is looked at, or good steps are counted on after a growth left out")
    def test_huge_but_finite_gradients_are_no_overflow(self):
        """Four times 3e38 is above float32's largest; each of them is not."""
        yield "3e38", "backward(a, value=1.5e38); step(a); update()", {"init_scale": 2.0}
        largest = {"init_scale": 2.0**126, "growth_interval": 1}
        yield "growing to the end of float32", rounds(None, None, None), largest

    @pytest.mark.survives("LossScaler", 5)
    @agrees("a parameter without a gradient is stepped, or ends the step")
    def test_leaves_parameters_without_a_gradient_alone(self):
        for missing, bad in product(range(3), (None, inf)):
            middle = f"backward(a, {bad}, missing={missing}); step(a); update()"
            yield f"none for {missing}, {bad}", f"{rounds(None)}; {middle}; {rounds(None)}"
        yield "no elements", rounds(None, inf, None), GROWING | {"sizes": (7, 0, 4)}

    @pytest.mark.survives("LossScaler", 6)
    @agrees("what was done since the last update is not kept for each optimizer")
    def test_refuses_calls_out_of_order(self):
        """Any two calls, after an overflow too; with a step, an update or a load between."""
        loaded = "load_state_dict(side.state_dict()); "
        for bad, between in product((None, inf), ("", "step(b); ", "update(); ", loaded)):
            for first, last in product(("unscale_(a)", "step(a)", "update()"), repeat=2):
                script = f"backward(a, {bad}); backward(b); {first}; {between}{last}"
                yield f"{first}; {between}{last}, {bad}", script
        for done in ("", "unscale_(a); "):
            script = f"backward(a); {done}fail(a); step(a); update(); {rounds(None)}"
            yield f"{done}the optimizer fails", script

    @pytest.mark.survives("LossScaler", "Raises")
    def test_refuses_options_out_of_range(self, answer):
        """In a state too, where the other numbers are new: then nothing is loaded."""
        scaler, other = answer.LossScaler(**GROWING), answer.LossScaler(4.0, 3.0, 0.25, 7)
        before, state = scaler.state_dict(), other.state_dict()
        cause = "numbers are set one by one, before the last is in range"
        for option, values in OUT_OF_RANGE.items():
            for value in values:
                make = partial(answer.LossScaler, **{option: value})
                check_raises(make, ValueError, mentions=[value], when=f"for {option}={value}")
                key = option.removeprefix("init_")
                load = partial(scaler.load_state_dict, state | {key: value})
                when = f"for a state with {key}={value}"
                check_raises(load, ValueError, mentions=[value], when=when)
                what = f"the scaler, refused a state with {key}={value}"
                check_equal(scaler.state_dict(), before, what, cause=cause, clause=ERRORS)
