"""An epoch: overflows, data that comes lazily, errors in the middle of a window."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from kit.laws.checks import check, check_close, check_equal, check_raises, show
from kit.laws.precisions import DTYPES, scaler_for
from kit.laws.toys import mse
from specs.gradient_accumulation.common import (
    Batch,
    bad_batch,
    check_no_gradients,
    check_vector,
    flat,
    gradient,
    joined,
    regression,
)
from specs.gradient_accumulation.epochs import TOLERANCE, Epoch, spoil

# The last micro-batch, and what the message must hold of its lengths.
BAD_BATCHES = {
    "lengths": ((torch.ones(4, 7), torch.ones(9, 5)), ["4", "9"]),
    "empty": ((torch.ones(0, 7), torch.ones(0, 5)), ["0"]),
    "triple": ((torch.ones(2, 7), torch.ones(2, 5), torch.ones(2)), []),
    "one_tensor": (torch.ones(2, 7), []),
}


class TestPart3TrainEpochTraps:
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
        norm = results[1].grad_norm
        cause = "the norm of the true gradient is inf or nan: it has an infinite element"
        check(not norm.isfinite(), expected="no finite norm for it", got=norm.item(), cause=cause)
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
    @pytest.mark.parametrize("bad", BAD_BATCHES)
    def test_a_bad_micro_batch_ends_the_epoch_before_its_window(self, answer, device, bad):
        """It is the last of the second window: the first window counts."""
        model, batches = regression(device, 3, 1, 2, 4)
        twin, _ = regression(device)
        epoch, short = Epoch(model, device), Epoch(twin, device)
        short.run(answer, batches[:2], window=2)
        parts, lengths = BAD_BATCHES[bad]
        batches[3], words = bad_batch(parts, device)
        check_raises(
            lambda: epoch.run(answer, batches, window=2),
            ValueError,
            mentions=lengths,
            when=f"for a micro-batch of {words}",
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
    @DTYPES
    def test_minds_frozen_unused_and_foreign_parameters(self, answer, device, dtype):
        """The norm and the step are over what the optimizer holds, in two groups."""
        model, batches = regression(device, 4, 1, 2)
        model[0].weight.requires_grad_(False)
        unused, shift = (nn.Parameter(torch.ones(5, device=device)) for _ in range(2))
        unused.grad = torch.ones_like(unused)  # stale, and weight decay would move it
        mine = [model[0].bias, model[2].bias, shift]
        others = [model[0].weight, model[2].weight, unused]  # the second is not the optimizer's
        x, y = joined(batches)
        grads = flat(torch.autograd.grad(mse(model(x) + shift, y), mine))
        norm, start, still = grads.norm(), flat(mine), flat(others)
        groups = [{"params": [others[0], mine[0], unused]}, {"params": mine[1:]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.01)
        (result,) = answer.train_epoch(
            model,
            batches,
            lambda output, target: mse(output + shift, target),
            optimizer,
            window=3,
            dtype=dtype,
            scaler=scaler_for(dtype, device),
            max_norm=norm.item() / 4,
        )
        cause = "stale gradients are in it, or those of other parameters, or of one group only"
        check_close(result.grad_norm, norm, "grad_norm", rtol=TOLERANCE[dtype], cause=cause)
        check_vector(
            (start - flat(mine)) / 0.1,
            grads / 4 + 0.01 * start,
            "step of own parameters by the rate",
            guesses={"they are not clipped": grads + 0.01 * start},
            otherwise="a group is not clipped or not stepped, or what only the optimizer knows",
            rtol=max(TOLERANCE[dtype], 1e-4),
        )
        cause = "a parameter without gradient or of another owner is stepped"
        check_equal(flat(others), still, "frozen, foreign and unused weights", cause=cause)
        left = [p.grad is not None for p in mine]
        cause = "the model's gradients are cleared, not the optimizer's"
        check_equal(left, [False] * 3, "gradients left in own parameters", cause=cause)

    @pytest.mark.survives
    def test_the_float16_loss_of_a_window_does_not_overflow(self, answer, device):
        """mean() of a float16 output is float16, and 65536 times it is above 65504: infinite."""
        model, batches = regression(device, 2, 3)
        epoch = Epoch(model, device, torch.float16, init_scale=2.0**16)
        (result,) = epoch.run(answer, batches[:1], 2, lambda out, _: out.mean())
        cause = "the loss is computed in float16, and its scaled gradient starts out infinite"
        check_equal(result.skipped, False, "skipped on a harmless problem", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("case", ["huge_gradient", "rate_zero", "no_scaler", "bf16"])
    def test_tells_skipped_from_the_scaler_alone(self, answer, device, case):
        """Not from an infinite norm (squares of 1e25 leave float32), nor from weights at rest."""
        model, batches = regression(device, 2, 3)
        dtype = {"no_scaler": torch.float32, "bf16": torch.bfloat16}.get(case, torch.float16)
        epoch = Epoch(model, device, dtype, lr=0.0 if case == "rate_zero" else 1e-20)
        huge = {"huge_gradient": 1e25, "no_scaler": math.inf, "bf16": math.inf}.get(case)
        if huge:
            model[0].bias.register_hook(lambda grad: torch.full_like(grad, huge))
        max_norm = 1.0 if case == "bf16" else None
        (result,) = epoch.run(answer, batches, 2, max_norm=max_norm)
        cause = "ask the scaler whether it skipped: norm and weights do not tell"
        check_equal(result.skipped, False, "skipped", cause=cause)
        check_equal(len(epoch.steps), 1, "steps taken", cause=cause)
        cause = "it does not advance for a step that was taken, whatever its norm"
        check_equal(epoch.scheduler.last_epoch, 1, "steps of the schedule", cause=cause)
        weight = model[2].weight.detach()  # its gradient is finite in every case
        cause = "max_norm is None, and gradients are clipped to something: inf / inf is nan"
        check(bool(weight.isfinite().all()), expected="finite", got=show(weight), cause=cause)

    @pytest.mark.survives
    def test_each_micro_batch_of_an_epoch_runs_once_and_may_be_a_list(self, answer, device):
        model, batches = regression(device, 4, 2, 3)
        seen: list[int] = []
        model[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        Epoch(model, device).run(answer, ([x, y] for x, y in batches), window=2)
        cause = "a forward pass too many, or micro-batches are joined or left out"
        windows = sorted(seen[:2]), seen[2:]  # within a window any order will do
        check_equal(windows, ([2, 4], [3]), "samples of each forward pass", cause=cause)
