"""The hand-written scaler, held against torch.amp.GradScaler over scripted overflows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from kit.laws import draw
from kit.laws.checks import check_bar, check_close, check_equal
from kit.laws.snapshot import Snapshot
from kit.laws.toys import mlp
from kit.memory.ruler import measure
from specs.amp_loop.common import grads_of
from specs.amp_loop.loss_scaler import BAD, GOOD, give_gradients, play, weights


class TestPart2LossScaler:
    """Part 2: LossScaler - a dynamic loss scaler written by hand"""

    subject = "LossScaler"

    @pytest.mark.works
    def test_scales_the_loss_and_unscales_the_gradients(self, answer, device):
        scaler = answer.LossScaler(init_scale=1024.0)
        model = mlp(4, 3, device=device)
        x = draw.randn(6, 4, device=device)
        want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = model(x).sum()
        scaled = scaler.scale(loss)
        check_equal(
            scaled.detach(),
            loss.detach() * 1024,
            "scaled loss",
            cause="scale() is not loss x scale",
        )
        scaled.backward()
        scaler.unscale_(optimizer)
        for p, gradient in zip(model.parameters(), want, strict=True):
            check_close(
                p.grad, gradient, "unscaled gradient", cause="unscale_() is not gradient / scale"
            )
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        cause = "step() unscales again, or does not step"
        moved = before - model[0].weight.detach()
        check_close(moved, want[0], "step with lr 1 after unscale_", rtol=1e-4, cause=cause)

    @pytest.mark.exact
    def test_tracks_gradscaler_through_every_pattern_of_overflows(self, answer, device):
        """All 64 scripts of six good and bad steps, growing after two good ones in a row."""
        options = {"init_scale": 256.0, "growth_interval": 2}
        for script in itertools.product((GOOD, BAD), repeat=6):
            want = play(GradScaler(device.type, **options), device, script)
            got = play(answer.LossScaler(**options), device, script)
            words = " ".join("overflow" if value == BAD else "good" for value in script)
            for number, ((scale, values), (true_scale, true)) in enumerate(
                zip(got, want, strict=True), 1
            ):
                check_equal(
                    scale,
                    true_scale,
                    f"scale after step {number} of: {words}",
                    cause="back off at once, count good steps in a row, and start over after both",
                )
                check_equal(
                    values,
                    true,
                    f"weights after step {number} of: {words}",
                    cause="a step is taken with an overflow, or gradients are not unscaled",
                )

    @pytest.mark.exact
    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_one_bad_gradient_anywhere_stops_everything(self, answer, device, value):
        """First, middle and last element of first, middle and last parameter."""
        for parameter, element in itertools.product((0, 1, 2), (0, 3, -1)):
            params = weights(7, 4, 5, device=device)
            optimizer = torch.optim.Adam(params)
            scaler = answer.LossScaler(init_scale=8.0)
            give_gradients(params, 8.0)
            params[parameter].grad[element] = value
            before = Snapshot(nn.ParameterList(params), optimizer)
            scaler.step(optimizer)
            scaler.update()
            where = f"{value} in element {element} of parameter {parameter}"
            cause = "not every element of every gradient is looked at"
            before.check_unchanged(where, cause=cause, gradients=False)
            check_equal(scaler.get_scale(), 4.0, f"scale after {where}", cause=cause)

    @pytest.mark.exact
    def test_several_optimizers_share_one_scale(self, answer, device):
        """The one that overflows is skipped, the other steps, and the scale falls once."""
        first, second = weights(3, 3, device=device)
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (first, second)]
        scaler = answer.LossScaler(init_scale=8.0)
        give_gradients([first], 8.0, BAD)
        give_gradients([second], 8.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        cause = "overflows are kept for all optimizers together, or for the last one only"
        check_equal(first.detach(), torch.ones_like(first), "overflowed weights", cause=cause)
        check_equal(second.detach(), torch.full_like(second, 0.25), "other weights", cause=cause)
        check_equal(scaler.get_scale(), 4.0, "scale", cause=cause)

    @pytest.mark.exact
    def test_does_not_grow_out_of_float32(self, answer, device):
        """Twice 2**127 is above float32's largest number, and GradScaler stays."""
        scaler = answer.LossScaler(init_scale=2.0**126, growth_interval=1)
        got = [scale for scale, _ in play(scaler, device, (0.0, 0.0, 0.0))]
        cause = "the scale grows without end, and then every gradient is infinite"
        check_equal(got, [2.0**127] * 3, "scales", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize("direction", ["own", "from_torch", "to_torch"])
    def test_its_state_goes_on_where_it_was(self, answer, device, direction):
        """Saved in the middle of a run of good steps, and loaded into one with other options."""
        options = {
            "init_scale": 64.0,
            "growth_factor": 4.0,
            "backoff_factor": 0.25,
            "growth_interval": 3,
        }

        def torch_scaler(**options: float) -> GradScaler:
            return GradScaler(device.type, **options)

        saves = torch_scaler if direction == "from_torch" else answer.LossScaler
        loads = torch_scaler if direction == "to_torch" else answer.LossScaler
        saved, loaded, whole = saves(**options), loads(), torch_scaler(**options)
        head, tail = (GOOD, BAD, GOOD, GOOD), (GOOD, GOOD, BAD, GOOD)
        play(saved, device, head)
        loaded.load_state_dict(saved.state_dict())
        got = [loaded.get_scale(), *(scale for scale, _ in play(loaded, device, tail))]
        want = [scale for scale, _ in play(whole, device, head + tail)][3:]
        cause = "a number is missing in the state: scale, factors, interval or good steps so far"
        check_equal(got, want, "scales from the save on", cause=cause)

    @pytest.mark.saves
    def test_works_in_place(self, answer, reference, device):
        """Eight gradients of G bytes: looking for infinities may take two of G at a time.

        Copies of all eight would be 8 G, so the bar is 3 G.
        """
        size = 64 * 1024

        def peak(module: object) -> int:
            params = weights(*[size] * 8, device=device)
            optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
            scaler = module.LossScaler()
            give_gradients(params, 4.0)
            reading = measure(
                lambda: scaler.unscale_(optimizer),
                device,
                known=[optimizer, *params, *grads_of(params)],
            )
            return reading.above_baseline

        check_bar(
            "peak of unscale_ above its baseline",
            peak(answer),
            3 * 4 * size,
            plain=8 * 4 * size,
            reference=peak(reference),
            formula="3 x one gradient of eight",
            cause="gradients are divided into copies, or joined into one long tensor",
        )
