"""An epoch: the peak of one micro-batch, whatever the window, the precision and the length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_bar
from kit.laws.precisions import DTYPES, scaler_for
from kit.laws.toys import mlp, mse
from kit.memory.ruler import measure
from specs.gradient_accumulation.common import (
    Batch,
    deep_model,
    gradient_bytes,
    joined,
    one_micro_batch,
)


class TestPart3TrainEpochMemory:
    subject = "train_epoch"

    @pytest.mark.saves
    @DTYPES
    def test_every_window_of_an_epoch_peaks_as_one_micro_batch(
        self, answer, reference, device, dtype
    ):
        """Peak of windows of 2 and of 5 <= 1.05 x one micro-batch's in that precision.

        One set of gradients is in both. Autocast's 16-bit copies of the weights are made for one
        forward pass, and go with its graph.
        """

        def peak(module: object, window: int) -> int:
            model, batches = deep_model(device, window)
            return peak_of(module, model, batches, window, dtype)

        model, batches = deep_model(device, 5)
        check_bar(
            "higher peak of windows of 2 and 5",
            max(peak(answer, 2), peak(answer, 5)),
            1.05 * one_micro_batch(model, batches[1], mse, dtype),
            plain=one_micro_batch(model, joined(batches), mse, dtype),
            reference=peak(reference, 5),
            formula="1.05 x one micro-batch and its gradients; plain is the full batch of 5",
            cause="graphs, outputs or gradients are kept for each micro-batch",
        )

    @pytest.mark.saves
    def test_the_peak_does_not_grow_with_the_number_of_windows(self, answer, reference, device):
        """Twelve windows <= 1.05 x two. Micro-batches are made as they are asked for."""

        def peak(module: object, windows: int) -> int:
            model, _ = deep_model(device, 1)

            def data() -> Iterator[Batch]:
                for _ in range(2 * windows):
                    yield torch.ones(256, 24, device=device), torch.ones(256, 8, device=device)

            return peak_of(module, model, data(), 2, torch.float32)

        two, one_window = peak(answer, 2), 2 * 256 * (24 + 8) * 4
        check_bar(
            "peak of twelve windows above the baseline",
            peak(answer, 12),
            1.05 * two,
            plain=two + 10 * one_window,
            reference=peak(reference, 12),
            formula="1.05 x the peak of two windows; plain keeps the data of ten more",
            cause="micro-batches are all fetched first or kept, or something else of each window",
        )

    @pytest.mark.saves
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
    def test_an_epoch_holds_one_set_of_gradients(self, answer, reference, device, dtype):
        """Where gradients G are nearly all: peak <= one micro-batch's + G / 4, clipping included.

        24 weights of 64 x 64 and three rows, so that a copy of one gradient, in float64 too, fits
        into G / 4. A buffer for unscaled gradients would add G.
        """

        def peak(module: object) -> int:
            return peak_of(module, *setup(), 5, dtype)

        def setup() -> tuple[nn.Module, list[Batch]]:
            data = draw.randn(5, 3, 64, device=device)
            return mlp(*[64] * 25, device=device), [(x, x) for x in data]

        model, batches = setup()
        one, gradients = one_micro_batch(model, batches[1], mse, dtype), gradient_bytes(model)
        check_bar(
            "peak of a window of 5 above its baseline",
            peak(answer),
            one + gradients / 4,
            plain=one + gradients,
            reference=peak(reference),
            formula="one micro-batch and its gradients + G / 4; plain has a second set",
            cause="gradients are copied: to add them up, to unscale them, or for their norm",
        )


def peak_of(
    module: object, model: nn.Module, batches: object, window: int, dtype: torch.dtype
) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    device = next(model.parameters()).device
    options = {"dtype": dtype, "scaler": scaler_for(dtype, device), "max_norm": 1.0}
    reading = measure(
        lambda: module.train_epoch(model, batches, mse, optimizer, window=window, **options),
        device,
        known=[model, batches] if isinstance(batches, list) else [model],
    )
    return reading.above_baseline
