"""A 16-bit model with float32 masters, beside plain float32 training, and its 16 bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from kit.laws.checks import check_bar, check_equal, check_raises
from kit.laws.precisions import HALVES
from kit.laws.toys import mlp
from kit.memory.ruler import bytes_of, measure
from specs.amp_loop.master_weights import (
    OPTIMIZERS,
    OVERFLOWS,
    calls,
    give_gradients,
    hold,
    layer,
    tangled,
    train,
)

INF = math.inf
NAMES = pytest.mark.parametrize("optimizer", OPTIMIZERS)


class TestPart4MasterWeights:
    """Part 4: MasterWeights - a 16-bit model that learns from small updates"""

    subject = "MasterWeights"

    @pytest.mark.works("MasterWeights", "step")
    @HALVES
    def test_learns_from_updates_too_small_for_sixteen_bits(self, answer, device, dtype):
        """200 updates of 2**-13 on weights of 1.0: alone each is rounded away, together 0.0244."""
        model = layer(device, dtype)
        nn.init.ones_(model.weight)
        trainer = answer.MasterWeights(model, lambda params: torch.optim.SGD(params, lr=2.0**-13))
        for _ in range(200):
            give_gradients(model, 1.0)
            taken = trainer.step()
            check_equal(taken, True, "the result of step()", cause="a good step is refused")
        want = torch.full_like(model.weight, 1 - 200 * 2.0**-13).detach()
        check_equal(
            model.weight.detach(),
            want,
            "weight after 200 updates",
            cause="masters are rounded on the way, or not rounded into the model",
            suspects={
                "the optimizer works on the 16-bit weights": torch.ones_like(want),
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
        sequences = calls(bad=st.sampled_from((None, None, *OVERFLOWS)))
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
    def test_resumes_from_a_file(self, answer, device, tmp_path):
        """Masters, moments, and the learning rate that was set meanwhile."""
        model, other = layer(device), layer(device)
        trainer, loaded = (answer.MasterWeights(m, OPTIMIZERS["Adam"]) for m in (model, other))
        trainer.optimizer.param_groups[0]["lr"] = 0.0007
        train(trainer, model, (1.0, -0.5))
        torch.save(trainer.state_dict(), tmp_path / "masters.pt")
        loaded.load_state_dict(torch.load(tmp_path / "masters.pt", weights_only=True))
        cause = "the model's own weights are not set from the masters"
        check_equal(other.weight.detach(), model.weight.detach(), "weight after load", cause=cause)
        train(trainer, model, (0.25,))
        train(loaded, other, (0.25,))
        cause = "masters are made anew from 16-bit weights, or the optimizer's state is lost"
        got, want = ([m.detach() for m in t.masters] for t in (loaded, trainer))
        check_equal(got, want, "masters after the resumed step", cause=cause)

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
        model = layer(device, torch.float16)
        trainer = answer.MasterWeights(model, lambda params: torch.optim.SGD(params, lr=1.0))
        give_gradients(model, 2.0**-14)
        seen = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: seen.extend(m.grad.clone() for m in trainer.masters)
        )
        trainer.step(loss_scale=65536.0)
        for gradient, master in zip(seen, trainer.masters, strict=True):
            check_equal(
                gradient,
                torch.full_like(master, 2.0**-30).detach(),
                "gradient of a master",
                cause="gradients are divided in 16 bits and underflow, or are not divided",
                suspects={
                    "gradients are divided in 16 bits": torch.zeros_like(gradient),
                    "gradients are not divided": torch.full_like(gradient, 2.0**-14),
                },
            )

    @pytest.mark.survives("MasterWeights", 2)
    def test_trains_a_model_with_frozen_and_tied_parameters(self, answer, device):
        cause = "frozen parameters need no master, and a tied one needs one"
        hold(answer, lambda: tangled(device, torch.bfloat16), "SGD", calls(), cause)

    @pytest.mark.survives("MasterWeights", 3)
    @NAMES
    def test_leaves_a_parameter_without_a_gradient_alone(self, answer, device, optimizer):
        """Momentum and moments must not move it, after an overflow or a reload either."""
        sequences = calls(bad=st.sampled_from((None, INF)), missing=st.sampled_from((None, 0, 1)))
        cause = "a gradient of an earlier step is used again"
        hold(answer, lambda: layer(device), optimizer, sequences, cause)

    @pytest.mark.survives("MasterWeights", 4)
    def test_huge_but_finite_gradients_are_a_step(self, answer, device):
        model = layer(device)
        trainer = answer.MasterWeights(model, lambda params: torch.optim.SGD(params, lr=1e-38))
        give_gradients(model, 3e38)
        cause = "the sum or the norm of a gradient is looked at, not its elements"
        check_equal(trainer.step(), True, "step() with gradients of 3e38", cause=cause)

    @pytest.mark.survives("MasterWeights", 5)
    def test_a_loaded_state_is_copied(self, answer, device):
        saved = answer.MasterWeights(layer(device), OPTIMIZERS["SGD"])
        model = layer(device)
        loaded = answer.MasterWeights(model, OPTIMIZERS["SGD"])
        loaded.load_state_dict(saved.state_dict())
        before = [master.detach().clone() for master in saved.masters]
        train(loaded, model, (1.0,))
        cause = "the loaded masters are the saved tensors, not copies of them"
        check_equal([m.detach() for m in saved.masters], before, "saved masters", cause=cause)

    @pytest.mark.survives("MasterWeights", "Raises")
    @pytest.mark.parametrize("scale", [0.0, -8.0, INF, math.nan])
    def test_refuses_a_loss_scale(self, answer, device, scale):
        model = layer(device)
        trainer = answer.MasterWeights(model, OPTIMIZERS["SGD"])
        give_gradients(model, 1.0)
        before = model.weight.detach().clone()
        when = f"for loss_scale={scale}"
        check_raises(lambda: trainer.step(scale), ValueError, mentions=[scale], when=when)
        check_equal(model.weight.detach(), before, "weight", cause="it is checked too late")

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_model_that_is_not_16_bit(self, answer, device):
        """All of it, or one layer of it; and one that has nothing to train.

        torch's optimizers refuse an empty list themselves; this one has a parameter of its own.
        """
        with_one_more = lambda params: torch.optim.SGD([*params, nn.Parameter(torch.ones(1))])  # noqa: E731
        mixed = nn.Sequential(layer(device), nn.LayerNorm(3).to(device))
        whole = mlp(5, 3, device=device)
        for model, words, when in (
            (whole, ["0.weight", "float32"], "for a float32 model"),
            (mixed, ["1.weight", "float32"], "for a float32 LayerNorm"),
            (nn.ReLU(), [], "for a ReLU"),
        ):
            check_raises(
                lambda model=model: answer.MasterWeights(model, with_one_more),
                ValueError,
                mentions=words,
                when=when,
            )

    @pytest.mark.survives("MasterWeights", "Raises")
    @pytest.mark.parametrize("count", [1, 4], ids=["too_few", "too_many"])
    def test_refuses_a_state_with_another_number_of_masters(self, answer, device, count):
        trainer = answer.MasterWeights(layer(device), OPTIMIZERS["SGD"])
        before = [master.detach().clone() for master in trainer.masters]
        masters = [torch.zeros_like(before[0]) for _ in range(count)]
        check_raises(
            lambda: trainer.load_state_dict(trainer.state_dict() | {"masters": masters}),
            ValueError,
            mentions=[count],
            when=f"for {count} masters where there are 2",
        )
        cause = "the number is checked too late, or by zip(strict=True) on the way"
        check_equal([m.detach() for m in trainer.masters], before, "masters", cause=cause)
