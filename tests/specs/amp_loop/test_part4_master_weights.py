"""A 16-bit model with float32 masters, beside plain float32 training, and its 16 bytes."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

from kit.laws.checks import check_bar, check_equal, check_raises
from kit.laws.precisions import HALVES
from kit.laws.toys import mlp
from kit.memory.ruler import bytes_of, measure
from specs.amp_loop.master_weights import (
    INF,
    OPTIMIZERS,
    OVERFLOWS,
    calls,
    hold,
    layer,
    tangled,
    train,
)


class TestPart4MasterWeights:
    @pytest.mark.works("MasterWeights", "step")
    @HALVES
    def test_learns_from_updates_too_small_for_sixteen_bits(self, answer, device, dtype):
        """200 updates of 2**-13 on weights of 1.0: alone each is rounded away, together 0.0244."""
        model = layer(device, dtype)
        nn.init.ones_(model.weight)
        trainer = answer.MasterWeights(model, lambda params: torch.optim.SGD(params, lr=2.0**-13))
        said = train(trainer, model, *[1.0] * 200)
        check_equal(said, [True] * 200, "the results of step()", cause="a good step is refused")
        want = torch.full_like(model.weight, 1 - 200 * 2.0**-13).detach()
        check_equal(
            model.weight.detach(),
            want,
            "weight after 200 updates",
            cause="masters are rounded on the way, or not rounded into the model",
            suspects={
                "each update is rounded to 16 bits": torch.ones_like(want),
            },
        )

    @pytest.mark.exact("MasterWeights", "step")
    @pytest.mark.parametrize(
        ("optimizer", "dtype"),
        [("SGD", torch.float16), ("Adam", torch.bfloat16)],
        ids=["SGD-fp16", "Adam-bf16"],
    )
    def test_is_float32_training_rounded(self, answer, device, optimizer, dtype):
        """Good and bad gradients, scaled and not, with zero_grad or a reload between."""
        cause = "compare with float32 training: widen, divide, look, step, round"
        sequences = calls(bad=(None, None, *OVERFLOWS))
        hold(answer, lambda: layer(device, dtype), optimizer, sequences, cause)

    @pytest.mark.exact("MasterWeights", "masters")
    def test_masters_are_float32_leaves(self, answer, device):
        model = layer(device)
        trainer = answer.MasterWeights(model, OPTIMIZERS["Adam"])
        got = [(tuple(m.shape), m.dtype, m.is_leaf, m.requires_grad) for m in trainer.masters]
        want = [(tuple(p.shape), torch.float32, True, True) for p in model.parameters()]
        cause = "shape, dtype, is_leaf and requires_grad of each, in the model's order"
        check_equal(got, want, "masters", cause=cause)
        held = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
        cause = "make_optimizer gets the masters"
        check_equal(held, [id(m) for m in trainer.masters], "ids in the optimizer", cause=cause)

    @pytest.mark.exact("MasterWeights", "state")
    def test_goes_on_from_a_file(self, answer, device):
        """Masters, moments, and the learning rate that was set meanwhile."""
        sequences = calls(value=(1.0, -0.5), between=("reload", "new_rate"))
        cause = "masters are made anew from 16-bit weights, or the optimizer's state is lost"
        hold(answer, lambda: layer(device), "Adam", sequences, cause)

    @pytest.mark.saves("MasterWeights", "memory")
    def test_holds_sixteen_bytes_a_parameter(self, answer, reference, device):
        """2 weight + 2 gradient + 4 master + 8 Adam; with float32 gradients kept it would be 20.

        The bar adds 1 % for step counters and the rounding of storages to 512 bytes.
        """
        count = 320 * 480 + 480

        def held(module: object) -> int:
            model = mlp(320, 480, device=device)[0].to(torch.bfloat16)
            kept = []

            def step() -> None:
                kept.append(module.MasterWeights(model, torch.optim.Adam))
                model(torch.ones(2, 320, device=device, dtype=torch.bfloat16)).sum().backward()
                kept[0].step()

            return bytes_of(model) + measure(step, device, known=[model]).retained

        check_bar(
            "weights, gradients, masters and moments",
            held(answer),
            1.01 * 16 * count,
            plain=20 * count,
            reference=held(reference),
            formula="16 bytes a parameter + 1 %; plain keeps float32 gradients",
            cause="float32 gradients are kept after the step, or a copy of something is",
        )

    @pytest.mark.survives("MasterWeights", 1)
    def test_widens_before_it_divides(self, answer, device):
        """2**-14 / 65536 = 2**-30 is nothing in float16, and something in float32."""
        sequences = calls(value=(2.0**-14,), loss_scale=(65536.0, 2.0**26))
        cause = "gradients are divided in 16 bits and underflow, or are not divided"
        hold(answer, lambda: layer(device, torch.float16), "Adam", sequences, cause)

    @pytest.mark.survives("MasterWeights", 2)
    def test_trains_a_model_with_frozen_and_tied_parameters(self, answer, device):
        cause = "frozen parameters need no master, and a tied one needs one"
        hold(answer, lambda: tangled(device), "SGD", calls(), cause)

    @pytest.mark.survives("MasterWeights", 3)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_leaves_a_parameter_without_a_gradient_alone(self, answer, device, optimizer):
        """Momentum and moments must not move it, after an overflow or a reload either."""
        cause = "an earlier gradient, or zeros, step a parameter without one"
        sequences = calls(bad=(None, INF), missing=(None, 0, 1))
        hold(answer, lambda: layer(device), optimizer, sequences, cause)

    @pytest.mark.survives("MasterWeights", 4)
    def test_huge_but_finite_gradients_are_a_step(self, answer, device):
        """3e38 is a step; divided by 2**-8 it is an infinity."""
        cause = "the sum or the norm of a gradient is looked at, or the 16-bit gradient"
        sequences = calls(value=(3e38,), loss_scale=(1.0, 65536.0, 2.0**-8))
        hold(answer, lambda: layer(device), "SGD", sequences, cause)

    @pytest.mark.survives("MasterWeights", 5)
    def test_a_loaded_state_is_copied(self, answer, device):
        other, model = layer(device), layer(device)
        saved, loaded = (answer.MasterWeights(m, OPTIMIZERS["Adam"]) for m in (other, model))
        train(saved, other, 1.0)
        state = saved.state_dict()
        before = copy.deepcopy(state)
        loaded.load_state_dict(state)
        train(loaded, model, 1.0)
        cause = "masters or moments that were loaded are the saved tensors, not copies of them"
        check_equal(state, before, "the saved state", cause=cause)

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_loss_scale_that_is_not_positive_and_finite(self, answer, device):
        model = layer(device)
        trainer = answer.MasterWeights(model, OPTIMIZERS["SGD"])
        train(trainer, model, 1.0)
        before = model.weight.detach().clone()
        for scale in (0.0, -8.0, INF, math.nan):
            call = functools.partial(trainer.step, scale)
            check_raises(call, ValueError, mentions=[scale], when=f"for loss_scale={scale}")
            check_equal(model.weight.detach(), before, "weight", cause="it is checked too late")

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_model_that_is_not_16_bit(self, answer, device):
        """All of it, or one layer of it; and one that has nothing to train.

        torch's optimizers refuse an empty list themselves; this one has a parameter already.
        """

        def make(params):
            return torch.optim.SGD([*params, nn.Parameter(torch.ones(1))])

        mixed = nn.Sequential(layer(device), nn.LayerNorm(3).to(device))
        for model, words, when in (
            (nn.Sequential(nn.Linear(5, 3)), ["0.weight", "float32"], "for a float32 model"),
            (mixed, ["1.weight", "float32"], "for a float32 LayerNorm"),
            (nn.ReLU(), [], "for a ReLU"),
        ):
            call = functools.partial(answer.MasterWeights, model, make)
            check_raises(call, ValueError, mentions=words, when=when)

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_state_with_another_number_of_masters(self, answer, device):
        trainer = answer.MasterWeights(layer(device), OPTIMIZERS["SGD"])
        before = [master.detach().clone() for master in trainer.masters]
        for count in (1, 4):
            state = trainer.state_dict() | {"masters": [torch.zeros_like(before[0])] * count}
            call = functools.partial(trainer.load_state_dict, state)
            check_raises(call, ValueError, mentions=[count], when=f"for {count} masters, not 2")
            cause = "the number is checked too late, or by zip(strict=True) on the way"
            check_equal([m.detach() for m in trainer.masters], before, "masters", cause=cause)
