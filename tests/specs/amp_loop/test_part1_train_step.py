"""One step in any precision: dtypes seen inside the model, true gradients, bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kit.ruler import bytes_of, measure
from kit.snapshot import Snapshot
from kit.toys import mlp
from kit.verdict import check, check_bar, check_close, check_equal, check_raises, show

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
# Rounding of one 16-bit operation; sums of a few hundred products stay within four of them.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


# What is passed, and a part of the value that the message must hold.
BAD = {
    "dtype": ({"dtype": torch.float64, "scaler": None}, "float64"),
    "no_scaler": ({"dtype": torch.float16, "scaler": None}, ""),
    "stray_scaler": ({"dtype": torch.bfloat16}, ""),
    "max_norm": ({"max_norm": -2.5}, "-2.5"),
    "zero_norm": ({"max_norm": 0.0}, "0"),
    "nan_norm": ({"max_norm": math.nan}, "nan"),
    "triple": ({"batch": (torch.ones(2, 7), torch.ones(2, 5), torch.ones(2))}, ""),
    "empty": ({"batch": (torch.ones(0, 7), torch.ones(0, 5))}, "0"),
    "more_inputs": ({"batch": (torch.ones(6, 7), torch.ones(1, 5))}, "6"),
    "more_targets": ({"batch": (torch.ones(1, 7), torch.ones(6, 5))}, "6"),
}


def scaler_for(dtype: torch.dtype, device: torch.device, **options: float) -> GradScaler | None:
    return GradScaler(device.type, **options) if dtype == torch.float16 else None


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def regression(device: torch.device) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """A small model and a batch (11 rows) on which it is far off, so that gradients are large."""
    torch.manual_seed(3)
    model = mlp(7, 13, 5, device=device)
    return model, (torch.randn(11, 7, device=device), 4 * torch.randn(11, 5, device=device))


def true_gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The gradients of the float32 loss; the model's own are left as they were."""
    names = [name for name, _ in model.named_parameters()]
    loss = mse(model(batch[0]), batch[1])
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def norm_of(tensors: dict[Any, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()]).norm()


def take_step(answer, model, batch, dtype, *, params=None, **options):
    """The result of one step of SGD with lr 1, and by how much each parameter went down."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(params or model.parameters(), lr=1.0)
    scaler = scaler_for(dtype, batch[0].device)
    result = answer.train_step(model, batch, mse, optimizer, scaler, dtype=dtype, **options)
    return result, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def check_norm(got: Tensor | float, want: Tensor, dtype: torch.dtype) -> None:
    """Fail unless `got` is the true norm before clipping; say how many times too long it is."""
    __tracebackhide__ = True
    ratio = float(got) / want.item()
    cause = "it is the norm of clipped, or not of all, gradients"
    if ratio > 2:
        cause = f"it is {ratio:.0f} times the true norm; before unscale_ it is 65536 times"
    check_close(got, want, "grad_norm, before clipping", rtol=TOLERANCE[dtype], cause=cause)


class Probe(nn.Module):
    """Passes its input through and notes what it sees on the way forward and back."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.backward_under_autocast: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.append(x.dtype)
        x = x * 1
        device = x.device.type
        x.register_hook(
            lambda grad: self.backward_under_autocast.append(torch.is_autocast_enabled(device))
        )
        return x


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
        check(not still, expected="every weight moved", got=f"{still} did not", cause="no step")
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
            batch = torch.randn(rows, 24, device=device), torch.randn(rows, 8, device=device)
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
            batch = torch.randn(9, 64, device=device), torch.randn(9, 32, device=device)
            scaler = scaler_for(dtype, device)
            reading = measure(
                lambda: module.train_step(model, batch, mse, optimizer, scaler, dtype=dtype),
                device,
                known=[model, optimizer, *batch],
            )
            return bytes_of(model) + reading.retained - bytes_of(*_grads(model))

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


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
