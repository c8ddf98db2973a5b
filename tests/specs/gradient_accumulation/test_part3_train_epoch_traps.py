"""An epoch: overflows, data that comes lazily, errors in the middle of a window, bad input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from kit.snapshot import Snapshot
from kit.verdict import check, check_close, check_equal, check_raises, show
from specs.amp_loop.common import DTYPES
from specs.gradient_accumulation.common import (
    Batch,
    check_no_gradients,
    check_vector,
    gradient,
    joined,
    mse,
    regression,
)
from specs.gradient_accumulation.epochs import TOLERANCE, Epoch, scaler_for, spoil

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


class TestPart3TrainEpochTraps:
    """Part 3: train_epoch and scaled_lr - windows one after another, in any precision"""

    subject = "train_epoch"

    @pytest.mark.survives
    @pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
    def test_an_overflow_in_any_micro_batch_skips_the_window(self, answer, device, place):
        """One element of one gradient, in the second window of three; the third is clean again."""
        model, batches = regression(device, 2, 3, 1, 4, 2, 2, 3, 1, 2)
        twin, _ = regression(device)
        epoch = Epoch(model, device, torch.float16)
        handle = spoil(model[0].bias, at=3 + place)
        results = epoch.run(answer, batches, window=3, max_norm=1.0)
        handle.remove()
        clean = Epoch(twin, device, torch.float16)
        clean.run(answer, batches[:3] + batches[6:], window=3, max_norm=1.0)
        cause = "the bad window has stepped, or parts of it; or it reaches into the next one"
        check_equal(len(epoch.steps), 2, "steps taken in three windows", cause=cause)
        skipped = [result.skipped for result in results]
        cause = "the skipped window is not noticed"
        check_equal(skipped, [False, True, False], "skipped windows", cause=cause)
        cause = "update() is missing, or the scale falls more than once for the window"
        check_equal(epoch.scaler.get_scale(), 32.0, "scale after one overflow", cause=cause)
        check_vector(
            epoch.weights(),
            clean.weights(),
            "weights, as without the second window",
            guesses={"no step has been taken": epoch.start},
            otherwise="something of the skipped window is in the next one, or in the momentum",
            rtol=1e-3,
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("count", [6, 7])
    def test_takes_no_micro_batch_of_the_next_window_before_the_step(self, answer, device, count):
        """When micro-batch n is asked for, from 0, n // window steps have been taken.

        So data may be endless, or be made with the weights of the moment.
        """
        model, batches = regression(device, *[2] * count)
        epoch, steps = Epoch(model, device, lr=1e-3), []

        def data() -> Iterator[Batch]:
            for batch in batches:
                steps.append(len(epoch.steps))
                yield batch
            steps.append(len(epoch.steps))

        epoch.run(answer, data(), window=3)
        want = [number // 3 for number in range(count + 1)]
        cause = "micro-batches are read ahead: all of them, or one, to know whether it is the last"
        check_equal(steps, want, "steps taken at each request", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("where", ["nowhere", "data", "model", "loss"])
    def test_leaves_nothing_of_an_unfinished_window(self, answer, device, where):
        """An error at micro-batch 4 of windows of 2: one window counts, and no gradient is left.

        The epoch after it sees its own gradients only.
        """
        model, batches = regression(device, 3, 1, 2, 4)
        epoch = Epoch(model, device, torch.float16)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        calls = {"model": 0, "loss": 0, "data": 0}

        def visit(place: str) -> None:
            calls[place] += 1
            if place == where and calls[place] == 4:
                raise OSError("at the fourth")

        def data() -> Iterator[Batch]:
            for batch in batches:
                visit("data")
                yield batch

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            visit("loss")
            return mse(output, target)

        hook = model.register_forward_pre_hook(lambda *_: visit("model"))
        if where == "nowhere":
            epoch.run(answer, data(), 2, loss_fn)
        else:
            call = lambda: epoch.run(answer, data(), 2, loss_fn)  # noqa: E731
            check_raises(call, OSError, when=f"which is what the {where} raised")
        hook.remove()
        cause = "gradients are cleared before a window only: after the last, or an error, they stay"
        check_no_gradients(model, cause)
        on = torch.is_autocast_enabled(device.type)
        check_equal(on, False, "autocast", cause="autocast is entered and left by hand")
        steps = 2 if where == "nowhere" else 1
        cause = "the unfinished window has stepped, or the finished one has not"
        check_equal(len(epoch.steps), steps, "steps taken", cause=cause)
        check_close(epoch.rate(), 0.02 * 0.5**steps, "rate afterwards", cause=cause)
        want = gradient(model, mse(model(batches[1][0]), batches[1][1])).norm()
        (result,) = epoch.run(answer, batches[1:2], 2)
        cause = "gradients of the epoch before are in it"
        check_close(result.grad_norm, want, "norm in the next epoch", rtol=1e-2, cause=cause)

    @pytest.mark.survives
    def test_a_bad_micro_batch_ends_the_epoch_before_its_window(self, answer, device):
        """The last of the second window has 4 inputs and 9 targets: the first window counts."""
        model, batches = regression(device, 3, 1, 2, 4)
        twin, _ = regression(device)
        epoch, short = Epoch(model, device), Epoch(twin, device)
        short.run(answer, batches[:2], window=2)
        batches[3] = (batches[3][0], torch.ones(9, 5, device=device))
        check_raises(
            lambda: epoch.run(answer, batches, window=2),
            ValueError,
            mentions=["4", "9"],
            when="for a micro-batch of 4 inputs and 9 targets",
        )
        cause = "bad micro-batches are looked for before the first step, or passed over"
        check_vector(
            epoch.weights(),
            short.weights(),
            "weights after the one good window",
            guesses={"no step has been taken": epoch.start},
            otherwise=cause,
        )
        check_no_gradients(model, "the window's good micro-batches have left their gradients")

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
        before = Snapshot(model, epoch.optimizer)
        check_raises(
            lambda: epoch.run(answer, data, window=2),
            ValueError,
            mentions=["0"],
            when="for 0 micro-batches",
        )
        before.check_unchanged("the refused call", cause="an empty window steps")

    @pytest.mark.survives
    @DTYPES
    def test_minds_frozen_unused_and_foreign_parameters(self, answer, device, dtype):
        """The norm and the step are over what the optimizer holds, in two groups."""
        model, batches = regression(device, 4, 1, 2)
        model[0].weight.requires_grad_(False)
        unused = nn.Parameter(torch.ones(3, device=device))
        unused.grad = torch.ones_like(unused)  # stale, and weight decay would move it
        x, y = joined(batches)
        mine = [model[0].bias, model[2].bias]  # not model[2].weight
        want = torch.cat(torch.autograd.grad(mse(model(x), y), mine)).norm()
        before = [p.detach().clone() for p in (model[2].weight, unused, *mine)]
        optimizer = torch.optim.SGD(
            [{"params": [model[0].weight, mine[0], unused]}, {"params": mine[1:]}],
            lr=0.1,
            weight_decay=0.5,
        )
        scaler = scaler_for(dtype, device)
        (result,) = answer.train_epoch(
            model, batches, mse, optimizer, window=3, dtype=dtype, scaler=scaler, max_norm=1.0
        )
        cause = "stale gradients are in it, or those of other parameters, or of one group only"
        check_close(result.grad_norm, want, "grad_norm", rtol=TOLERANCE[dtype], cause=cause)
        moved = [
            not torch.equal(old, p)
            for old, p in zip(before, (model[2].weight, unused, *mine), strict=True)
        ]
        cause = "a parameter without gradient or of another owner is stepped, or a group is not"
        want_moved = [False, False, True, True]
        check_equal(moved, want_moved, "foreign, unused and own weights moved", cause=cause)

    @pytest.mark.survives
    def test_the_float16_loss_of_a_window_does_not_overflow(self, answer, device):
        """mean() of a float16 output is float16, and 65536 times it is above 65504: infinite."""
        model, batches = regression(device, 2, 3)
        epoch = Epoch(model, device, torch.float16, init_scale=2.0**16)
        (result,) = epoch.run(answer, batches[:1], 2, lambda out, _: out.mean())
        cause = "the loss is computed in float16, and its scaled gradient starts out infinite"
        check_equal(result.skipped, False, "skipped on a harmless problem", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("case", ["huge_gradient", "rate_zero", "no_scaler"])
    def test_tells_skipped_from_the_scaler_alone(self, answer, device, case):
        """Not from an infinite norm (squares of 1e25 leave float32), nor from weights at rest."""
        model, batches = regression(device, 2, 3)
        dtype = torch.float32 if case == "no_scaler" else torch.float16
        epoch = Epoch(model, device, dtype, lr=0.0 if case == "rate_zero" else 1e-20)
        huge = {"huge_gradient": 1e25, "no_scaler": math.inf}.get(case)
        if huge:
            model[0].bias.register_hook(lambda grad: torch.full_like(grad, huge))
        (result,) = epoch.run(answer, batches, 2)
        cause = "ask the scaler whether it skipped: norm and weights do not tell"
        check_equal(result.skipped, False, "skipped", cause=cause)
        check_equal(len(epoch.steps), 1, "steps taken", cause=cause)
        if case != "no_scaler":
            finite = bool(epoch.weights().isfinite().all())
            cause = "max_norm is None, and gradients are clipped to something: inf / inf is nan"
            check(finite, expected="finite weights", got=show(epoch.weights()), cause=cause)

    @pytest.mark.survives
    def test_each_micro_batch_of_an_epoch_runs_once_and_may_be_a_list(self, answer, device):
        model, batches = regression(device, 4, 2, 3)
        seen: list[int] = []
        model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        Epoch(model, device).run(answer, ([x, y] for x, y in batches), window=2)
        cause = "a forward pass too many, or micro-batches are joined or left out"
        check_equal(seen, [4, 2, 3], "samples of each forward pass", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize(
        ("change", "value"),
        [
            ({"rule": "cubic"}, "cubic"),
            ({"lr": 0.0}, "0"),
            ({"lr": -0.1}, "-0.1"),
            ({"lr": math.nan}, "nan"),
            ({"batch_size": 0}, "0"),
            ({"new_batch_size": -4}, "-4"),
        ],
        ids=["rule", "lr_zero", "lr_negative", "lr_nan", "batch_size", "new_batch_size"],
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
