"""One step in any precision: dtypes seen inside the model, true gradients, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_close, check_equal
from kit.laws.precisions import DTYPES, HALVES, scaler_for
from kit.laws.toys import Probe, mlp, mse
from kit.memory.ruler import bytes_of, measure
from specs.amp_loop.common import grads_of
from specs.amp_loop.train_step import (
    TOLERANCE,
    check_norm,
    norm_of,
    regression,
    take_step,
    true_gradients,
)


class TestPart1TrainStep:
    """Part 1: train_step - one step in any precision"""

    subject = "train_step"

    @pytest.mark.works
    @DTYPES
    def test_moves_every_weight_and_returns_the_true_loss(self, answer, device, dtype):
        model, batch = regression(device)
        want = mse(model(batch[0]), batch[1]).detach()
        result, moves = take_step(answer, model, batch, dtype)
        still = [name for name, move in moves.items() if not move.any()]
        check(
            not still,
            expected="every weight moved",
            got=f"{still} did not",
            cause="the optimizer does not step, or skips what it should not",
        )
        check(
            isinstance(result.loss, Tensor) and result.loss.dtype == torch.float32,
            expected="the loss as a float32 tensor",
            got=getattr(result.loss, "dtype", type(result.loss)),
            cause="the loss is computed in 16 bits, or turned into a number",
        )
        cause = "the loss is still multiplied by the scale, or comes from after the step"
        check_close(result.loss, want, "loss", rtol=TOLERANCE[dtype], cause=cause)
        check(
            not result.loss.requires_grad,
            expected="a loss without a graph",
            got="a loss that requires_grad",
            cause="a loss that is kept with its graph keeps the graph alive: detach it",
        )
        check_equal(result.skipped, False, "skipped", cause="a good step is told as skipped")
        norm = result.grad_norm
        check(
            isinstance(norm, Tensor) and norm.dtype == torch.float32 and norm.dim() == 0,
            expected="grad_norm as a float32 tensor without dimensions",
            got=f"{type(norm).__name__} {getattr(norm, 'dtype', '')}",
            cause="it is turned into a number, which waits for the device, or another dtype",
        )

    @pytest.mark.exact
    def test_in_float32_it_is_the_plain_loop(self, answer, device):
        model, batch = regression(device)
        want = true_gradients(model, batch)
        _, moves = take_step(answer, model, batch, torch.float32)
        for name, move in moves.items():
            cause = "autocast is on in float32, or the gradients are changed"
            check_close(move, want[name], f"step of {name}", atol=1e-5, cause=cause)

    @pytest.mark.exact
    @HALVES
    def test_runs_forward_and_loss_under_autocast_and_backward_outside(self, answer, device, dtype):
        probe, loss_autocast, output_dtypes = Probe(), [], []
        model = nn.Sequential(nn.Linear(7, 13), probe, nn.Linear(13, 5)).to(device)
        _, batch = regression(device)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss_autocast.append(torch.is_autocast_enabled(device.type))
            output_dtypes.append(output.dtype)
            return mse(output, target)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answer.train_step(model, batch, loss_fn, optimizer, scaler_for(dtype, device), dtype=dtype)
        check_equal(
            probe.dtypes,
            [dtype],
            "dtypes inside the model",
            cause="autocast has no, or another, dtype",
        )
        cause = "the loss is outside the autocast block"
        check_equal(loss_autocast, [True], "autocast during the loss", cause=cause)
        cause = "the output goes to the loss in 16 bits"
        check_equal(output_dtypes, [torch.float32], "dtype of the output in the loss", cause=cause)
        check_equal(
            probe.backward_under_autocast,
            [False],
            "autocast during the backward pass",
            cause="backward() is inside the autocast block",
        )

    @pytest.mark.exact
    @HALVES
    def test_keeps_weights_gradients_and_optimizer_state_in_float32(self, answer, device, dtype):
        model, batch = regression(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        answer.train_step(model, batch, mse, optimizer, scaler_for(dtype, device), dtype=dtype)
        held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        held += [t for state in optimizer.state.values() for t in state.values()]
        check_equal(
            {t.dtype for t in held},
            {torch.float32},
            "dtypes of weights, gradients and optimizer state",
            cause="the model is cast, not autocast: small updates are lost in 16 bits",
        )

    @pytest.mark.exact
    @DTYPES
    def test_steps_with_the_true_gradients(self, answer, device, dtype):
        """SGD with lr 1 moves by the gradient itself, so the gradient can be read off the move."""
        model, batch = regression(device)
        want = true_gradients(model, batch)
        result, moves = take_step(answer, model, batch, dtype)
        error = norm_of({n: move - want[n] for n, move in moves.items()}) / norm_of(want)
        check(
            bool(error <= TOLERANCE[dtype]),
            expected=f"a step along the true gradients (within {TOLERANCE[dtype]:.2g})",
            got=f"a step that is off by {error.item():.2g} of their length",
            cause="gradients are scaled still, divided twice, or clipped though max_norm is None",
        )
        check_norm(result.grad_norm, norm_of(want), dtype)

    @pytest.mark.exact
    @DTYPES
    def test_clips_the_true_gradients_not_the_scaled_ones(self, answer, device, dtype):
        """|step| = max_norm where the true norm N is above it, and N is what is returned."""
        model, batch = regression(device)
        norm = norm_of(true_gradients(model, batch))
        max_norm = norm.item() / 3
        result, moves = take_step(answer, model, batch, dtype, max_norm=max_norm)
        cause = "clipping ran before unscale_, so the scaled gradients were cut to max_norm"
        length = norm_of(moves)
        check_close(length, max_norm, "length of the clipped step", rtol=1e-4, cause=cause)
        check_norm(result.grad_norm, norm, dtype)

    @pytest.mark.exact
    @DTYPES
    def test_leaves_gradients_shorter_than_max_norm_alone(self, answer, device, dtype):
        model, batch = regression(device)
        norm = norm_of(true_gradients(model, batch))
        _, moves = take_step(answer, model, batch, dtype, max_norm=3 * norm.item())
        cause = "gradients are scaled to max_norm, not clipped; or scaled ones are clipped"
        length = norm_of(moves)
        check_close(length, norm, "length of the step", rtol=TOLERANCE[dtype], cause=cause)

    @pytest.mark.saves
    @HALVES
    def test_holds_activations_in_sixteen_bits(self, answer, reference, device, dtype):
        """Activations halve; float32 gradients stay, and 16-bit copies of the weights come on top.

        R = 1024 rows and four hidden layers of 96 make A = 4 * R * 4 * 96 = 1.57 MB of activations
        against W = 0.12 MB of weights. At the peak the backward pass has one more layer in flight:
        float32 takes 5/4 A + W, 16 bits half of that 5/4 A and W + W/2. That is 0.55 of it, and the
        bar is 0.60.
        """
        widths = (24, 96, 96, 96, 96, 8)
        rows = 1024 if device.type == "cpu" else 16 * 1024

        def peak(module: object, dtype: torch.dtype) -> int:
            model = mlp(*widths, device=device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            batch = draw.randn(rows, 24, device=device), draw.randn(rows, 8, device=device)
            scaler = scaler_for(dtype, device)

            def step() -> None:
                module.train_step(model, batch, mse, optimizer, scaler, dtype=dtype)

            return measure(step, device, known=[model, optimizer, *batch]).above_baseline

        plain = peak(reference, torch.float32)
        check_bar(
            "peak of a step above its baseline",
            peak(answer, dtype),
            0.60 * plain,
            plain=plain,
            reference=peak(reference, dtype),
            formula="0.60 x the float32 step",
            cause="activations are kept in float32, or in both precisions",
        )

    @pytest.mark.saves
    @HALVES
    def test_leaves_the_bytes_of_state_as_they_are(self, answer, reference, device, dtype):
        """Weights, gradients and Adam's moments are 16 bytes a parameter, with AMP and without."""

        def state(module: object, dtype: torch.dtype) -> int:
            model = mlp(64, 96, 32, device=device)
            optimizer = torch.optim.Adam(model.parameters())
            batch = draw.randn(9, 64, device=device), draw.randn(9, 32, device=device)
            scaler = scaler_for(dtype, device)
            reading = measure(
                lambda: module.train_step(model, batch, mse, optimizer, scaler, dtype=dtype),
                device,
                known=[model, optimizer, *batch],
            )
            return bytes_of(model) + reading.retained - bytes_of(*grads_of(model.parameters()))

        plain = state(reference, torch.float32)
        # A scaler holds a few scalars of 512 bytes; a 16-bit copy of the weights would be 12 %.
        check_bar(
            "weights, gradients and optimizer state",
            state(answer, dtype),
            1.05 * plain,
            plain=plain,
            reference=state(reference, dtype),
            formula="what float32 holds + 5 %",
            cause="a second copy of the weights is kept, or of the gradients",
        )
