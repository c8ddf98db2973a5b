"""A 16-bit model with float32 masters, beside float32 training, and its 16 bytes."""

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
from specs.amp_loop.masters import ADAM, GROUPS, SGD, SMALL, Side, agrees, layer, tangled


class TestPart4MasterWeights:
    @pytest.mark.works("MasterWeights", "step")
    @agrees("masters are rounded to 16 bits, or are not rounded into the model's own weights")
    def test_learns_from_updates_too_small_for_sixteen_bits(self):
        """20 updates of 2**-12 on weights near 1: each is rounded away; together they are 0.005."""
        for dtype in (torch.bfloat16, torch.float16):
            yield str(dtype), "; ".join(["backward(); step()"] * 20), SMALL, partial(layer, dtype)

    @pytest.mark.exact("MasterWeights", "step")
    @agrees("compare with float32 training: widen, divide, check, step, round, drop gradients")
    def test_is_float32_training_rounded(self):
        """Finite and infinite gradients, scaled, and stale ones; zero_grad or a reload between."""
        between = ((None, "zero_grad(); "), (inf, ""), (-inf, "zero_grad(); "), (nan, "reload(); "))
        for bad, call in between:
            again = f"{call}step(); backward(-0.5); step(2.0**26)"
            script = f"backward(); step(); backward(3e4, {bad}); step(8.0); {again}"
            name = f"a gradient of {bad}, then {call}".removesuffix(", then ").removesuffix("; ")
            yield f"SGD, {name}", script, SGD, partial(layer, torch.float16)
            yield f"Adam, {name}", script, ADAM
        each = enumerate((inf, -inf, nan, inf, nan))
        script = "; ".join(f"backward(1, {bad}, at={at}); step()" for at, bad in each)
        yield "an overflow in each parameter in turn", f"{script}; step()", SGD, tangled
        small = "backward(2**-14); step(2.0**16)"
        yield "2**-14 / 2**16 is no float16", small, ADAM, partial(layer, torch.float16)
        yield "3e38 / 2**-8 is an infinity", "backward(3e38); step(2**-8)"

    @pytest.mark.exact("MasterWeights", "masters")
    @agrees("compare shapes, dtypes, is_leaf, requires_grad, order, and the optimizer's tensors")
    def test_masters_are_float32_leaves(self):
        script = "backward(); step(); reload(); backward(); step()"
        yield "in groups", script, GROUPS

    @pytest.mark.exact("MasterWeights", "state")
    @agrees("masters are made anew from 16-bit weights, or the optimizer's state is lost")
    def test_goes_on_from_a_file(self):
        """Masters, moments, and a learning rate that was set in between."""
        new_rate = "optimizer.param_groups[0].update(lr=0.001)"
        for between in product(("reload()", "zero_grad(); reload()", new_rate), repeat=2):
            script = "; ".join(f"backward(); step(); {call}; backward(-0.5)" for call in between)
            yield ", then ".join(between), f"{script}; step()", ADAM

    @pytest.mark.saves("MasterWeights", "memory")
    @bar(
        "weights, gradients, masters and moments",
        "16 bytes a parameter + 1 %; plain keeps float32 gradients",
        "float32 gradients, or a copy of something, are kept after the step",
    )
    def test_holds_sixteen_bytes_a_parameter(self, device):
        """2 weight + 2 gradient + 4 master + 8 Adam; float32 gradients would make it 20.

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
    @agrees("frozen parameters have no master; a tied one has one")
    def test_trains_a_model_with_frozen_and_tied_parameters(self):
        for call in ("zero_grad()", "reload()"):
            script = f"backward(); step(); {call}; backward(3e4); step(8.0)"
            yield call, script, SGD, tangled

    @pytest.mark.survives("MasterWeights", 2)
    @agrees("it is stepped with an old gradient, with zeros, or with another parameter's")
    def test_leaves_a_parameter_without_a_gradient_alone(self):
        """Momentum must not move it, after an overflow or a reload either."""
        for bad, call, missing in product((None, inf), ("", "reload(); "), (0, 1)):
            again = f"{call}backward(-0.5, missing={missing}); step()"
            script = f"backward(missing={1 - missing}); step(); backward(1, {bad}); step(); {again}"
            name = f"{'an overflow' if bad else 'a step'}{call and ', a reload'}"
            yield f"{name}, then none for parameter {missing}", script, (SGD, ADAM)[missing]

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_model_that_is_not_16_bit(self, answer):
        """Or one without anything to train, whatever the optimizer says of that."""
        make = lambda params: SGD([*params, nn.Parameter(torch.ones(1))])  # noqa: E731
        mixed = nn.Sequential(layer(), nn.LayerNorm(3))
        for model, words in (mixed, ["1.weight", "float32"]), (nn.ReLU(), []):
            call = partial(answer.MasterWeights, model, make)
            check_raises(call, ValueError, mentions=words, when=f"for {model}")

    @pytest.mark.survives("MasterWeights", "Raises")
    def test_refuses_a_state_of_another_model(self, answer):
        """copy_ would broadcast a number or a row over a whole master."""
        side = Side(answer.MasterWeights, layer, ADAM)
        play(side, "backward(); step()")
        before, state = side.seen(), kept(side.state_dict())
        optimizer, own = state["optimizer"], [(3, 5), (3,)]
        broken = ([(3, 5)], 1), ([(3, 5), (1,)], 1, "1"), ([(5, 3), (3,)], 1, "5, 3"), (own, 0)
        for shapes, groups, *named in broken:
            what = f"masters of shapes {shapes} and {groups} groups in the optimizer"
            some = optimizer | {"param_groups": optimizer["param_groups"][:groups]}
            other = {"masters": [*map(torch.zeros, shapes)], "optimizer": some}
            cause = "only the number of masters or of elements is compared, or nothing"
            if not groups:
                cause = "the optimizer's state is not loaded, or its error is swallowed"
            load = partial(side.load_state_dict, other)
            check_raises(load, ValueError, mentions=named, when=f"for {what}", cause=cause)
            cause = "this is checked after something has been loaded"
            what = f"the trainer that has refused {what}"
            check_equal(side.seen(), before, what, cause=cause, clause=ERRORS)
