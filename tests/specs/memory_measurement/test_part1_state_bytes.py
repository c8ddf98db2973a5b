"""Bytes of training state, each compared with a formula."""

from collections import OrderedDict
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from kit.laws.bars import bar
from kit.laws.checks import check_raises
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


def with_state(model, **state):
    optimizer = Optimizer(model.parameters(), {})
    optimizer.state[next(model.parameters())] = state
    return optimizer


def with_buffers(model=None, **tensors):
    model = model or nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


KINDS = ("parameter", "gradient", "buffer", "optimizer state", "other model's parameter")


def on_one_storage(*kinds):
    """Bytes, and a model and an optimizer with slices of one storage, each as one of the kinds.

    Each kind is in a module of its own.
    """
    model = nn.ModuleList(nn.ParameterList([torch.zeros(8).double()]) for _ in kinds)
    flat, want = torch.zeros(24).double(), [2 * 64, 0, 0, 0, 0]
    optimizer = Optimizer(model.parameters(), {})
    for n, (module, kind) in enumerate(zip(model, kinds, strict=True)):
        part = flat[8 * n :][:8]
        if kind == "parameter":
            module.append(nn.Parameter(part))
        elif kind == "gradient":
            module[0].grad = part
        elif kind == "buffer":
            module.register_buffer("buffer", part.view(torch.int32))
        elif kind == "optimizer state":
            optimizer.state[module[0]] = {"moment": part}
        else:
            optimizer.add_param_group({"params": [nn.Parameter(part)]})
    want[min(map(KINDS.index, kinds))] += flat.nbytes
    return tuple(want[:4]), model, optimizer


class TestPart1StateBytes:
    @pytest.mark.works("state_bytes", "optimizer")
    @counts("read all of `optimizer.state`: not by its groups, its kind or its state_dict()")
    def test_counts_parameters_gradients_and_optimizer_state(self):
        """Adam: two moments for each of 70 parameters, a float32 step counter for each tensor."""
        adam = Adam((model := trained(13, 5)).parameters())
        yield "Adam before its first step", (280, 280, 0, 0), model, adam
        adam.register_state_dict_post_hook(lambda *_: {"state": {}, "param_groups": []})
        adam.step()
        yield "Adam after it, unsaved", (280, 280, 0, 2 * 280 + 2 * 4), model, adam
        both = [*model.parameters(), *trained(4, 2).parameters()]  # a loss has parameters too
        (momentum := SGD(both, 0.1, momentum=0.9)).step()
        yield "momentum of two models", (280, 280, 0, 280 + 40), model, momentum
        momentum.param_groups[0]["params"].pop()
        yield "one parameter has left the groups", (280, 280, 0, 280 + 40), model, momentum

    @pytest.mark.exact("state_bytes", "parameters")
    @counts("parameters are left out, or those of an earlier call are counted")
    def test_counts_every_parameter(self):
        deep = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 3)), "head": nn.Linear(3, 1)})
        yield "layers within layers", (4 * (9 + 4), 0, 0, 0), deep
        numbers = {torch.bfloat16: 7, torch.complex64: 5, torch.float64: 3, torch.int8: 11}
        zeros = [nn.Parameter(torch.zeros(n, dtype=t), False) for t, n in numbers.items()]
        frozen = nn.ParameterList(zeros)
        frozen.register_state_dict_post_hook(lambda _, state, *more: state.clear())
        want = (2 * 7 + 8 * 5 + 8 * 3 + 11, 0, 0, 0)
        yield "many dtypes, frozen, and not in the state dict", want, frozen
        yield "no module inside", (0, 0, 0, 0), (model := nn.Sequential())
        model.append(with_buffers(trained(5, 2), own=torch.zeros(3)))
        yield "the same with a layer, and buffers", (48, 48, 12, 0), model

    @pytest.mark.exact("state_bytes", "gradients")
    @counts("p.grad is not asked of every parameter")
    def test_counts_every_gradient_that_is_there(self):
        model = nn.Sequential(trained(5, 3), nn.Linear(3, 6, bias=False))
        model[0].requires_grad_(False)  # it keeps the gradients that it has
        yield "one frozen layer has gradients", (4 * (18 + 18), 4 * 18, 0, 0), model
        weight = (model := trained(5, 3))[0].weight
        weight.data = weight.data.bfloat16()
        yield "cast after the backward pass", (2 * 15 + 4 * 3, 4 * 18, 0, 0), model

    @pytest.mark.exact("state_bytes", "buffers")
    @counts("buffers are left out, or tensors counted that are no buffers")
    def test_counts_every_buffer(self):
        """Batch norm: mean and variance of 6 floats, an int64 counter; and a hidden cache."""
        model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(6)))
        model[0][0].register_buffer("cache", torch.zeros(11), persistent=False)
        with_buffers(model[0], none=None, mask=torch.zeros(17).bool(), roots=torch.zeros(9) * 1j)
        model[0].seen, model[0][0].last = [torch.zeros(3)], torch.zeros(5)  # are no buffers
        yield "within layers", (4 * 12, 0, 4 * 12 + 8 + 4 * 11 + 17 + 8 * 9, 0), model

    @pytest.mark.exact("state_bytes", "sharing")
    @counts("kinds are counted in another order, or something else than the storage decides")
    def test_counts_a_storage_once_under_the_first_kind(self):
        """As GPT ties its head, and as DDP keeps gradients: slices of one tensor."""
        embedding, head, twin = (nn.Embedding(19, 6) for _ in range(3))
        head.weight, twin.weight = embedding.weight, nn.Parameter(embedding.weight.detach())
        yield "tied in two ways", (4 * 19 * 6, 0, 0, 0), nn.ModuleList([embedding, head, twin])
        for pair in product(KINDS, repeat=2):
            yield f"one storage: {' and '.join(pair)}", *on_one_storage(*pair)

    @pytest.mark.saves("state_bytes", "gradients")
    @bar("gradients after set_to_none=True", "no gradient, no bytes", "as large as parameters")
    def test_shows_what_set_to_none_saves(self, device):
        """zero_grad(set_to_none=True) frees P bytes, set_to_none=False none: bar 0 against P."""
        (model := trained(16, 64, 8).to(device)).zero_grad(set_to_none=True)
        return lambda module: module.state_bytes(model).gradients, 0, 4 * (17 * 64 + 65 * 8)

    @pytest.mark.survives("state_bytes", 1)
    @counts("the size is taken from the tensor, and not from its storage")
    def test_counts_a_view_as_the_storage_behind_it(self):
        yield "an expanded row", (0, 0, 12, 0), with_buffers(wide=torch.zeros(3, 1).expand(3, 99))
        large, odd = torch.zeros(500), torch.zeros(100).double()
        slices = with_buffers(first=large[:1], second=large[1:3], odd=odd[1::2])
        yield "slices of large tensors", (0, 0, 4 * 500 + 8 * 100, 0), slices
        yield "a slice without elements", (0, 0, 4 * 50, 0), with_buffers(none=torch.zeros(50)[:0])

    @pytest.mark.survives("state_bytes", 2)
    @counts("what lies deep in the state, or under a key that is no parameter, is not looked at")
    def test_finds_optimizer_state_however_deep(self):
        deep = [torch.zeros(5), {"deep": (torch.zeros(7, dtype=torch.float64), None)}]
        model, twins = nn.Linear(2, 2), ([torch.zeros(3)], [torch.zeros(3)])
        numbers = {"step": torch.zeros(3, device="cpu"), "lr": 0.1, "pair": (3, torch.zeros(11))}
        optimizer = with_state(model, **numbers, old=deep, twins=twins)
        yield "lists and tuples", (24, 0, 0, 4 * (3 + 11 + 5 + 6) + 8 * 7), model, optimizer
        ordered, codes = OrderedDict(m=torch.zeros(9)), torch.zeros(13, dtype=torch.uint8)
        optimizer = with_state(model, ordered=ordered, named=torch.aminmax(torch.zeros(2)), q=codes)
        optimizer.state["shared"] = torch.zeros(5)
        want = (24, 0, 0, 4 * 9 + 2 * 4 + 13 + 4 * 5)
        yield "an ordered dict, a named tuple, 8-bit codes, no dict", want, model, optimizer

    @pytest.mark.survives("state_bytes", 3)
    @counts("something else than optimizer.state is counted")
    def test_counts_no_hyperparameters(self):
        adam = Adam((model := trained(3, 4)).parameters(), lr=torch.tensor(0.1), foreach=False)
        yield "a tensor as learning rate", (64, 64, 0, 0), model, adam

    @pytest.mark.survives("state_bytes", 4)
    @counts("the address of each is 0: all count as one, or none counts; or views count again")
    def test_counts_tensors_on_the_meta_device(self):
        flat, more = torch.zeros(10, device="meta"), nn.Parameter(torch.zeros(4, device="meta"))
        model = with_buffers(nn.Linear(8, 4, device="meta"), part=flat[2:7], flat=flat, more=more)
        state = with_state(nn.Linear(1, 1), first=torch.zeros_like(more), second=flat.clone())
        yield "a layer, buffers and state", (4 * 36, 0, 40 + 16, 16 + 40), model, state

    @pytest.mark.survives("state_bytes", 5)
    def test_changes_nothing(self, answer, device):
        model = trained(13, 5).to(device)
        before = Snapshot(model, optimizer := Adam(model.parameters()))
        answer.state_bytes(model, optimizer)
        cause = "a step is taken, gradients are cleared, or state is made"
        before.check_unchanged("the count", cause=cause)

    @pytest.mark.survives("state_bytes", "Raises")
    def test_refuses_what_is_no_model_or_optimizer(self, answer):
        """A likeness has all that is read of a model and of an optimizer."""
        model = nn.Linear(2, 2)
        likeness = SimpleNamespace(parameters=list, buffers=list, state={}, param_groups=[])
        likeness.module, likeness.optimizer = model, SGD(model.parameters())
        for bad in (({},), (likeness,), (model, [1.5]), (model, []), (model, likeness)):
            call, name = partial(answer.state_bytes, *bad), type(bad[-1]).__name__
            check_raises(call, TypeError, mentions=[name], when=f"for a {name}")
