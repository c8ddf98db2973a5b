"""Bytes of training state, each compared with a formula."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from kit.laws.bars import bar
from kit.laws.scenarios import scenarios
from kit.laws.snapshot import Snapshot


@scenarios("bytes of (parameters, gradients, buffers, optimizer)")
def counts(answer, device, name, want, model, optimizer=None):
    return tuple(answer.state_bytes(model, optimizer)), want


def trained(*widths):
    """Linear layers, with a gradient for each parameter."""
    model = nn.Sequential(*map(nn.Linear, widths, widths[1:]))
    model(torch.ones(widths[0])).sum().backward()
    return model


def with_buffers(model, **tensors):
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


KINDS = ("parameter", "gradient", "buffer", "optimizer state")


def on_one_storage(*kinds):
    """Bytes, a model and an optimizer; each kind has a slice of one storage, in its own module."""
    model = nn.ModuleList(nn.ParameterList([torch.zeros(8).double()]) for _ in kinds)
    flat, want = torch.zeros(24).double(), [2 * 64, 0, 0, 0]
    optimizer = Optimizer(model.parameters(), {})
    for n, (module, kind) in enumerate(zip(model, kinds, strict=True)):
        part = flat[8 * n :][:8]
        if kind == "parameter":
            module.append(nn.Parameter(part))
        elif kind == "gradient":
            module[0].grad = part
        elif kind == "buffer":
            module.register_buffer("buffer", part.view(torch.int32))
        else:
            optimizer.state[module[0]] = {"moment": part}
    want[min(map(KINDS.index, kinds))] += flat.nbytes
    return tuple(want), model, optimizer


class TestPart1StateBytes:
    @pytest.mark.works("state_bytes", "optimizer")
    @counts("all of `optimizer.state` counts, whatever its param_groups or state_dict() say")
    def test_counts_parameters_gradients_and_optimizer_state(self):
        """Adam: two moments for each of 70 parameters, a float32 step counter for each tensor."""
        adam = Adam((model := trained(13, 5)).parameters())
        yield "Adam before its first step", (280, 280, 0, 0), model, adam
        adam.register_state_dict_post_hook(lambda *_: {"state": {}, "param_groups": []})
        adam.step()
        yield "Adam after it, unsaved", (280, 280, 0, 2 * 280 + 2 * 4), model, adam
        both = [*model.parameters(), *trained(4, 2).parameters()]  # a loss has parameters too
        (momentum := SGD(both, 0.1, momentum=0.9)).step()
        momentum.param_groups[0]["params"].pop()
        yield "of two models, one parameter not in a group", (280, 280, 0, 320), model, momentum

    @pytest.mark.exact("state_bytes", "parameters")
    @counts("parameters are left out, or counted by their number and not by their bytes")
    def test_counts_every_parameter(self):
        deep = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 3)), "head": nn.Linear(3, 1)})
        yield "layers within layers", (4 * (9 + 4), 0, 0, 0), deep
        numbers = {torch.bfloat16: 7, torch.complex64: 5, torch.float64: 3, torch.int8: 11}
        zeros = [nn.Parameter(torch.zeros(n, dtype=t), False) for t, n in numbers.items()]
        frozen = nn.ParameterList(zeros)
        frozen.register_state_dict_post_hook(lambda _, state, *more: state.clear())
        want = (2 * 7 + 8 * 5 + 8 * 3 + 11, 0, 0, 0)
        yield "many dtypes, frozen, and not in the state dict", want, frozen

    @pytest.mark.exact("state_bytes", "gradients")
    @counts("not every parameter's p.grad is counted, or not by its own dtype")
    def test_counts_every_gradient_that_is_there(self):
        model = nn.Sequential(trained(5, 3), nn.Linear(3, 6, bias=False))
        model[0].requires_grad_(False)  # it keeps the gradients that it has
        yield "one frozen layer has gradients", (4 * (18 + 18), 4 * 18, 0, 0), model
        weight = (model := trained(5, 3))[0].weight
        weight.data = weight.data.bfloat16()
        yield "cast after the backward pass", (2 * 15 + 4 * 3, 4 * 18, 0, 0), model

    @pytest.mark.exact("state_bytes", "buffers")
    @counts("buffers are left out, or other tensors are counted")
    def test_counts_every_buffer(self):
        """Batch norm: mean and variance of 6 floats, an int64 counter; a non-persistent cache."""
        model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(6)))
        model[0][0].register_buffer("cache", torch.zeros(11), persistent=False)
        with_buffers(model[0], none=None, mask=torch.zeros(17).bool(), roots=torch.zeros(9) * 1j)
        yield "within layers", (4 * 12, 0, 4 * 12 + 8 + 4 * 11 + 17 + 8 * 9, 0), model

    @pytest.mark.exact("state_bytes", "sharing")
    @counts("kinds are counted in another order, or tensors are compared and not storages")
    def test_counts_a_storage_once_under_the_first_kind(self):
        """GPT ties its head to the embedding; DDP's gradients are slices of one tensor."""
        embedding, head, twin = (nn.Embedding(19, 6) for _ in range(3))
        head.weight, twin.weight = embedding.weight, nn.Parameter(embedding.weight.detach())
        yield "tied in two ways", (4 * 19 * 6, 0, 0, 0), nn.ModuleList([embedding, head, twin])
        for pair in product(KINDS, repeat=2):
            yield f"one storage: {' and '.join(pair)}", *on_one_storage(*pair)

    @pytest.mark.exact("state_bytes", "sharing")
    @counts("the size is the tensor's, not its storage's")
    def test_counts_a_view_as_the_storage_behind_it(self):
        row, large, odd = torch.zeros(3, 1), torch.zeros(500), torch.zeros(100).double()
        yield "an expanded row", (0, 0, 12, 0), with_buffers(nn.Module(), wide=row.expand(3, 99))
        slices = with_buffers(nn.Module(), first=large[:1], second=large[1:3], odd=odd[1::2])
        yield "slices of large tensors", (0, 0, 4 * 500 + 8 * 100, 0), slices

    @pytest.mark.saves("state_bytes", "gradients")
    @bar("gradients after set_to_none=True", "no gradient, no bytes", "as large as parameters")
    def test_shows_what_set_to_none_saves(self, device):
        """zero_grad(set_to_none=True) frees P bytes, set_to_none=False none: bar 0 against P."""
        (model := trained(16, 64, 8).to(device)).zero_grad(set_to_none=True)
        return lambda module: module.state_bytes(model).gradients, 0, 4 * (17 * 64 + 65 * 8)

    @pytest.mark.survives("state_bytes", 1)
    @counts("tensors deep in the state are not found")
    def test_finds_optimizer_state_however_deep(self):
        """As L-BFGS and Shampoo have it; a moment of 8-bit Adam is uint8."""
        deep = [torch.zeros(5), {"deep": (torch.zeros(7).double(), None)}]
        optimizer = Optimizer((model := nn.Linear(2, 2)).parameters(), {})
        state = {"step": torch.zeros(3), "lr": 0.1, "old": deep, "q": torch.zeros(13).byte()}
        optimizer.state[model.weight] = state
        want = (24, 0, 0, 4 * (3 + 5) + 8 * 7 + 13)
        yield "a tuple in a dict in a list", want, model, optimizer

    @pytest.mark.survives("state_bytes", 2)
    @counts("more than optimizer.state is counted")
    def test_counts_no_hyperparameters(self):
        adam = Adam((model := trained(3, 4)).parameters(), lr=torch.tensor(0.1), foreach=False)
        yield "a tensor as learning rate", (64, 64, 0, 0), model, adam

    @pytest.mark.survives("state_bytes", 3)
    @counts("on meta each address is 0: all count as one, or none counts; or views count again")
    def test_counts_tensors_on_the_meta_device(self):
        flat = torch.zeros(10, device="meta")
        model = with_buffers(nn.Linear(8, 4, device="meta"), part=flat[2:7], flat=flat)
        yield "a layer and buffers", (4 * 36, 0, 4 * 10, 0), model

    @pytest.mark.survives("state_bytes", 4)
    def test_changes_nothing(self, answer, device):
        model = trained(13, 5).to(device)
        before = Snapshot(model, optimizer := Adam(model.parameters()))
        answer.state_bytes(model, optimizer)
        cause = "a step is taken, gradients are cleared, or state is made"
        before.check_unchanged("the count", cause=cause)
