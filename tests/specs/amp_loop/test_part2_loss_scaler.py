"""The hand-written scaler, held against torch.amp.GradScaler over scripted overflows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.ruler import measure
from kit.snapshot import Snapshot
from kit.toys import mlp
from kit.verdict import check, check_bar, check_close, check_equal, check_raises

GOOD, BAD = 0.75, math.inf


def weights(*sizes: int, device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, device=device)) for size in sizes]


def give_gradients(params: list[nn.Parameter], scale: float, value: float = GOOD) -> None:
    """True gradients of `value`, as a backward pass under `scale` leaves them."""
    for p in params:
        p.grad = torch.full_like(p, value * scale)


def play(scaler, device: torch.device, script: tuple[float, ...]) -> list[tuple[float, Tensor]]:
    """The scale and the weights after each step of a script of true gradients."""
    params = weights(3, 2, device=device)
    optimizer = torch.optim.SGD(params, lr=0.125, momentum=0.5)
    seen = []
    scaler.scale(torch.zeros((), device=device))  # GradScaler makes its scale here
    for value in script:
        give_gradients(params[:1], scaler.get_scale(), value)
        give_gradients(params[1:], scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), torch.cat([p.detach() for p in params]).clone()))
    return seen


class TestPart2LossScaler:
    """Part 2: LossScaler - a dynamic loss scaler written by hand"""

    subject = "LossScaler"

    @pytest.mark.works
    def test_scales_the_loss_and_unscales_the_gradients(self, answer, device):
        scaler = answer.LossScaler(init_scale=1024.0)
        model = mlp(4, 3, device=device)
        x = torch.randn(6, 4, device=device)
        want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = model(x).sum()
        scaled = scaler.scale(loss)
        check_equal(scaled.detach(), loss.detach() * 1024, "scaled loss", cause="loss x scale")
        scaled.backward()
        scaler.unscale_(optimizer)
        for p, gradient in zip(model.parameters(), want, strict=True):
            check_close(p.grad, gradient, "unscaled gradient", cause="not gradient / scale")
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
                known=[optimizer, *params, *_grads(params)],
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
            torch.manual_seed(5)
            model = mlp(6, 8, 2, device=device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            told = []
            for number in range(5):
                batch = torch.randn(4, 6, device=device), torch.randn(4, 2, device=device)
                if number == 2:
                    batch[1][0, 0] = math.inf
                result = answer.train_step(
                    model, batch, _mse, optimizer, scaler, dtype=torch.float16, max_norm=1.0
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


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _grads(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params]
