"""The hand-written scaler beside torch.amp.GradScaler, through sequences of calls."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.amp import GradScaler

from kit.laws.checks import check, check_bar, check_equal, check_raises
from kit.laws.snapshot import Snapshot
from kit.memory.ruler import measure
from specs.amp_loop.loss_scaler import (
    ANYWHERE,
    EITHER,
    OVERFLOWS,
    Call,
    Side,
    agree,
    backward,
    hold,
    rounds,
)
from specs.amp_loop.runs import BATCHES, go_on, run

STEP = st.just(Call("step"))


class TestPart2LossScaler:
    @pytest.mark.works("LossScaler", "unscale_")
    def test_a_step_by_hand(self, answer, device):
        """Scale 8, a gradient of 3: scaled 24, unscaled 3, and with lr 1 the weight is 5 - 3."""
        weight = nn.Parameter(torch.tensor([5.0], device=device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = answer.LossScaler(init_scale=8.0)
        scaler.scale(weight.sum() * 3).backward()
        told = [weight.grad.item()]
        scaler.unscale_(optimizer)
        told.append(weight.grad.item())
        scaler.step(optimizer)
        scaler.update()
        check_equal(
            [*told, weight.item(), scaler.get_scale()],
            [24.0, 3.0, 2.0, 8.0],
            "scaled gradient, unscaled gradient, weight, scale",
            cause="do it by hand and compare",
            suspects={
                "unscale_ multiplies": [24.0, 192.0, -187.0, 8.0],
                "step unscales a second time": [24.0, 3.0, 4.625, 8.0],
                "unscale_ does nothing": [24.0, 24.0, -19.0, 8.0],
                "the loss is not scaled": [3.0, 0.375, 4.625, 8.0],
                "no step is taken": [24.0, 3.0, 5.0, 8.0],
            },
        )

    @pytest.mark.exact("LossScaler", "scale")
    @pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
    def test_scales_in_float32(self, answer, device, name):
        """1.0 times 70001 is infinite in float16, and 70144 in bfloat16."""
        dtype = getattr(torch, name)
        scaler = answer.LossScaler(init_scale=70001.0)
        loss = torch.ones((), dtype=dtype, device=device, requires_grad=True)
        scaled = scaler.scale(loss)
        cause = "a Python number does not widen a 16-bit tensor"
        check_equal(scaled.item(), 70001.0, f"scaled {name} loss of 1", cause=cause)
        cause = "the loss is detached, and backward() has nowhere to go"
        check_equal(scaled.requires_grad, True, "requires_grad of it", cause=cause)

    @pytest.mark.exact("LossScaler", "unscale_")
    def test_finds_an_overflow_anywhere(self, answer, device):
        """Infinite, minus infinite or NaN, in any element of any parameter of any group."""
        gradients = backward(bad=st.sampled_from(OVERFLOWS), at=ANYWHERE)
        cause = "not every element of every gradient is looked at"
        hold(answer, device, rounds(gradients, STEP), cause)

    @pytest.mark.exact("LossScaler", "update")
    def test_tracks_gradscaler_through_every_pattern_of_overflows(self, answer, device):
        """All 32 scripts of five good and bad steps, growing after two good ones in a row."""
        cause = "back off at once, count good steps in a row, and start over after both"
        for script in itertools.product((None, math.inf), repeat=5):
            calls = [(Call("backward", bad=bad), Call("step"), Call("update")) for bad in script]
            agree(answer, device, [*itertools.chain(*calls)], cause, init_scale=1.0)

    @pytest.mark.exact("LossScaler", "step")
    def test_step_unscales_unless_that_was_done(self, answer, device):
        """With unscale_ before it, without, and with an update that no step came before."""
        calls = st.sampled_from([["unscale_", "step"], ["step"], ["unscale_"]])
        calls = calls.map(lambda names: [Call(name) for name in names])
        cause = "gradients are unscaled twice or not at all, or update() asks who has stepped"
        hold(answer, device, rounds(backward(bad=EITHER), calls), cause)

    @pytest.mark.exact("LossScaler", "state")
    @pytest.mark.parametrize("direction", ["own", "from_torch", "to_torch"])
    def test_its_state_goes_on_where_it_was(self, answer, device, direction):
        """Saved in the middle of a run of good steps, and loaded into one with other options."""
        options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        options |= {"init_scale": 64.0}
        torchs = partial(GradScaler, device.type)
        saves = torchs if direction == "from_torch" else answer.LossScaler
        loads = torchs if direction == "to_torch" else answer.LossScaler
        saved, whole = saves(**options), torchs(**options)
        script = (None, math.inf, None, None, None, None, math.inf, None, None)
        want = _scales(whole, device, script)[3:]
        _scales(saved, device, script[:4])
        state, loaded = saved.state_dict(), loads()
        _scales(saved, device, (math.inf,))  # what comes after must not leak into it
        loaded.load_state_dict(state)
        kinds = {type(value).__name__ for value in state.values()}
        check(
            kinds <= {"int", "float"},
            expected="a state of ints and floats",
            got=kinds,
            cause="a tensor in the state changes with the scaler after the save",
        )
        got = [loaded.get_scale(), *_scales(loaded, device, script[4:])]
        cause = "a number is missing in the state: scale, factors, interval or good steps so far"
        check_equal(got, want, "scales from the save on", cause=cause)

    @pytest.mark.exact("LossScaler", "init_scale")
    def test_starts_as_gradscaler_starts(self, answer, device):
        cause = "the defaults are others, or the keys are"
        want = GradScaler(device.type).state_dict()
        check_equal(answer.LossScaler().state_dict(), want, "state by default", cause=cause)

    @pytest.mark.saves("LossScaler", 5)
    def test_unscales_in_place(self, answer, reference, device):
        """Eight gradients of G bytes: a mask of one takes a quarter of G, isfinite() 1.75 G.

        Copies of all eight would be 8 G, so the bar is 2 G.
        """
        size = 64 * 1024

        def peak(module: object) -> int:
            params = [nn.Parameter(torch.ones(size, device=device)) for _ in range(8)]
            optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
            for p in params:
                p.grad = torch.full_like(p, 4.0)
            scaler = module.LossScaler()
            known = [optimizer, *params, *(p.grad for p in params)]
            return measure(lambda: scaler.unscale_(optimizer), device, known=known).above_baseline

        check_bar(
            "peak of unscale_ above its baseline",
            peak(answer),
            2 * 4 * size,
            plain=8 * 4 * size,
            reference=peak(reference),
            formula="2 x one gradient of eight",
            cause="gradients are divided into copies, or joined into one long tensor",
        )

    @pytest.mark.survives("LossScaler", 1)
    def test_optimizers_share_one_scale(self, answer, device):
        """Two of them, each with overflows or without, in either order; one update for both."""
        order = st.permutations([Call("step", 0), Call("step", 1)])
        both = [backward(optimizer=st.just(number), bad=EITHER) for number in (0, 1)]
        cause = "overflows, or good steps, are kept for all together or for the last one only"
        hold(answer, device, rounds(*both, order), cause, count=2)

    @pytest.mark.survives("LossScaler", 2)
    def test_does_not_grow_out_of_float32(self, answer, device):
        """Twice 2**127 is above float32's largest number, and GradScaler stays."""
        calls = [Call("backward", value=0.0), Call("step"), Call("update")] * 4
        cause = "the scale grows without end, and then every gradient is infinite"
        agree(answer, device, calls, cause, init_scale=2.0**126, growth_interval=1)

    @pytest.mark.survives("LossScaler", 3)
    def test_refuses_float16_gradients(self, answer, device):
        """They mean a model that was cast: divided in float16, small gradients underflow again."""
        dtypes = (torch.float32, torch.float64, torch.float16)
        params = [nn.Parameter(torch.ones(3, dtype=dtype, device=device)) for dtype in dtypes]
        for p in params:
            p.grad = torch.full_like(p, 6.0)
        params[1].grad *= 1e300  # is finite in float64
        scaler = answer.LossScaler(init_scale=8.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        before = Snapshot(nn.ParameterList(params), optimizer)
        call = lambda: scaler.unscale_(optimizer)  # noqa: E731
        check_raises(call, ValueError, mentions=["float16"], when="for a float16 gradient")
        before.check_unchanged("the refused call", cause="divided before it was checked")
        params[2].grad = None
        scaler.step(optimizer)
        cause = "everything but float32 is refused, or the refused call has left a trace"
        got = [p.detach()[0].item() for p in params]
        check_equal(got, [0.25, 1 - 6e300 / 8, 1.0], "weights of three dtypes", cause=cause)

    @pytest.mark.survives("LossScaler", 4)
    def test_huge_but_finite_gradients_are_no_overflow(self, answer, device):
        """Four times 3e38 is above float32's largest; each of them is not."""
        calls = [Call("backward", value=1.5e38), Call("step"), Call("update")]
        cause = "the sum or the norm of a gradient is looked at, not its elements"
        agree(answer, device, calls, cause, init_scale=2.0)

    @pytest.mark.survives("LossScaler", 6)
    def test_leaves_parameters_without_a_gradient_alone(self, answer, device):
        gradients = backward(missing=st.sampled_from((0, 1, 2)), bad=EITHER, at=ANYWHERE)
        cause = "a parameter without a gradient is stepped, or ends the step"
        hold(answer, device, rounds(gradients, STEP), cause)

    @pytest.mark.survives("LossScaler", 7)
    def test_refuses_calls_out_of_order(self, answer, device):
        """All 125 ways to make three of these calls; the scaler may be saved and loaded between."""
        calls = [Call(name) for name in ("unscale_", "step", "update", "reload")] + [
            Call("step", 1)
        ]
        cause = "what was done since the last update is not kept for each optimizer"
        for three, bad in itertools.product(itertools.product(calls, repeat=3), (None, math.inf)):
            ready = [Call("backward", 0, bad=bad), Call("backward", 1)]
            agree(answer, device, [*ready, *three], cause, count=2)

    @pytest.mark.survives("LossScaler", "Raises")
    @pytest.mark.parametrize(
        ("option", "values"),
        [
            ("init_scale", (0.0, -4.0, math.inf, math.nan)),
            ("growth_factor", (1.0, 0.5, math.nan)),
            ("backoff_factor", (1.0, 1.5, 0.0, -0.5, math.nan)),
            ("growth_interval", (0, -1, math.nan)),
        ],
    )
    def test_refuses_options_out_of_range(self, answer, option, values):
        for value in values:
            check_raises(
                lambda value=value: answer.LossScaler(**{option: value}),
                ValueError,
                mentions=[value],
                when=f"for LossScaler({option}={value})",
            )

    @pytest.mark.survives("train_step", "scaler")
    def test_train_step_takes_it_as_it_takes_gradscaler(self, answer, device):
        """Six steps, the second with an overflow: the same weights, scales and losses."""
        true = run("fp16", device)
        go_on(true, 0, BATCHES)
        mine = run("fp16", device)
        mine.grad_scaler = answer.LossScaler(init_scale=256.0, growth_interval=2)
        for batch in mine.batches:
            parts = mine.model, batch, mine.loss_fn, mine.optimizer, mine.grad_scaler
            if not answer.train_step(*parts, dtype=torch.float16).skipped:
                mine.scheduler.step()
        cause = "train_step uses more of the scaler than its Protocol names"
        names = "weights", "scaler", "schedule"
        got, want = mine.now(), true.now()
        check_equal({n: got[n] for n in names}, {n: want[n] for n in names}, "", cause=cause)


def _scales(scaler, device, script):
    """The scale after each step of a script of gradients, good (None) and bad."""
    side, scales = Side(scaler, device), []
    for bad in script:
        for call in (Call("backward", bad=bad), Call("step"), Call("update")):
            side.do(call, lambda: None)
        scales.append(scaler.get_scale())
    return scales
