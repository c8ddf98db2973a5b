"""A 16-bit model with float32 masters, beside plain float32 training, and its 16 bytes."""

import copy
from functools import partial
from itertools import product
from math import inf, nan

import pytest
import torch
from torch import nn

from kit.laws.bars import bar
from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.scripts import play
from kit.laws.toys import mlp
from kit.laws.trace import kept
from kit.memory.ruler import bytes_of, measure
from specs.amp_loop.masters import ADAM, GROUPS, SGD, SMALL, TINY, Side, agrees, layer, tangled


class TestPart4MasterWeights:
    @pytest.mark.works("MasterWeights", "step")
    @agrees("masters are rounded on the way, or not rounded into the very weights of the model")
    def test_learns_from_updates_too_small_for_sixteen_bits(self):
        """20 updates of 2**-12 on weights from 1 on: each alone is rounded away, together 0.005."""
        for dtype in (torch.bfloat16, torch.float16):
            yield str(dtype), "; ".join(["backward(); step()"] * 20), SMALL, partial(layer, dtype)

    @pytest.mark.exact("MasterWeights", "step")
    @agrees("compare with float32 training: widen, divide, look, step, round, drop gradients")
    def test_is_float32_training_rounded(self):
        """Good and bad gradients, scaled, with zero_grad or a reload between, and stale ones."""
        between = ((None, "zero_grad(); "), (inf, ""), (-inf, "zero_grad(); "), (nan, "reload(); "))
        for bad, call in between:
            again = f"{call}step(); backward(-0.5); step(2.0**26)"
            script = f"backward(); step(); backward(3e4, {bad}); step(8.0); {again}"
            name = f"a gradient of {bad}, then {call}".removesuffix(", then ").removesuffix("; ")
            yield f"SGD, {name}", script, SGD, partial(layer, torch.float16)
            yield f"Adam, {name}", script, ADAM
        each = enumerate((inf, -inf, nan, inf, nan))
        script = "; ".join(f"backward(1, {bad}, at={at}); step()" for at, bad in each)
        yield "an overflow in one parameter after the other", f"{script}; step()", SGD, tangled
        small = "backward(2**-14); step(2.0**16)"
        yield "2**-14 / 2**16 is no float16", small, ADAM, partial(layer, torch.float16)
        yield "3e38 / 2**-8 is an infinity", "backward(3e38); step(2**-8)"
        yield "3e38 is none, and a sum or a norm of many", "backward(3e38); step()", TINY

    @pytest.mark.exact("MasterWeights", "masters")
    @agrees("shape, dtype, is_leaf, requires_grad, in the model's order; and in the optimizer")
    def test_masters_are_float32_leaves(self):
        script = "backward(); step(); reload(); backward(); step()"
        yield "in groups", script, GROUPS
        script = "backward(); step(); fail(); load(); step(); step()"
        yield "after a load, with a hook on the optimizer", script, ADAM

    @pytest.mark.exact("MasterWeights", "state")
    @agrees("masters are made anew from 16-bit weights, or the optimizer's state is lost")
    def test_goes_on_from_a_file(self):
        """Masters, moments, and the learning rate that was set meanwhile."""
        new_rate = "optimizer.param_groups[0].update(lr=0.001)"
        for between in product(("reload()", "zero_grad(); reload()", new_rate), repeat=2):
            script = "; ".join(f"backward(); step(); {call}; backward(-0.5)" for call in between)
            yield ", then ".join(between), f"{script}; step()", ADAM

    @pytest.mark.saves("MasterWeights", "memory")
    @bar(
        "weights, gradients, masters and moments",
        "16 bytes a parameter + 1 %; plain keeps float32 gradients",
        "float32 gradients are kept after the step, or a copy of something is",
    )
    def test_holds_sixteen_bytes_a_parameter(self, device):
        """2 weight + 2 gradient + 4 master + 8 Adam, after a load too; float32 gradients make 20.

        The bar adds 1 % for step counters and the rounding of storages to 512 bytes.
        """

        def held(module):
            model, kept = mlp(320, 480, device=device)[0].to(torch.bfloat16), []
            ones = torch.ones(2, 320, device=device, dtype=torch.bfloat16)

            def train():
                kept.append(trainer := module.MasterWeights(model, torch.optim.Adam))
                for _ in range(2):
                    trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
                    model(ones).sum().backward()
                    trainer.step()

            return bytes_of(model) + measure(train, device, known=[model, ones]).retained

        count = 320 * 480 + 480
        return held, 1.01 * 16 * count, 20 * count

    @pytest.mark.survives("MasterWeights", 1)
    @agrees("frozen parameters have no master, a tied one has one, in the model's order")
    def test_trains_a_model_with_frozen_and_tied_parameters(self):
        for call in ("zero_grad()", "reload()"):
            script = f"backward(); step(); {call}; backward(3e4); step(8.0)"
            yield call, script, SGD, tangled

    @pytest.mark.survives("MasterWeights", 2)
    @agrees("an earlier gradient, zeros, or that of another master step a parameter without one")
    def test_leaves_a_parameter_without_a_gradient_alone(self):
        """Momentum and moments must not move it, after an overflow or a reload either."""
        for bad, call, missing in product((None, inf), ("", "reload(); "), (0, 1)):
            again = f"{call}backward(-0.5, missing={missing}); step()"
            script = f"backward(missing={1 - missing}); step(); backward(1, {bad}); step(); {again}"
            name = f"{'an overflow' if bad else 'a step'}{call and ', a reload'}"
            yield f"{name}, then none for parameter {missing}", script, (SGD, ADAM)[missing]

    @pytest.mark.survives("MasterWeights", 3)
    @agrees("masters or moments that were loaded are those of the file, not copies")
    def test_a_loaded_state_is_copied(self):
        script = "backward(); step(); reload(); backward(); step(); loaded()"
        yield "a step after a load, Adam", script, ADAM
        yield "a step after a load, groups", script, GROUPS

    @pytest.mark.survives("MasterWeights", "Raises")
    @agrees("no check refuses this input, or too late")
    def test_refuses_a_loss_scale_that_is_not_positive_and_finite(self):
        """Also where a gradient has overflowed: a scale that was halved too often is 0."""
        for scale, bad in product(("0.0", "-8.0", "2 * inf", "nan"), (None, inf)):
            script = f"backward(1, {bad}); step({scale}); step()"  # not math's own object
            yield f"scale {scale}, a gradient of {bad or 1}", script

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_model_that_is_not_16_bit(self, answer):
        """Nor one that has nothing to train, where the optimizer has a parameter of its own."""
        make = lambda params: SGD([*params, nn.Parameter(torch.ones(1))])  # noqa: E731
        mixed = nn.Sequential(layer(), nn.LayerNorm(3))
        for model, words in (mixed, ["1.weight", "float32"]), (nn.ReLU(), []):
            call = partial(answer.MasterWeights, model, make)
            check_raises(call, ValueError, mentions=words, when=f"for {model}")

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_state_of_other_masters_or_another_optimizer(self, answer):
        """A number or a row would be spread over a whole master by copy_."""

        def saved_with(optimizer):
            play(other := Side(answer.MasterWeights, layer, optimizer), "backward(); step()")
            return kept(other.state_dict())

        side, saved = Side(answer.MasterWeights, layer, ADAM), saved_with(ADAM)
        before, others = side.seen(), []
        for what, make in (("two groups", GROUPS), ("SGD", SGD)):
            bad = {"optimizer": saved_with(make)["optimizer"]}
            others.append((f"a state of {what}", bad, Exception))
        for shapes, *named in ([(3, 5)],), ([(3, 5), (1,)], "1"), ([(5, 3), (3,)], "5, 3"):
            bad = {"masters": [*map(torch.zeros, shapes)]}
            others.append((f"masters of {shapes}, not (3, 5) and (3,)", bad, ValueError, *named))
        for what, bad, errors, *named in others:
            call = partial(side.load_state_dict, saved | bad)
            cause = "shapes are not compared: only a number of masters, or of elements, or nothing"
            check_raises(call, errors, mentions=named, when=f"for {what}", cause=cause)
            cause = "masters are checked too late, or something is loaded before another refuses"
            told = f"the trainer that has refused {what}"
            check_equal(side.seen(), before, told, cause=cause, clause=ERRORS)
