"""An epoch: as with large batches, in three precisions, and the peak of one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from kit.laws.checks import check, check_close, check_equal
from kit.laws.precisions import DTYPES, HALVES
from kit.laws.toys import mse
from kit.laws.trace import Probe
from specs.gradient_accumulation.common import (
    Batch,
    check_vector,
    gradient,
    joined,
    lopsided,
    regression,
    sequence_gradients,
    sequences,
)
from specs.gradient_accumulation.epochs import (
    TOLERANCE,
    Epoch,
    spoil,
    with_large_batches,
)


class TestPart3TrainEpoch:
    subject = "train_epoch"

    @pytest.mark.works
    @DTYPES
    def test_returns_a_result_for_each_window(self, answer, device, dtype):
        """Seven micro-batches, three to a window: the last window has one, and counts."""
        model, batches = regression(device, 3, 5, 2, 4, 1, 6, 2)
        want = mse(model(joined(batches[:3])[0]), joined(batches[:3])[1]).item()
        epoch = Epoch(model, device, dtype)
        results = epoch.run(answer, batches, window=3)
        cause = "the last window is dropped because it is not full, or not every window has one"
        check_equal(len(results), 3, "number of results", cause=cause)
        check_equal(len(epoch.steps), 3, "optimizer steps", cause=cause)
        for result in results:
            for name in ("loss", "grad_norm"):
                value = getattr(result, name)
                check(
                    isinstance(value, Tensor)
                    and value.dtype == torch.float32
                    and value.dim() == 0
                    and not value.requires_grad,
                    expected=f"{name} as a float32 tensor without dimensions and without a graph",
                    got=f"{type(value).__name__} {value}",
                    cause="it is a number, or in 16 bits, or keeps its graph alive",
                )
            check_equal(result.skipped, False, "skipped", cause="a good window is told as skipped")
        cause = "it is scaled still, or not the mean over the window's 10 samples"
        check_close(
            results[0].loss, want, "loss of the first window", rtol=TOLERANCE[dtype], cause=cause
        )

    @pytest.mark.exact
    @pytest.mark.parametrize(
        ("sizes", "window"),
        [
            ((4, 4, 4, 4, 4, 4, 4), 3),
            ((4, 4, 4, 4, 4, 1), 2),
            ((5, 1, 3, 2, 7, 1, 4, 2), 3),
            ((2, 5), 4),
            ((3, 1, 2), 1),
        ],
        ids=["short_last_window", "small_last_micro_batch", "unequal", "one_short", "of_one"],
    )
    def test_an_epoch_is_that_of_large_batches(self, answer, device, sizes, window):
        """Losses, norms and weights, with momentum, clipping and a schedule.

        Frameworks divided a short last window by the full number (Lightning-AI/pytorch-lightning
        #19987), or never stepped on it (timoschick/pet#36).
        """
        model, batches = regression(device, *sizes)
        twin, _ = regression(device)
        epoch, large = Epoch(model, device), Epoch(twin, device)
        want = with_large_batches(large, batches, window, max_norm=2.0)
        results = epoch.run(answer, batches, window, max_norm=2.0)
        cause = "windows are dropped, or joined"
        check_equal(len(results), len(want), "number of windows", cause=cause)
        for number, (result, (loss, norm)) in enumerate(zip(results, want, strict=True), 1):
            cause = "it is not the mean over the samples that this window has, or the windows"
            cause += " before it have stepped otherwise"
            check_close(result.loss, loss, f"loss of window {number}", rtol=1e-5, cause=cause)
            cause = "every window is divided by what a full one has, or by something else"
            check_close(result.grad_norm, norm, f"norm of window {number}", rtol=1e-5, cause=cause)
        check_vector(
            epoch.weights(),
            large.weights(),
            "weights after the epoch",
            guesses={"no step has been taken": epoch.start},
            otherwise="clipping, schedule or step differ from one large batch",
        )

    @pytest.mark.exact
    def test_a_sample_of_an_epoch_counts_once_however_long_it_is(self, answer, device):
        """3, 1 and 2 samples of 2, 9 and 4 places; SGD with lr 1 moves by the gradient."""
        model, batches = sequences(device)
        want, guesses = sequence_gradients(model, batches)
        epoch = Epoch(model, device, lr=1.0, momentum=0.0)
        epoch.run(answer, batches, 3, lopsided)
        check_vector(
            epoch.start - epoch.weights(),
            want,
            "step of SGD with lr 1",
            guesses=guesses,
            otherwise="the weights of the micro-batches are not their shares of the samples",
            rtol=1e-4,
        )

    @pytest.mark.exact
    @HALVES
    def test_runs_each_forward_and_loss_under_autocast(self, answer, device, dtype):
        """And each backward pass outside; the output comes to the loss in float32."""
        probe, loss_autocast, output_dtypes = Probe(), [], []
        model = nn.Sequential(nn.Linear(7, 13), probe, nn.Linear(13, 5)).to(device)
        _, batches = regression(device, 2, 4, 1)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss_autocast.append(torch.is_autocast_enabled(device.type))
            output_dtypes.append(output.dtype)
            return mse(output, target)

        Epoch(model, device, dtype).run(answer, batches, 2, loss_fn)
        cause = "autocast has no, or another, dtype, or ends before the last micro-batch"
        dtypes = [seen for _, seen, *_ in probe.forwards]
        check_equal(dtypes, [dtype] * 3, "dtypes inside the model", cause=cause)
        cause = "the loss is outside the autocast block"
        check_equal(loss_autocast, [True] * 3, "autocast during the loss", cause=cause)
        cause = "the output goes to the loss in 16 bits"
        check_equal(output_dtypes, [torch.float32] * 3, "dtypes of the output", cause=cause)
        check_equal(
            [under for _, under in probe.backwards],
            [False] * 3,
            "autocast during the backward passes",
            cause="backward() is inside the autocast block",
        )
        dtypes = {p.dtype for p in model.parameters()}
        check_equal(dtypes, {torch.float32}, "dtypes of the weights", cause="the model is cast")

    @pytest.mark.exact
    @DTYPES
    @pytest.mark.parametrize("part", [0.3, 3.0, math.inf], ids=["longer", "shorter", "endless"])
    def test_clips_the_windows_true_gradient_once(self, answer, device, dtype, part):
        """N is the norm of the whole window's gradient, and is what is returned.

        SGD with lr 1 moves by the gradient: by 0.3 N if max_norm is 0.3 N, by all of it if max_norm
        is 3 N or infinite.
        """
        model, batches = regression(device, 4, 1, 6)
        x, y = joined(batches)
        want = gradient(model, mse(model(x), y))
        norm = want.norm().item()
        epoch = Epoch(model, device, dtype, lr=1.0, momentum=0.0)
        (result,) = epoch.run(answer, batches, 3, max_norm=part * norm)
        ratio = result.grad_norm.item() / norm
        cause = "it is the norm of one micro-batch, or of clipped gradients, or a sum of norms"
        if 60 < ratio < 68:
            cause = "the norm is taken before unscale_: it is 64 times the true one"
        rtol = TOLERANCE[dtype]
        check_close(result.grad_norm, norm, "grad_norm of the window", rtol=rtol, cause=cause)
        check_vector(
            epoch.start - epoch.weights(),
            want * min(part, 1.0),
            f"step of SGD with lr 1 and max_norm = {part} N",
            guesses={"gradients are not clipped": want},
            otherwise="clipped are scaled gradients, or each micro-batch's, or short ones too",
            rtol=max(rtol, 1e-4),
        )

    @pytest.mark.exact
    def test_updates_the_scale_once_a_window(self, answer, device):
        """growth_interval=2: it doubles after the second window of three, not in its middle.

        The scale is read whenever a micro-batch is asked for.
        """
        model, batches = regression(device, *[2] * 10)
        epoch = Epoch(model, device, torch.float16, lr=1e-4, growth_interval=2)
        scales = []

        def data() -> Iterator[Batch]:
            for batch in batches:
                scales.append(epoch.scaler.get_scale())
                yield batch

        results = epoch.run(answer, data(), window=3)
        want = [64.0] * 6 + [128.0] * 4
        cause = "update() is missing, or is called for every micro-batch, or twice"
        check_equal(scales, want, "scale at each micro-batch", cause=cause)
        check_equal(epoch.scaler.get_scale(), 256.0, "scale after four windows", cause=cause)
        skipped = [result.skipped for result in results]
        cause = "a scale that grows is taken for one that falls"
        check_equal(skipped, [False] * 4, "skipped windows", cause=cause)

    @pytest.mark.exact
    @DTYPES
    def test_the_schedule_advances_once_for_each_step_taken(self, answer, device, dtype):
        """Seven micro-batches in windows of two; in float16 one of the second window overflows.

        A schedule that advances with every micro-batch ends `window` times too early
        (huggingface/accelerate#963).
        """
        model, batches = regression(device, *[2] * 7)
        epoch = Epoch(model, device, dtype, lr=0.01)
        handle = spoil(model[0].bias, at=3) if dtype == torch.float16 else None
        results = epoch.run(answer, batches, window=2)
        if handle:
            handle.remove()
        skipped = [result.skipped for result in results]
        want = [False, dtype == torch.float16, False, False]
        check_equal(skipped, want, "skipped windows", cause="an overflow is not told, or is made")
        steps = 3 if dtype == torch.float16 else 4
        cause = "it advances for every micro-batch, or after a skipped window, or not at the last"
        check_close(epoch.rate(), 0.01 * 0.5**steps, f"rate after {steps} steps", cause=cause)

    @pytest.mark.exact
    @pytest.mark.parametrize(
        ("lr", "size", "new_size", "rule", "want"),
        [
            (0.1, 256, 8192, "linear", 3.2),
            (3e-4, 256, 4096, "sqrt", 1.2e-3),
            (0.4, 12, 3, "linear", 0.1),
            (0.4, 12, 3, "sqrt", 0.2),
            (0.3, 6, 10, "linear", 0.5),
            (0.7, 1, 1, "sqrt", 0.7),
        ],
        ids=["goyal", "adam", "smaller", "smaller_sqrt", "no_multiple", "same"],
    )
    def test_scaled_lr_follows_its_rule(self, answer, lr, size, new_size, rule, want):
        """linear: lr n / b (Goyal et al.: 0.1 for 256 is 3.2 for 8192); sqrt: lr sqrt(n / b)."""
        got = answer.scaled_lr(lr, size, new_size, rule=rule)
        what = f"{rule} rate from {lr} at {size} to {new_size}"
        cause = "the ratio is upside down or whole numbers only, or the rules are exchanged"
        check_close(got, want, what, rtol=1e-9, cause=cause)
