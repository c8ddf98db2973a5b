"""Bytes of training state, each compared with a formula."""

from __future__ import annotations

import copy

import pytest
from torch import nn
from torch.optim import SGD

from kit.laws.checks import check, check_bar, check_equal, check_raises
from kit.laws.scenarios import check_scenarios
from specs.memory_measurement import states

KINDS = "bytes of (parameters, gradients, buffers, optimizer)"


def check_state(answer, device, law, cause):
    __tracebackhide__ = True

    def judge(answer, scenario):
        world = scenario(device)
        return tuple(answer.state_bytes(world.model, world.optimizer)), world.want

    check_scenarios(answer, judge, law, KINDS, cause=cause)


class TestPart1StateBytes:
    """Part 1: state_bytes - parameters, gradients, buffers and optimizer state"""

    subject = "state_bytes"

    @pytest.mark.works("state_bytes", "gradients")
    def test_counts_parameters_gradients_and_momentum(self, answer, device):
        """P = 7*11 + 11 + 11*3 + 3 floats of 4 bytes; gradients and momentum are one P each."""
        model = states.trained(device, 7, 11, 3)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        size = 4 * (7 * 11 + 11 + 11 * 3 + 3)
        cause = "a kind of state is left out, or counted under another"
        got = tuple(answer.state_bytes(model, optimizer))
        check_equal(got, (size, size, 0, size), KINDS, cause=cause)

    @pytest.mark.works("state_bytes", "optimizer")
    def test_counts_the_optimizers_state_as_it_is_now(self, answer, device):
        cause = "the state is guessed from the optimizer's kind, or some of its tensors left out"
        check_state(answer, device, states.Moments, cause)

    @pytest.mark.exact("state_bytes", "parameters")
    def test_counts_every_parameter(self, answer, device):
        check_state(answer, device, states.Parameters, "parameters are left out")

    @pytest.mark.exact("state_bytes", "gradients")
    def test_counts_every_gradient_that_is_there(self, answer, device):
        check_state(answer, device, states.Gradients, "p.grad is not asked of every parameter")

    @pytest.mark.exact("state_bytes", "buffers")
    def test_counts_every_buffer(self, answer, device):
        check_state(answer, device, states.Buffers, "buffers are left out")

    @pytest.mark.exact("state_bytes", "sharing")
    def test_counts_a_storage_once_under_the_first_kind(self, answer, device):
        cause = "something else than the storage decides what was counted before"
        check_state(answer, device, states.Sharing, cause)

    @pytest.mark.saves("state_bytes", "gradients")
    def test_shows_what_set_to_none_saves(self, answer, device):
        """zero_grad(set_to_none=True) frees P bytes, set_to_none=False none: bar 0 against P."""
        model = states.trained(device, 16, 64, 8)
        size = 4 * (16 * 64 + 64 + 64 * 8 + 8)
        model.zero_grad(set_to_none=False)
        zeroed = answer.state_bytes(model).gradients
        check_equal(zeroed, size, "bytes of zeroed gradients", cause="zeros are memory too")
        model.zero_grad(set_to_none=True)
        check_bar(
            "gradients after set_to_none=True",
            answer.state_bytes(model).gradients,
            0,
            plain=zeroed,
            formula="no gradient, no bytes",
            cause="gradients are taken to be as large as the parameters",
        )

    @pytest.mark.survives("state_bytes", 1)
    def test_counts_a_view_as_the_storage_behind_it(self, answer, device):
        cause = "the size is taken from the tensor, and not from its storage"
        check_state(answer, device, states.Views, cause)

    @pytest.mark.survives("state_bytes", 2)
    def test_finds_optimizer_state_however_deep(self, answer, device):
        cause = "lists, tuples or dicts in the state are not looked into"
        check_state(answer, device, states.Deep, cause)

    @pytest.mark.survives("state_bytes", 3)
    def test_counts_no_hyperparameters(self, answer, device):
        cause = "something else than optimizer.state is counted"
        check_state(answer, device, states.Hyperparameters, cause)

    @pytest.mark.survives("state_bytes", 4)
    def test_counts_tensors_on_the_meta_device(self, answer, device):
        check_state(answer, device, states.Meta, "a storage without memory is not counted")

    @pytest.mark.survives("state_bytes", 5)
    def test_changes_nothing(self, answer, device):
        model, optimizer = states.Moments.adam_before_its_first_step(device)[1:]

        def seen():
            own = [(id(p.grad), str(p.grad), str(p)) for p in model.parameters()]
            return own, copy.copy(optimizer.state), model.training

        before = seen()
        answer.state_bytes(model, optimizer)
        check(
            seen() == before,
            expected="weights, gradients and optimizer state as they were",
            got="something has changed",
            cause="a step is taken to see the state, or gradients are cleared",
        )

    @pytest.mark.survives("state_bytes", "Raises")
    @pytest.mark.parametrize("bad", ["model", "optimizer"])
    def test_refuses_what_is_no_model_or_optimizer(self, answer, bad):
        model, optimizer = nn.Linear(2, 2), [1.5]
        args, name = (({}, None), "dict") if bad == "model" else ((model, optimizer), "list")
        when = f"for a {name} as {bad}"
        check_raises(lambda: answer.state_bytes(*args), TypeError, mentions=[name], when=when)
