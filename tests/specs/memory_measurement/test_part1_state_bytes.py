"""Bytes of training state, each compared with a formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_bar, check_equal, check_raises
from kit.laws.toys import mlp


class History(torch.optim.Optimizer):
    """Keeps tensors deep inside its state, as L-BFGS and Shampoo do."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "count": 3,
                    "old": [torch.zeros(5), {"deep": (torch.zeros(7, dtype=torch.float64),)}],
                }


class TestPart1StateBytes:
    """Part 1: state_bytes - parameters, gradients, buffers and optimizer state"""

    subject = "state_bytes"

    @pytest.mark.works
    def test_counts_parameters_gradients_and_momentum(self, answer, device):
        """P = 7*11 + 11 + 11*3 + 3 floats of 4 bytes; gradients and momentum are one P each."""
        model = mlp(7, 11, 3, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(draw.randn(5, 7, device=device)).sum().backward()
        optimizer.step()
        size = 4 * (7 * 11 + 11 + 11 * 3 + 3)
        got = answer.state_bytes(model, optimizer)
        check_equal(
            tuple(got),
            (size, size, 0, size),
            "(parameters, gradients, buffers, optimizer)",
            cause="a kind of state is left out, or counted under another",
        )

    @pytest.mark.works
    def test_adam_has_no_state_before_its_first_step_and_two_moments_after(self, answer, device):
        """Two moments of P, and one float32 step counter for each of the two parameters."""
        model = nn.Linear(13, 5).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        before = answer.state_bytes(model, optimizer).optimizer
        check_equal(before, 0, "optimizer bytes before the first step", cause=_guess)
        model(draw.randn(3, 13, device=device)).sum().backward()
        optimizer.step()
        after = answer.state_bytes(model, optimizer).optimizer
        want = 2 * 4 * (13 * 5 + 5) + 2 * 4
        check_equal(after, want, "optimizer bytes after it (2 P + the step counters)", cause=_guess)

    @pytest.mark.exact
    def test_counts_each_dtype_at_its_own_size(self, answer, device):
        model = nn.Linear(9, 4, dtype=torch.bfloat16).to(device)
        model.register_buffer("mask", torch.zeros(17, dtype=torch.bool, device=device))
        model.register_buffer("ids", torch.zeros(5, dtype=torch.int64, device=device))
        got = answer.state_bytes(model)
        cause = "every element is taken for 4 bytes"
        check_equal(got.parameters, 2 * (9 * 4 + 4), "bytes of bfloat16 parameters", cause=cause)
        check_equal(got.buffers, 17 + 8 * 5, "bytes of a bool and an int64 buffer", cause=cause)

    @pytest.mark.exact
    def test_counts_tied_parameters_once(self, answer, device):
        """Tied as one Parameter (GPT's head), and as two Parameters on one storage."""
        embedding, head = nn.Embedding(19, 6), nn.Linear(6, 19, bias=False)
        twin = nn.Linear(6, 19, bias=False)
        head.weight = embedding.weight
        twin.weight = nn.Parameter(embedding.weight.detach())
        got = answer.state_bytes(nn.ModuleList([embedding, head, twin]).to(device))
        want = 4 * 19 * 6
        if device.type == "cuda":  # moving to another device separates the two Parameters
            want *= 2
        check_equal(
            got.parameters,
            want,
            "bytes of three tied weights",
            cause="tensors are counted, or parameters by identity, where the storage is one",
        )

    @pytest.mark.exact
    def test_counts_a_view_as_the_storage_behind_it(self, answer, device):
        """An expanded tensor has 3 floats of memory; a strided view keeps all of its storage."""
        model = nn.Module()
        model.register_buffer("wide", torch.zeros(3, 1, device=device).expand(3, 1000))
        model.register_buffer("odd", torch.zeros(100, device=device)[::2])
        check_equal(
            answer.state_bytes(model).buffers,
            4 * 3 + 4 * 100,
            "bytes of an expanded and a strided buffer",
            cause="elements of the view are counted, not its storage",
        )

    @pytest.mark.exact
    def test_counts_a_storage_under_one_kind_only(self, answer, device):
        """DDP and fused optimizers keep gradients as views into one flat buffer."""
        model = nn.Linear(8, 4, bias=False).to(device)
        model.register_buffer("flat", torch.zeros(40, device=device))
        model.weight.grad = model.flat[:32].view(4, 8)
        check_equal(
            tuple(answer.state_bytes(model)),
            (128, 160, 0, 0),
            "(parameters, gradients, buffers, optimizer) of gradients inside a flat buffer",
            cause="each kind starts its count afresh, so that a shared storage counts twice",
        )

    @pytest.mark.saves
    def test_shows_what_set_to_none_saves(self, answer, device):
        """zero_grad(set_to_none=True) frees P bytes, set_to_none=False none: bar 0 against P."""
        model = mlp(16, 64, 8, device=device)
        size = 4 * (16 * 64 + 64 + 64 * 8 + 8)
        model(draw.randn(2, 16, device=device)).sum().backward()
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

    @pytest.mark.survives
    def test_counts_frozen_parameters_and_hidden_buffers(self, answer, device):
        model = nn.Linear(5, 3).to(device).requires_grad_(False)
        model.register_buffer("cache", torch.zeros(11, device=device), persistent=False)
        got = answer.state_bytes(model)
        check_equal(
            (got.parameters, got.gradients, got.buffers),
            (4 * 18, 0, 44),
            "(parameters, gradients, buffers) of a frozen layer with a non-persistent buffer",
            cause="the count goes by requires_grad or by state_dict(), which miss memory",
        )

    @pytest.mark.survives
    def test_finds_optimizer_state_however_deep(self, answer, device):
        optimizer = History(nn.Linear(2, 2, bias=False).to(device).parameters())
        optimizer.step()
        check_equal(
            answer.state_bytes(nn.ReLU(), optimizer).optimizer,
            4 * 5 + 8 * 7,
            "bytes of tensors in lists, dicts and tuples of the state",
            cause="only tensors at the top of the state are seen",
        )

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", ["model", "optimizer"])
    def test_refuses_what_is_no_model_or_optimizer(self, answer, bad):
        args = ({"weight": 1}, None) if bad == "model" else (nn.Linear(2, 2), [1.5])
        name = "dict" if bad == "model" else "list"
        check_raises(
            lambda: answer.state_bytes(*args),
            TypeError,
            mentions=[name],
            when=f"for {args[0] if bad == 'model' else args[1]!r} as {bad}",
        )

    @pytest.mark.survives
    def test_knows_a_storage_by_itself_not_by_where_a_view_starts(self, answer, device):
        """Two views of one flat buffer start at two addresses; meta tensors all start at 0."""
        model = nn.Linear(8, 4).to(device)
        flat = torch.zeros(36, device=device)
        model.weight.grad, model.bias.grad = flat[:32].view(4, 8), flat[32:]
        cause = "data_ptr() of the tensor tells where a view starts, not whose memory it is"
        got = answer.state_bytes(model).gradients
        check_equal(got, 144, "bytes of two gradients in one flat buffer", cause=cause)
        cause = "data_ptr() is 0 for every meta tensor"
        got = answer.state_bytes(nn.Linear(8, 4, device="meta")).parameters
        check_equal(got, 144, "bytes of parameters on the meta device", cause=cause)

    @pytest.mark.survives
    def test_counts_state_that_is_a_gradient_once_and_no_hyperparameters(self, answer, device):
        model = nn.Linear(8, 4, bias=False).to(device)
        optimizer = History(model.parameters())
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.state[model.weight] = {"last": model.weight.grad, "own": torch.zeros(3)}
        cause = "the optimizer's state starts a count of its own"
        got = tuple(answer.state_bytes(model, optimizer))
        check_equal(got, (128, 128, 0, 12), "state that holds the gradient itself", cause=cause)
        rate = torch.tensor(0.1)
        adam = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
        cause = "param_groups are counted, where optimizer.state is asked for"
        got = answer.state_bytes(nn.ReLU(), adam).optimizer
        check_equal(got, 0, "optimizer bytes with a tensor as learning rate", cause=cause)


_guess = "the state is guessed from the optimizer's kind, or its small tensors are left out"
