"""Bytes that autograd saves, each compared with a formula."""

from functools import partial, reduce
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from kit.laws.bars import bar
from kit.laws.checks import check_equal
from kit.laws.endings import ENDINGS, check_ending
from kit.laws.scenarios import scenarios
from kit.laws.toys import mlp
from kit.memory.ruler import collector_paused, measure


@scenarios("saved bytes")
def counts(answer, device, name, want, forward, model=None):
    return answer.saved_bytes(forward, nn.Sequential() if model is None else model), want


@scenarios("gradients of two backward passes")
def gradients(answer, device, name, want, x, forward):
    results = []
    answer.saved_bytes(lambda: results.append(forward()), nn.Module())
    first = grad(results[0].sum(), x, retain_graph=True)[0]
    return [first, grad(results[0].sum(), x)[0]], [want, want]


@scenarios("whether the dropped result is alive")
def alive(answer, device, name, forward):
    storages = []

    def run():
        result = forward()
        storages.append(ref(result.untyped_storage()))
        return result

    with collector_paused():
        answer.saved_bytes(run, nn.Module())
        return storages[0]() is not None, False


def leaf(*shape, **options):
    return torch.ones(*shape, requires_grad=True, **options)


def one_is_dropped(x):
    """Three graphs, of which the first is gone before the last begins."""
    gone, kept = x.exp(), x.sin()
    del gone
    return kept, (x * 2).cos()


class TestPart2SavedBytes:
    @pytest.mark.works("saved_bytes", "held")
    @counts("too few: a graph is gone or not found; too many: weights, or what was saved before")
    def test_counts_what_graphs_still_hold(self):
        """Two layers: the input (11 x 7) for a weight, the ReLU's result (11 x 13) for the next."""
        layers = nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5)
        model, rows = nn.Sequential(*layers), torch.ones(11, 7)
        yield "two layers", 4 * 11 * (7 + 13), lambda: model(rows), model
        x, mask, kept = leaf(4, 9), torch.ones(4, 9) > 0, []
        yield "a mask, 1 byte each", 36, lambda: x.masked_fill(mask, 0.0)
        yield "what was saved before `forward`", 4 * 36, x.exp().tanh
        keep = lambda y: kept.append(y) or y  # noqa: E731
        yield "an auxiliary loss", 4 * 36 + 4 * 36, lambda: (keep(x.sigmoid().mean()), x.tanh())[1]
        with torch.no_grad():
            yield "the caller's no_grad", 0, x.exp

    @pytest.mark.exact("saved_bytes", "sharing")
    @counts("saved tensors are counted, or elements of a view, and not storages")
    def test_counts_a_storage_once_and_in_full(self):
        x, w, row = leaf(10), leaf(6), torch.ones(1, 6)
        yield "a result saved three times", 4 * 10, lambda: (y := x.sigmoid()) * y
        table, large = torch.ones(6, 50), torch.ones(500, 6, dtype=torch.float64)
        yield "two halves", 4 * 6 * 50, lambda: [w * half[:, 0] for half in table.chunk(2, 1)]
        yield "one row of a large tensor", 8 * 500 * 6, lambda: w * large[:1]
        yield "an expanded row", 4 * 6, lambda: w * row.expand(40, 6)
        residual = lambda y, _: y + y.exp()  # noqa: E731
        yield "40 residual blocks", 40 * 4 * 10, lambda: reduce(residual, range(40), x)

    @pytest.mark.exact("saved_bytes", "left out")
    @counts("go by the storages that the model has after `forward`, not by type or name")
    def test_never_counts_parameters_or_buffers(self):
        """Saved: x (5 x 6), the input of batch norm and two statistics of 8; no running mean."""
        layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        layers[2].requires_grad_(False).register_buffer("none", None)
        x, row, body, loss = leaf(5, 6), leaf(6), nn.Linear(6, 8, bias=False), nn.Linear(8, 2)
        yield "a frozen layer", 4 * (5 * 6 + 5 * 8 + 2 * 8), lambda: layers(x), layers
        views = lambda: [*body.weight.chunk(2), body.weight.detach(), body.weight.data]  # noqa: E731
        yield "halves, and data", 4 * 30, lambda: [F.linear(x, w) for w in views()], body
        body.register_buffer("mask", torch.ones(6), persistent=False)
        yield "a non-persistent buffer", 0, lambda: row * body.mask, body
        late = lambda: (setattr(body, "late", nn.Parameter(torch.ones(6))), row * body.late)[1]  # noqa: E731
        yield "a parameter that forward makes", 4 * 6, late, body
        body.weight.grad = torch.ones(8, 6)
        yield "a gradient", 4 * 8 * 6, lambda: row * body.weight.grad[0], body
        scaled = lambda: loss(body(x)) * loss.bias  # noqa: E731
        size = 4 * (5 * 6 + 5 * 8 + 8 * 2 + 5 * 2 + 2)
        yield "the weights of a loss are not the model's", size, scaled, body

    @pytest.mark.exact("saved_bytes", "after")
    @gradients("the hooks give back another tensor, or only once")
    def test_lets_the_caller_go_backward(self):
        x = torch.tensor([1.0, 4.0, 16.0], requires_grad=True)
        square = torch.arange(9.0).view(3, 3)
        both = lambda: square @ x + square.t() @ x  # noqa: E731
        yield "a square matrix and its transpose", (square + square.t()).sum(0), x, both
        first = torch.stack((x.cos(), -2 * (2 * x).sin())).sum(0).detach()
        yield "one graph is gone before the next begins", first, x, lambda: sum(one_is_dropped(x))

    @pytest.mark.exact("saved_bytes", "after")
    @pytest.mark.parametrize("end", ENDINGS)
    def test_puts_the_callers_hooks_back(self, answer, device, end):
        runs, x = [], leaf(12, device=device)
        once = lambda forward: (runs.append(1), forward())[1]  # noqa: E731
        check_ending(lambda f: answer.saved_bytes(partial(once, f), nn.Module()), end, x.exp)
        check_equal(len(runs), 1, "calls of forward", cause="after an error it runs again")

    @pytest.mark.saves("saved_bytes", "held")
    @bar("saved with a checkpoint per block", "5 blocks x one input", "what it drops is counted")
    def test_shows_what_checkpointing_saves(self, reference, device):
        """Per block a checkpoint holds its input only: bar = blocks x one input."""
        blocks = nn.ModuleList(mlp(32, 128, 32, device=device) for _ in range(5))
        remat = [partial(checkpoint, block, use_reentrant=False) for block in blocks]
        x = leaf(24, 32, device=device)

        def saved(layers, module):
            return module.saved_bytes(lambda: reduce(lambda y, layer: layer(y), layers, x), blocks)

        return partial(saved, remat), 5 * x.nbytes, saved(blocks, reference)

    @pytest.mark.survives("saved_bytes", 1)
    @counts("what was saved is counted, not what a graph still holds, at the size that it has then")
    def test_does_not_count_a_graph_that_is_gone(self):
        x = leaf(64)
        yield "a metric", 4 * 64, lambda: (x.exp().sum().item(), x.tanh())[1]
        yield "one of three, before the last begins", 4 * 64 + 4 * 64, lambda: one_is_dropped(x)
        yield "its tensor lives on", 4 * 64, lambda: (x.square().sum().item(), x.tanh())[1]
        yield "its tensor is saved twice", 4 * 64, lambda: (x.sin(), x.cos().sum().item())[0]
        freed = lambda: ((y := x.sigmoid()).sum(), y.untyped_storage().resize_(0))[0]  # noqa: E731
        yield "a storage that is freed, as FSDP does", 0, freed
        yield "backward has run", 0, lambda: ((y := x.exp().tanh()).sum().backward(), y)[1]

    @pytest.mark.survives("saved_bytes", 2)
    @alive("a hook, or what it uses, keeps what was returned or saved")
    def test_lets_go_of_the_graph(self):
        """exp saves its own result, whose grad_fn holds what it saved: that must be no cycle."""
        yield "exp", leaf(32).exp

    @pytest.mark.survives("saved_bytes", 3)
    def test_leaves_memory_and_gradients_as_forward_does(self, answer, device):
        model, x = mlp(4, 3, 2, device=device), torch.ones(5, 4, device=device)

        def forward():
            model(x).sum().backward()
            return kept.append(model(x))

        def left_by(run):
            model.zero_grad()
            kept.clear()
            reading = measure(lambda: run(forward), device, known=[model, x])
            gradients = [p.grad for p in model.parameters()]
            return {"bytes alive after it": reading.retained, "gradients": gradients}

        kept = []
        want = left_by(lambda forward: forward())
        got = left_by(lambda forward: answer.saved_bytes(forward, model))
        check_equal(got, want, "", cause="copies are saved, or gradients are cleared")
