"""One step in any precision: overflows, stale gradients, foreign parameters, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.laws.checks import check, check_close, check_equal, check_raises, show
from kit.laws.precisions import DTYPES
from kit.laws.snapshot import Snapshot
from kit.laws.toys import mse
from specs.amp_loop.train_step import BAD, TOLERANCE, norm_of, regression, take_step, true_gradients


class TestPart1TrainStepTraps:
    """Part 1: train_step - one step in any precision"""

    subject = "train_step"

    @pytest.mark.survives
    def test_a_float16_loss_does_not_overflow_the_first_step(self, answer, device):
        """mean() of a float16 output is float16, and 65536 times it is above 65504: infinite."""
        model, batch = regression(device)
        scaler = GradScaler(device.type, init_scale=2.0**16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        result = answer.train_step(
            model, batch, lambda out, _: out.mean(), optimizer, scaler, dtype=torch.float16
        )
        cause = "the loss is computed in float16, and its scaled gradient starts out infinite"
        check_equal(result.skipped, False, "skipped on a harmless problem", cause=cause)
        check_equal(scaler.get_scale(), 2.0**16, "scale after it", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", [math.inf, math.nan], ids=["inf", "nan"])
    def test_one_bad_gradient_of_many_changes_nothing(self, answer, device, bad):
        model, batch = regression(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = GradScaler(device.type, init_scale=1024.0)
        run = {"dtype": torch.float16, "max_norm": 1.0}
        answer.train_step(model, batch, mse, optimizer, scaler, **run)
        before = Snapshot(model, optimizer)

        def spoil(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad[-1] = bad
            return grad

        hook = model[0].bias.register_hook(spoil)
        result = answer.train_step(model, batch, mse, optimizer, scaler, **run)
        hook.remove()
        cause = "the optimizer steps without asking the scaler"
        before.check_unchanged("the overflow", cause=cause, gradients=False)
        check_equal(result.skipped, True, "skipped", cause="the skipped step is not noticed")
        cause = "update() is missing, called twice, or called before step()"
        check_equal(scaler.get_scale(), 512.0, "scale after one overflow", cause=cause)
        result = answer.train_step(model, batch, mse, optimizer, scaler, **run)
        check_equal(result.skipped, False, "skipped at the next step", cause=cause)

    @pytest.mark.survives
    def test_a_huge_but_finite_gradient_is_no_overflow(self, answer, device):
        """Squares of 1e25 leave float32, so the norm is infinite and no gradient is."""
        model, batch = regression(device)
        before = model[0].bias.detach().clone()
        model[0].bias.register_hook(lambda grad: torch.full_like(grad, 1e25))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-20)
        scaler = GradScaler(device.type, init_scale=4.0)
        result = answer.train_step(model, batch, mse, optimizer, scaler, dtype=torch.float16)
        cause = "the norm is taken for the overflow test; ask the scaler whether it skipped"
        check_equal(result.skipped, False, "skipped", cause=cause)
        moved = before - model[0].bias.detach()
        check_close(moved, torch.full_like(moved, 1e5 / 4), "step", rtol=1e-3, cause=cause)

    @pytest.mark.survives
    def test_updates_the_scaler_once_a_step(self, answer, device):
        """With growth_interval 3 the scale doubles after the third step, not before."""
        model, batch = regression(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scaler = GradScaler(device.type, init_scale=64.0, growth_interval=3)
        scales = []
        for _ in range(4):
            answer.train_step(model, batch, mse, optimizer, scaler, dtype=torch.float16)
            scales.append(scaler.get_scale())
        cause = "update() is missing or called twice"
        check_equal(scales, [64.0, 64.0, 128.0, 128.0], "scales after four steps", cause=cause)

    @pytest.mark.survives
    @DTYPES
    def test_ignores_gradients_from_before_the_step(self, answer, device, dtype):
        model, batch = regression(device)
        want = norm_of(true_gradients(model, batch))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1000.0)
        result, _ = take_step(answer, model, batch, dtype)
        cause = "gradients are cleared after the step, or never: the first step has stale ones"
        check_close(result.grad_norm, want, "grad_norm", rtol=TOLERANCE[dtype], cause=cause)

    @pytest.mark.survives
    @DTYPES
    def test_minds_frozen_unused_and_foreign_parameters(self, answer, device, dtype):
        """A frozen and an unused parameter have no gradient; a foreign one stays scaled."""
        model, batch = regression(device)
        model[0].weight.requires_grad_(False)
        unused = nn.Parameter(torch.ones(3, device=device))
        model.register_parameter("unused", unused)
        mine = [model[0].weight, model[0].bias, unused, model[2].bias]  # not model[2].weight
        trained = {"0.bias": model[0].bias, "2.bias": model[2].bias}
        loss = mse(model(batch[0]), batch[1])
        norm = norm_of(dict(enumerate(torch.autograd.grad(loss, list(trained.values())))))
        result, moves = take_step(
            answer, model, batch, dtype, params=mine, max_norm=norm.item() / 2
        )
        cause = "the norm runs over model.parameters(): only the optimizer's are unscaled"
        check_close(result.grad_norm, norm, "grad_norm", rtol=TOLERANCE[dtype], cause=cause)
        moved = {name for name, move in moves.items() if move.any()}
        cause = "parameters that the optimizer does not hold, or without gradient, are stepped"
        check_equal(moved, set(trained), "parameters that moved", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", BAD)
    def test_refuses_bad_input_before_anything_is_changed(self, answer, device, bad):
        model, batch = regression(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mse(model(batch[0]), batch[1]).backward()
        optimizer.step()
        before = Snapshot(model, optimizer)
        options = {"batch": batch, "scaler": GradScaler(device.type), "dtype": torch.float16}
        change, value = BAD[bad]
        options |= change
        shapes = [tuple(part.shape) for part in change.get("batch", ())]
        words = [f"{k}={v}" for k, v in change.items() if k != "batch"]
        words += [f"a batch of shapes {shapes}"] if shapes else []
        data, scaler = options.pop("batch"), options.pop("scaler")
        check_raises(
            lambda: answer.train_step(model, data, mse, optimizer, scaler, **options),
            ValueError,
            mentions=[value] if value else [],
            when=f"for {' and '.join(words)}",
        )
        before.check_unchanged("the refused call", cause="the input is checked too late")

    @pytest.mark.survives
    def test_looks_at_every_parameter_group(self, answer, device):
        model, batch = regression(device)
        norm = norm_of(true_gradients(model, batch))
        optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1} for p in model.parameters()])
        result = answer.train_step(model, batch, mse, optimizer, dtype=torch.float32)
        cause = "only param_groups[0] is looked at"
        check_close(result.grad_norm, norm, "grad_norm over four groups", cause=cause)

    @pytest.mark.survives
    def test_clears_the_gradients_of_all_that_it_trains(self, answer, device):
        """The loss may have a parameter of its own, and the optimizer holds it."""
        model, batch = regression(device)
        shift = nn.Parameter(torch.zeros(5, device=device))
        shift.grad = torch.full_like(shift, 1000.0)
        optimizer = torch.optim.SGD([*model.parameters(), shift], lr=1.0)
        answer.train_step(
            model, batch, lambda out, y: mse(out + shift, y), optimizer, dtype=torch.float32
        )
        check(
            bool((shift.abs() < 100).all()),
            expected="the loss's own parameter stepped without its old gradient of 1000",
            got=show(shift),
            cause="model.zero_grad() knows the model's parameters only",
        )

    @pytest.mark.survives
    def test_does_not_step_a_parameter_that_got_no_gradient(self, answer, device):
        """Weight decay and momentum move one whose old gradient is kept as zeros."""
        model, batch = regression(device)
        unused = nn.Parameter(torch.ones(3, device=device))
        model.register_parameter("unused", unused)
        unused.grad = torch.ones_like(unused)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        answer.train_step(model, batch, mse, optimizer, dtype=torch.float32)
        cause = "zero_grad(set_to_none=False): zeros are a gradient too"
        check_equal(unused.detach(), torch.ones_like(unused).detach(), "unused weight", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_skips_nothing_without_a_scaler(self, answer, device, dtype):
        model, (x, y) = regression(device)
        y[0, 0] = math.inf
        result, moves = take_step(answer, model, (x, y), dtype)
        cause = "an infinite norm is taken for a skipped step"
        check_equal(result.skipped, False, "skipped without a scaler", cause=cause)
        bad = any(not move.isfinite().all() for move in moves.values())
        check(bad, expected="the step taken, infinite as it is", got="no step", cause=cause)

    @pytest.mark.survives
    def test_a_step_of_length_zero_is_not_skipped(self, answer, device):
        """A warm-up starts at learning rate 0; the schedule must get away from it."""
        model, batch = regression(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = GradScaler(device.type, init_scale=4.0)
        result = answer.train_step(model, batch, mse, optimizer, scaler, dtype=torch.float16)
        cause = "skipping is told from weights that did not move"
        check_equal(result.skipped, False, "skipped at learning rate 0", cause=cause)

    @pytest.mark.survives
    def test_leaves_the_inputs_in_float32(self, answer, device):
        """Inputs of 2**20 are infinite in float16; the model brings them down by itself."""

        class Small(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2.0**-20

        model, (x, y) = regression(device)
        model.insert(0, Small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(device.type, init_scale=4.0)
        result = answer.train_step(
            model, (x * 2.0**20, y), mse, optimizer, scaler, dtype=torch.float16
        )
        cause = "inputs are cast by hand; autocast casts where it is safe"
        check_equal(result.skipped, False, "skipped on inputs of 2**20", cause=cause)

    @pytest.mark.survives
    def test_an_error_in_the_model_leaves_autocast_off(self, answer, device):
        model, (x, y) = regression(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        check_raises(
            lambda: answer.train_step(model, (x[:, :4], y), mse, optimizer, dtype=torch.bfloat16),
            RuntimeError,
            when="from the model, for inputs of a wrong width",
        )
        cause = "autocast is entered and left by hand"
        on = torch.is_autocast_enabled(device.type)
        check_equal(on, False, "autocast after the error", cause=cause)

    @pytest.mark.survives
    def test_takes_a_list_for_a_pair_and_a_loss_in_16_bits(self, answer, device):
        """DataLoader gives lists; a loss may end in a matrix product, which autocast narrows."""
        model, batch = regression(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        ones = torch.ones(1, 55, device=device)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return (ones @ (output - target).square().view(55, 1)).sum() / 55

        result = answer.train_step(model, list(batch), loss_fn, optimizer, dtype=torch.bfloat16)
        cause = "the loss is returned in the dtype that it came in"
        check_equal(result.loss.dtype, torch.float32, "dtype of the loss", cause=cause)
