"""An epoch: options that are refused, and an epoch of nothing."""

from __future__ import annotations

import math

import pytest
import torch

from kit.laws.checks import check_equal, check_raises
from kit.laws.snapshot import Snapshot
from kit.laws.toys import mse
from specs.gradient_accumulation.common import regression
from specs.gradient_accumulation.epochs import Epoch

# What is passed, and a part of the value that the message must hold.
BAD = {
    "window_zero": ({"window": 0}, "0"),
    "window_negative": ({"window": -3}, "-3"),
    "dtype": ({"dtype": torch.float64, "scaler": None}, "float64"),
    "no_scaler": ({"scaler": None}, ""),
    "scaler_for_bf16": ({"dtype": torch.bfloat16}, ""),
    "scaler_for_fp32": ({"dtype": torch.float32}, ""),
    "max_norm": ({"max_norm": -2.5}, "-2.5"),
    "zero_norm": ({"max_norm": 0.0}, "0"),
    "nan_norm": ({"max_norm": math.nan}, "nan"),
}


class TestPart3TrainEpochRefusals:
    subject = "train_epoch"

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", BAD)
    def test_refuses_bad_options_before_anything_is_changed(self, answer, device, bad):
        """Nor is a micro-batch taken from the iterator."""
        model, batches = regression(device, 3, 2)
        epoch = Epoch(model, device, torch.float16)
        mse(model(batches[0][0]), batches[0][1]).backward()
        epoch.optimizer.step()
        before, data = Snapshot(model, epoch.optimizer), iter(batches)
        options = {"window": 2, "scaler": epoch.scaler, "dtype": torch.float16}
        change, value = BAD[bad]
        options |= change
        check_raises(
            lambda: answer.train_epoch(model, data, mse, epoch.optimizer, **options),
            ValueError,
            mentions=[value] if value else [],
            when=f"for {' and '.join(f'{k}={v}' for k, v in options.items() if k in change)}",
        )
        before.check_unchanged("the refused call", cause="the options are checked too late")
        cause = "the options are checked when micro-batches have been read"
        check_equal(len(list(data)), 2, "micro-batches left in the iterator", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("kind", ["list", "iterator"])
    def test_refuses_an_epoch_without_micro_batches(self, answer, device, kind):
        """The second epoch over an iterator is the usual one: it was read to its end."""
        model, batches = regression(device, 3, 2)
        epoch = Epoch(model, device)
        data = iter(batches) if kind == "iterator" else []
        if kind == "iterator":
            epoch.run(answer, data, window=2)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = Snapshot(model, epoch.optimizer)
        check_raises(
            lambda: epoch.run(answer, data, window=2),
            ValueError,
            mentions=["0"],
            when="for 0 micro-batches",
        )
        before.check_unchanged("the refused call", cause="an empty window steps")

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("change", "value"),
        [
            ({"rule": "cubic"}, "cubic"),
            ({"rule": "square"}, "square"),
            ({"lr": 0.0}, "0"),
            ({"lr": -0.1}, "-0.1"),
            ({"lr": math.nan}, "nan"),
            ({"batch_size": 0}, "0"),
            ({"new_batch_size": -4}, "-4"),
        ],
        ids=[
            "rule",
            "another_rule",
            "lr_zero",
            "lr_negative",
            "lr_nan",
            "batch_size",
            "new_batch_size",
        ],
    )
    def test_scaled_lr_refuses_what_has_no_meaning(self, answer, change, value):
        options = {"lr": 0.1, "batch_size": 4, "new_batch_size": 8, "rule": "linear"} | change
        rule = options.pop("rule")
        check_raises(
            lambda: answer.scaled_lr(*options.values(), rule=rule),
            ValueError,
            mentions=[value],
            when=f"for {' and '.join(f'{k}={v}' for k, v in change.items())}",
        )
