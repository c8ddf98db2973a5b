"""The hand-written scaler: wrong order, odd gradients, bad options."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.laws import draw
from kit.laws.checks import check, check_equal, check_raises
from kit.laws.snapshot import Snapshot
from kit.laws.toys import mlp, mse
from specs.amp_loop.loss_scaler import BAD, GOOD, give_gradients, weights


class TestPart2LossScalerTraps:
    """Part 2: LossScaler - a dynamic loss scaler written by hand"""

    subject = "LossScaler"

    @pytest.mark.survives
    def test_unscales_once_between_two_updates(self, answer, device):
        """Twice would divide by the square of the scale: GradScaler raises RuntimeError."""
        params = weights(3, device=device)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = answer.LossScaler(init_scale=8.0)
        give_gradients(params, 8.0)
        scaler.unscale_(optimizer)
        check_raises(
            lambda: scaler.unscale_(optimizer), RuntimeError, when="for a second unscale_()"
        )
        scaler.step(optimizer)
        check_raises(lambda: scaler.step(optimizer), RuntimeError, when="for a second step()")
        check_raises(
            lambda: scaler.unscale_(optimizer), RuntimeError, when="for unscale_() after step()"
        )
        scaler.update()
        check_raises(scaler.update, RuntimeError, when="for update() with nothing to go by")
        give_gradients(params, 8.0)
        scaler.step(optimizer)
        want = torch.full_like(params[0], 1 - 2 * GOOD).detach()
        cause = "gradients are unscaled twice, or an update does not make room for the next step"
        check_equal(params[0].detach(), want, "weights after two steps", cause=cause)

    @pytest.mark.survives
    def test_scales_a_float16_loss_in_float32(self, answer, device):
        """A float16 1.0 times the number 65536 is infinite; times a float32 tensor it is not."""
        loss = torch.ones((), dtype=torch.float16, device=device)
        got = answer.LossScaler(init_scale=65536.0).scale(loss)
        cause = "a Python number does not widen a float16 tensor; a float32 tensor does"
        check_equal(got, torch.tensor(65536.0, device=device), "scaled loss", cause=cause)

    @pytest.mark.survives
    def test_starts_as_gradscaler_starts(self, answer, device):
        want = GradScaler(device.type).state_dict()
        cause = "the defaults are others, or the keys are"
        check_equal(answer.LossScaler().state_dict(), want, "state by default", cause=cause)
        small = answer.LossScaler(init_scale=0.5).get_scale()
        check_equal(small, 0.5, "a scale below 1", cause="every positive scale is allowed")

    @pytest.mark.survives
    def test_refuses_float16_gradients(self, answer, device):
        """They mean a model that was cast: divided in float16, small gradients underflow again."""
        params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        params[1] = nn.Parameter(torch.ones(3, dtype=torch.float16, device=device))
        give_gradients(params, 1.0)
        scaler = answer.LossScaler(init_scale=8.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        before = Snapshot(nn.ParameterList(params), optimizer)
        check_raises(
            lambda: scaler.unscale_(optimizer),
            ValueError,
            mentions=["float16"],
            when="for a float16 gradient",
        )
        before.check_unchanged("the refused call", cause="divided before it was checked")

    @pytest.mark.survives
    def test_minds_parameters_without_a_gradient(self, answer, device):
        params = weights(3, 2, 4, device=device)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = answer.LossScaler(init_scale=8.0)
        give_gradients([params[1]], 8.0)
        scaler.step(optimizer)
        scaler.update()
        moved = [p.detach()[0].item() for p in params]
        cause = "a parameter without a gradient is stepped, or ends the step"
        check_equal(moved, [1.0, 1.0 - GOOD, 1.0], "weights", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("options", "value"),
        [
            pytest.param({"init_scale": 0.0}, "0", id="zero_scale"),
            pytest.param({"init_scale": -4.0}, "-4", id="negative_scale"),
            pytest.param({"init_scale": float("inf")}, "inf", id="infinite_scale"),
            pytest.param({"growth_factor": 1.0}, "1", id="growth_of_1"),
            pytest.param({"growth_factor": 0.5}, "0.5", id="growth_below_1"),
            pytest.param({"backoff_factor": 1.0}, "1", id="backoff_of_1"),
            pytest.param({"backoff_factor": 1.5}, "1.5", id="backoff_above_1"),
            pytest.param({"backoff_factor": 0.0}, "0", id="backoff_of_0"),
            pytest.param({"backoff_factor": -0.5}, "-0.5", id="negative_backoff"),
            pytest.param({"growth_interval": 0}, "0", id="no_interval"),
            pytest.param({"init_scale": math.nan}, "nan", id="nan_scale"),
            pytest.param({"growth_factor": math.nan}, "nan", id="nan_growth"),
            pytest.param({"backoff_factor": math.nan}, "nan", id="nan_backoff"),
        ],
    )
    def test_refuses_bad_options(self, answer, options, value):
        check_raises(
            lambda: answer.LossScaler(**options),
            ValueError,
            mentions=[value],
            when=f"for LossScaler({next(iter(options))}={value})",
        )

    @pytest.mark.survives
    def test_train_step_takes_it_as_it_takes_gradscaler(self, answer, device):
        """Five steps, the third with an overflow: the same weights, scales and skips."""

        def run(scaler) -> tuple[list[Tensor], list[tuple[bool, float]]]:
            draw.seed(5)
            model = mlp(6, 8, 2, device=device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            told = []
            for number in range(5):
                batch = draw.randn(4, 6, device=device), draw.randn(4, 2, device=device)
                if number == 2:
                    batch[1][0, 0] = math.inf
                result = answer.train_step(
                    model, batch, mse, optimizer, scaler, dtype=torch.float16, max_norm=1.0
                )
                told.append((result.skipped, scaler.get_scale()))
            return [p.detach() for p in model.parameters()], told

        options = {"init_scale": 256.0, "growth_interval": 2}
        true, true_told = run(GradScaler(device.type, **options))
        got, got_told = run(answer.LossScaler(**options))
        cause = "train_step uses more of the scaler than its contract names"
        check_equal(got_told, true_told, "(skipped, scale) after each step", cause=cause)
        for mine, theirs in zip(got, true, strict=True):
            check_equal(mine, theirs, "weights after five steps", cause=cause)

    @pytest.mark.survives
    def test_unscales_every_parameter_group(self, answer, device):
        params = weights(3, 3, device=device)
        optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=1.0)
        scaler = answer.LossScaler(init_scale=8.0)
        give_gradients(params, 8.0)
        scaler.step(optimizer)
        moved = [p.detach()[0].item() for p in params]
        cause = "only param_groups[0] is unscaled"
        check_equal(moved, [1 - GOOD, 1 - GOOD], "weights of two groups", cause=cause)

    @pytest.mark.survives
    def test_counts_updates_and_falls_once_for_all_optimizers(self, answer, device):
        """Two optimizers, growth after two updates: good, good, both overflow."""
        params = weights(3, 3, device=device)
        optimizers = [torch.optim.SGD([p], lr=0.0) for p in params]
        scaler = answer.LossScaler(init_scale=8.0, growth_interval=2)
        scales = []
        for value in (GOOD, GOOD, BAD):
            give_gradients(params, scaler.get_scale(), value)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        cause = "steps or optimizers are counted, not updates"
        check_equal(scales, [8.0, 16.0, 8.0], "scales", cause=cause)

    @pytest.mark.survives
    def test_an_overflow_counts_without_a_step(self, answer, device):
        """unscale_ found it, the caller decided not to step, and update must know."""
        params = weights(3, device=device)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = answer.LossScaler(init_scale=8.0)
        give_gradients(params, 8.0, BAD)
        scaler.unscale_(optimizer)
        scaler.update()
        check_equal(scaler.get_scale(), 4.0, "scale", cause="update() asks who has stepped")

    @pytest.mark.survives
    def test_huge_but_finite_gradients_are_no_overflow(self, answer, device):
        """Four times 3e38 is above float32's largest; each of them is not."""
        params = weights(4, device=device)
        optimizer = torch.optim.SGD(params, lr=2.0**-125)
        scaler = answer.LossScaler(init_scale=2.0)
        give_gradients(params, 1.0, 3e38)
        scaler.step(optimizer)
        scaler.update()
        cause = "the sum or the norm of a gradient is looked at, not its elements"
        check_equal(scaler.get_scale(), 2.0, "scale", cause=cause)

    @pytest.mark.survives
    def test_takes_float64_gradients(self, answer, device):
        params = [nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))]
        scaler = answer.LossScaler(init_scale=8.0)
        give_gradients(params, 8.0)
        scaler.step(torch.optim.SGD(params, lr=1.0))
        cause = "everything but float32 is refused"
        check_equal(params[0].detach()[0].item(), 1 - GOOD, "float64 weight", cause=cause)

    @pytest.mark.survives
    def test_its_state_is_plain_numbers(self, answer):
        state = answer.LossScaler().state_dict()
        kinds = {type(value).__name__ for value in state.values()}
        cause = "a tensor in the state changes with the scaler after the save"
        check(kinds <= {"int", "float"}, expected="ints and floats", got=kinds, cause=cause)
