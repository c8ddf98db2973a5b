"""A 16-bit model with float32 masters: small updates, scaled gradients, 16 bytes a parameter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check, check_bar, check_close, check_equal, check_raises
from kit.laws.precisions import HALVES
from kit.laws.toys import mlp
from kit.memory.ruler import bytes_of, measure


def layer(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return mlp(5, 3, device=device)[0].to(dtype)


def sgd(params: list[Tensor], lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def give_gradients(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, value)


class TestPart4MasterWeights:
    """Part 4: MasterWeights - a 16-bit model that learns from small updates"""

    subject = "MasterWeights"

    @pytest.mark.works
    @HALVES
    def test_learns_from_updates_too_small_for_sixteen_bits(self, answer, device, dtype):
        """200 updates of 2**-13 on weights of 1.0: alone each is rounded away, together 0.0244."""
        model = layer(device, dtype)
        nn.init.ones_(model.weight)
        trainer = answer.MasterWeights(model, lambda params: sgd(params, lr=2.0**-13))
        for _ in range(200):
            give_gradients(model, 1.0)
            check(
                trainer.step() is True,
                expected="True for a step",
                got=False,
                cause="a good step is taken for an overflow, or nothing is returned",
            )
        want = torch.full_like(model.weight, 1 - 200 * 2.0**-13).detach()
        cause = "the optimizer works on the 16-bit weights, or masters are rounded on the way"
        check_equal(model.weight.detach(), want, "weight after 200 updates", cause=cause)

    @pytest.mark.exact
    @HALVES
    def test_is_float32_training_rounded(self, answer, device, dtype):
        """The masters are what float32 Adam makes of these gradients, the model their rounding."""
        model = layer(device, dtype)
        twin = copy.deepcopy(model).float()
        trainer = answer.MasterWeights(model, lambda params: torch.optim.Adam(params, lr=0.003))
        adam = torch.optim.Adam(twin.parameters(), lr=0.003)
        for _ in range(5):
            trainer.zero_grad()
            model(draw.randn(4, 5, device=device, dtype=dtype)).square().sum().backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.grad = p.grad.float()
            adam.step()
            trainer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            cause = "masters start from, or are stepped with, something else than 16-bit values"
            check_equal(p.detach(), q.detach().to(dtype), "weight after five steps", cause=cause)
        for master, q in zip(trainer.masters, twin.parameters(), strict=True):
            check_equal(master.detach(), q.detach(), "master after five steps", cause=cause)

    @pytest.mark.exact
    def test_divides_by_the_loss_scale_in_float32(self, answer, device):
        """2**-14 / 65536 = 2**-30 is nothing in float16, and something in float32."""
        model = layer(device, torch.float16)
        trainer = answer.MasterWeights(model, sgd)
        before = [master.detach().clone() for master in trainer.masters]
        give_gradients(model, 2.0**-14)
        seen = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: seen.extend(m.grad.clone() for m in trainer.masters)
        )
        trainer.step(loss_scale=65536.0)
        for gradient, master in zip(seen, before, strict=True):
            want = torch.full_like(master, 2.0**-30)
            cause = "gradients are divided in 16 bits and underflow, or are not divided"
            check_equal(gradient, want, "gradient of the master", cause=cause)

    @pytest.mark.saves
    def test_holds_sixteen_bytes_a_parameter(self, answer, reference, device):
        """2 weight + 2 gradient + 4 master + 8 Adam; with float32 gradients kept it would be 20.

        The bar adds 1 % for step counters and the rounding of storages to 512 bytes.
        """
        model_of = lambda: mlp(320, 480, device=device)[0].to(torch.bfloat16)  # noqa: E731
        count = 320 * 480 + 480

        def held(module: object) -> int:
            model = model_of()
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

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", [math.inf, math.nan], ids=["inf", "nan"])
    def test_an_overflow_moves_nothing_and_is_told(self, answer, device, bad):
        model = layer(device)
        trainer = answer.MasterWeights(model, torch.optim.Adam)
        give_gradients(model, 1.0)
        trainer.step()
        masters = [master.detach().clone() for master in trainer.masters]
        state = copy.deepcopy(trainer.optimizer.state_dict()["state"])
        model.bias.grad[1] = bad
        taken = trainer.step()
        check_equal(taken, False, "step() with an overflow", cause="gradients are not looked at")
        same = all(a.equal(b) for a, b in zip(masters, trainer.masters, strict=True))
        counts = [s["step"].item() for s in trainer.optimizer.state_dict()["state"].values()]
        check(
            same and counts == [s["step"].item() for s in state.values()],
            expected="masters and moments as before the overflow",
            got="they changed",
            cause="the optimizer steps before, or without, the look at the gradients",
        )
        give_gradients(model, 1.0)
        check_equal(trainer.step(), True, "the next good step", cause="bad gradients are kept")

    @pytest.mark.survives
    def test_copies_no_frozen_and_one_tied_parameter(self, answer, device):
        frozen, tied = layer(device), layer(device)
        frozen.requires_grad_(False)
        model = nn.Sequential(frozen, tied, nn.Linear(5, 3).to(device, torch.bfloat16))
        model[2].weight = tied.weight
        trainer = answer.MasterWeights(model, sgd)
        shapes = [tuple(master.shape) for master in trainer.masters]
        cause = "frozen parameters need no master, and a tied one needs one"
        check_equal(shapes, [(3, 5), (3,), (3,)], "shapes of the masters", cause=cause)

    @pytest.mark.survives
    def test_a_weight_without_a_gradient_stays_where_it_is(self, answer, device):
        """Adam must not move one on an old gradient, nor decay its moments."""
        model = layer(device)
        trainer = answer.MasterWeights(model, torch.optim.Adam)
        give_gradients(model, 1.0)
        trainer.step()
        before = trainer.masters[1].detach().clone()
        trainer.zero_grad()
        cause = "zero_grad leaves 16-bit gradients"
        check_equal([p.grad for p in model.parameters()], [None, None], "gradients", cause=cause)
        model.weight.grad = torch.ones_like(model.weight)
        trainer.step()
        cause = "a gradient of an earlier step is used again"
        check_equal(trainer.masters[1].detach(), before, "master without gradient", cause=cause)

    @pytest.mark.survives
    def test_resumes_from_the_masters_not_from_their_rounding(self, answer, device, tmp_path):
        """Three steps, or two, a save to a file, a load into new objects, and one."""

        def start() -> tuple[nn.Module, object]:
            draw.seed(2)
            model = layer(device)
            return model, answer.MasterWeights(model, lambda p: torch.optim.Adam(p, lr=0.0007))

        def step(model: nn.Module, trainer: object, value: float) -> None:
            give_gradients(model, value)
            trainer.step()

        model, trainer = start()
        for value in (1.0, -0.5):
            step(model, trainer, value)
        torch.save(trainer.state_dict(), tmp_path / "masters.pt")
        saved_weight = model.weight.detach().clone()
        step(model, trainer, 0.25)
        new_model, new_trainer = start()
        new_trainer.load_state_dict(torch.load(tmp_path / "masters.pt", weights_only=True))
        cause = "the model's own weights are not set from the masters"
        check_equal(new_model.weight.detach(), saved_weight, "weight after the load", cause=cause)
        step(new_model, new_trainer, 0.25)
        cause = "masters are made anew from 16-bit weights, or the optimizer's state is lost"
        for mine, true in zip(new_trainer.masters, trainer.masters, strict=True):
            check_equal(mine.detach(), true.detach(), "master after the resumed step", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize(
        "bad", ["float32", "no_trainable", "no_scale", "negative", "infinite", "nan"]
    )
    def test_refuses_bad_input(self, answer, device, bad):
        model = layer(device)
        trainer = answer.MasterWeights(model, sgd)
        give_gradients(model, 1.0)
        weight = model.weight.detach().clone()
        call, words, when = {
            "float32": (
                lambda: answer.MasterWeights(mlp(5, 3, device=device), sgd),
                ["0.weight", "float32"],
                "for a float32 model",
            ),
            "no_trainable": (lambda: answer.MasterWeights(nn.ReLU(), sgd), [], "for a ReLU"),
            "no_scale": (lambda: trainer.step(loss_scale=0.0), ["0"], "for loss_scale=0.0"),
            "negative": (lambda: trainer.step(loss_scale=-8.0), ["-8"], "for loss_scale=-8.0"),
            "infinite": (lambda: trainer.step(float("inf")), ["inf"], "for loss_scale=inf"),
            "nan": (lambda: trainer.step(math.nan), ["nan"], "for loss_scale=nan"),
        }[bad]
        check_raises(call, ValueError, mentions=words, when=when)
        cause = "the input is checked too late"
        check_close(model.weight.float(), weight.float(), "weight", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("count", [1, 4], ids=["too_few", "too_many"])
    def test_a_state_with_another_number_of_masters_changes_nothing(self, answer, device, count):
        trainer = answer.MasterWeights(layer(device), sgd)
        before = [master.detach().clone() for master in trainer.masters]
        masters = [torch.zeros_like(before[0]) for _ in range(count)]
        check_raises(
            lambda: trainer.load_state_dict(trainer.state_dict() | {"masters": masters}),
            ValueError,
            mentions=[count, 2],
            when=f"for {count} masters where there are 2",
        )
        same = all(a.equal(b) for a, b in zip(before, trainer.masters, strict=True))
        cause = "the number is checked too late, or by zip(strict=True) on the way"
        check(same, expected="masters as before the refused load", got="others", cause=cause)

    @pytest.mark.survives
    def test_looks_at_the_dtype_of_every_trainable_parameter_and_of_no_other(self, answer, device):
        model = nn.Sequential(layer(device), nn.LayerNorm(3).to(device))
        check_raises(
            lambda: answer.MasterWeights(model, sgd),
            ValueError,
            mentions=["1.weight", "float32"],
            when="for a float32 LayerNorm",
        )
        model[1].requires_grad_(False)
        cause = "frozen parameters may have any dtype"
        check_equal(len(answer.MasterWeights(model, sgd).masters), 2, "masters", cause=cause)

    @pytest.mark.survives
    def test_float32_gradients_go_after_an_overflow_too(self, answer, device):
        """Kept, the old infinity would stop the next step of a weight that has no gradient."""
        model = layer(device)
        trainer = answer.MasterWeights(model, torch.optim.Adam)
        give_gradients(model, math.inf)
        trainer.step()
        trainer.zero_grad()
        cause = "step() returns early and leaves the masters' gradients"
        grads = [master.grad for master in trainer.masters]
        check_equal(grads, [None, None], "gradients of the masters", cause=cause)
        model.weight.grad = torch.ones_like(model.weight)
        check_equal(trainer.step(), True, "the next step, without a bias gradient", cause=cause)

    @pytest.mark.survives
    def test_huge_but_finite_gradients_are_a_step(self, answer, device):
        model = layer(device)
        trainer = answer.MasterWeights(model, lambda params: sgd(params, lr=1e-38))
        give_gradients(model, 3e38)
        cause = "the sum or the norm of a gradient is looked at, not its elements"
        check_equal(trainer.step(), True, "step() with gradients of 3e38", cause=cause)

    @pytest.mark.survives
    def test_a_loaded_trainer_is_one_of_its_own(self, answer, device):
        """Its steps do not move the masters that were saved; the learning rate came along."""
        one, other = layer(device), layer(device)
        saved = answer.MasterWeights(one, sgd)
        saved.optimizer.param_groups[0]["lr"] = 0.25
        loaded = answer.MasterWeights(other, sgd)
        loaded.load_state_dict(saved.state_dict())
        before = [master.detach().clone() for master in saved.masters]
        give_gradients(other, 1.0)
        loaded.step()
        same = all(a.equal(b) for a, b in zip(before, saved.masters, strict=True))
        cause = "the loaded masters are the saved tensors, not copies of them"
        check(same, expected="the saved masters as they were", got="they moved", cause=cause)
        rate = loaded.optimizer.param_groups[0]["lr"]
        cause = "only the optimizer's tensors are saved, not its groups"
        check_equal(rate, 0.25, "learning rate of the loaded optimizer", cause=cause)
