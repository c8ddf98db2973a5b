"""Bytes that autograd saves, each compared with a formula."""

from contextlib import suppress
from functools import partial, reduce
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.laws.bars import bar
from kit.laws.checks import check_equal, check_raises
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


@scenarios("is the dropped result alive")
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
    @counts("below: a graph is gone, or not found; above: saved before `forward`, weights, copies")
    def test_counts_what_graphs_still_hold(self):
        """Two layers: the input (11 x 7) for a weight, the ReLU's result (11 x 13) for the next."""
        layers = nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5)
        model, rows = nn.Sequential(*layers), torch.ones(11, 7)
        yield "two layers", 4 * 11 * (7 + 13), lambda: model(rows), model
        x, mask, two = leaf(4, 9), torch.ones(4, 9) > 0, torch.tensor(2.0)
        yield "a mask, 1 byte each", 36, lambda: x.masked_fill(mask, 0.0)
        yield "a number", 4, lambda: x * two
        yield "what the step before has saved", 4 * 36, x.exp().tanh
        kept = []
        keep = lambda y: kept.append(y) or y  # noqa: E731
        yield "deep in the result", 4 * 36, lambda: {"out": [(x.exp(), None)]}
        yield "a loss that is kept, and not returned", 4 * 36, lambda: kept.append(x.exp())
        yield "an auxiliary loss", 4 * 36 + 4 * 36, lambda: (keep(x.sigmoid().mean()), x.tanh())[1]
        slope = lambda: grad(x.sin().sum(), x, create_graph=True)  # noqa: E731
        yield "a gradient with a graph: of x, and the 1 that it starts from", 4 * 36 + 4, slope

    @pytest.mark.exact("saved_bytes", "sharing")
    @counts("counted are tensors, a view's elements, a copy, or storages by address, 0 on meta")
    def test_counts_a_storage_once_and_in_full(self):
        x, w, row = leaf(10), leaf(6), torch.ones(1, 6)
        thrice = lambda: ((y := x.sigmoid()) * y, y * y.flip(0).detach().flip(0))  # noqa: E731
        yield "a result saved three times, and a copy", 4 * 10 + 4 * 10, thrice
        table, large = torch.ones(6, 50), torch.ones(500, 6, dtype=torch.float64)
        yield "two halves", 4 * 6 * 50, lambda: [w * half[:, 0] for half in table.chunk(2, 1)]
        yield "one row of a large tensor", 8 * 500 * 6, lambda: w * large[:1]
        tokens = torch.ones(500, dtype=torch.int64)
        yield "the first 3 of many tokens", 8 * 500, lambda: F.embedding(tokens[:3], x.view(5, 2))
        layer, there = nn.Linear(6, 3, device="meta"), leaf(5, 6, device="meta")
        yield "on meta", 4 * 5 * (6 + 3), lambda: layer(there).tanh(), layer
        yield "an expanded row", 4 * 6, lambda: w * row.expand(40, 6)
        residual = lambda y, _: y + y.exp()  # noqa: E731
        yield "40 residual blocks", 40 * 4 * 10, lambda: reduce(residual, range(40), x)

    @pytest.mark.exact("saved_bytes", "left out")
    @counts("go by the storages of parameters() and buffers() after forward, hidden ones too")
    def test_never_counts_parameters_or_buffers(self):
        """Saved: x (5 x 6), the input of batch norm and two statistics of 8; no running mean."""
        layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        layers[2].requires_grad_(False).register_buffer("none", None)
        x, row, body, loss = leaf(5, 6), leaf(6), nn.Linear(6, 8, bias=False), nn.Linear(8, 2)
        yield "a frozen layer", 4 * (5 * 6 + 5 * 8 + 2 * 8), lambda: layers(x), layers
        views = lambda: [*body.weight.chunk(2), body.weight.detach(), body.weight.data]  # noqa: E731
        yield "halves, and data", 4 * 30, lambda: [F.linear(x, w) for w in views()], body
        body.register_buffer("mask", torch.ones(6), persistent=False)
        yield "a hidden buffer", 0, lambda: row * body.mask, body
        anew = lambda: (row * body.mask, body.register_buffer("mask", torch.ones(6)))[0]  # noqa: E731
        yield "a buffer that is replaced after its use", 4 * 6, anew, body
        late = lambda: (setattr(body, "late", nn.Parameter(torch.ones(6))), row * body.late)[1]  # noqa: E731
        yield "a parameter that forward makes", 4 * 6, late, body
        held = lambda: (setattr(body, "_last", x.exp()), body._last.sin())[1]  # noqa: E731
        yield "an activation kept as an attribute", 4 * 30, held, body
        scaled = lambda: loss(body(x)) * loss.bias  # noqa: E731
        size = 4 * (5 * 6 + 5 * 8 + 8 * 2 + 5 * 2 + 2)
        yield "a loss has weights, a view of one and one itself", size, scaled, body

    @pytest.mark.exact("saved_bytes", "after")
    @gradients("the hooks give back another tensor, or give it back once")
    def test_lets_the_caller_go_backward(self):
        x = torch.tensor([1.0, 4.0, 16.0], requires_grad=True)
        number = x.detach()
        z = torch.complex(number, 3 * number)
        conjugate = lambda: (x * z.conj()).imag + 2 * (x * z).imag  # noqa: E731
        yield "a lazy conjugate, and what it is of", 3 * number, x, conjugate
        square = torch.arange(9.0).view(3, 3)
        both = lambda: square @ x + square.t() @ x  # noqa: E731
        yield "a square matrix and its transpose", (square + square.t()).sum(0), x, both
        first = torch.stack((x.cos(), -2 * (2 * x).sin())).sum(0).detach()
        yield "a graph is gone when another begins", first, x, lambda: sum(one_is_dropped(x))

    @pytest.mark.exact("saved_bytes", "after")
    @pytest.mark.parametrize("end", ENDINGS)
    def test_puts_the_callers_hooks_back(self, answer, device, end):
        packed, runs, x, model = [], [], leaf(12, device=device), nn.Module()
        for name in ("outer", "inner"):
            hooks = saved_tensors_hooks(lambda t, n=name: packed.append(n) or t, lambda t: t)
            hooks.__enter__()
        once = lambda forward: (runs.append(1), forward())[1]  # noqa: E731
        check_ending(lambda f: answer.saved_bytes(partial(once, f), model), end, x.exp)
        check_equal(len(runs), 1, "calls of forward", cause="what failed is tried again")
        packed.clear()
        for _ in ("inner", "outer"):
            x.exp()
            with suppress(RuntimeError):  # there are none
                hooks.__exit__()
        what, known = "hooks of the caller's that are called", {"a hook is left behind": ["inner"]}
        cause = "hooks are removed that were there before, or come back in another order"
        check_equal(packed, ["inner", "outer"], what, cause=cause, suspects=known)
        inside = lambda: (x.exp(), answer.saved_bytes(x.tanh, model), x.sin())  # noqa: E731
        got, cause = answer.saved_bytes(inside, model), "a call inside ends the outer count"
        check_equal(got, 2 * x.nbytes, "bytes around another call", cause=cause)

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
    @counts("ask what a graph still holds at the end, and how large it is then, not what was saved")
    def test_does_not_count_a_graph_that_is_gone(self):
        def emptied(saved):
            """A copy of what was saved, which is given back by hand, as FSDP does."""
            copy = saved.clone()
            saved.untyped_storage().resize_(0)
            return copy

        x = leaf(64)
        yield "a metric", 4 * 64, lambda: (x.exp().sum().item(), x.tanh())[1]
        yield "one of three, before the last begins", 4 * 64 + 4 * 64, lambda: one_is_dropped(x)
        yield "its tensor lives on", 4 * 64, lambda: (x.square().sum().item(), x.tanh())[1]
        around = lambda: (x.cos().sum().item(), x.sin(), x.cos().sum().item())[1]  # noqa: E731
        yield "metrics before and after, of what is saved", 4 * 64, around
        yield "a storage that was emptied", 4 * 64, lambda: emptied(x.sigmoid()).tanh()
        back = lambda **keep: ((y := x.exp().tanh()).sum().backward(**keep), y)[1]  # noqa: E731
        yield "it went backward", 0, back
        yield "it may go backward again", 2 * 4 * 64, partial(back, retain_graph=True)

    @pytest.mark.survives("saved_bytes", 2)
    @counts("what was there before is left out")
    def test_counts_saved_inputs(self):
        x, scale = leaf(10), leaf(1)
        yield "an input and a scale", 4 * 10 + 4, lambda: x * scale
        model = nn.Linear(10, 1, bias=False)
        model.weight.grad = torch.ones(1, 10)
        yield "a gradient", 4 * 10, lambda: x * model.weight.grad, model

    @pytest.mark.survives("saved_bytes", 3)
    @alive("a hook, or what it uses, keeps what was returned or saved")
    def test_lets_go_of_the_graph(self):
        """exp saves its own result, whose grad_fn holds what it saved: no cycle may come of it."""
        x = leaf(32)
        yield "exp", x.exp
        yield "exp of complex numbers", leaf(32, dtype=torch.complex64).exp
        in_place = lambda: (y := torch.ones(32)).add_(y * x)  # noqa: E731
        yield "a residual in place: what was saved has a graph by then", in_place

    @pytest.mark.survives("saved_bytes", 4)
    def test_changes_nothing_that_forward_does_not(self, answer, device):
        model = mlp(4, 3, 2, device=device, activation=nn.Dropout)
        x, kept, modes = torch.ones(5, 4, device=device), [], []

        def forward(error):
            modes.append(torch.is_grad_enabled())
            torch.set_grad_enabled(True)
            kept.append(model(x))
            model(x).sum().backward()
            torch.set_grad_enabled(not modes[-1])
            model[1].eval()
            if error:
                raise error

        def left_by(run, error, mode):
            draw.seed(5)
            model.train()[0].eval()  # one layer is frozen, the others train
            model.zero_grad()
            model[0].weight.grad = torch.ones_like(model[0].weight)
            step, alive = lambda: run(partial(forward, error)), None
            with torch.set_grad_enabled(mode):
                with suppress(KeyError):
                    alive = measure(step, device, known=[model, x]).retained
                return {
                    "bytes alive while the result is": alive,
                    "grad mode": torch.is_grad_enabled(),
                    "training": [layer.training for layer in model],
                    "gradients": [p.grad for p in model.parameters()],
                    "the next random numbers": draw.next_random(device),
                }

        cause = "copies are saved, or more than graphs hold; gradients go, or a mode is put back"
        for error, mode in ((None, False), (KeyError, True)):
            want = left_by(lambda forward: forward(), error, mode)
            got = left_by(lambda forward: answer.saved_bytes(forward, model), error, mode)
            turned = "gradients are turned on or off for it"
            check_equal(modes[-1], mode, "grad mode in `forward`", cause=turned)
            draw.seed(5)
            again = {**want, "the next random numbers": draw.next_random(device)}
            suspects = {"the random state is put back to where it was before": again}
            check_equal(got, want, "", cause=cause, suspects=suspects)

    @pytest.mark.survives("saved_bytes", "Raises")
    def test_refuses_what_is_no_model(self, answer):
        runs = []
        call = lambda: answer.saved_bytes(lambda: runs.append(1), [nn.ReLU()])  # noqa: E731
        check_raises(call, TypeError, mentions=["list"], when="for a list as model")
        check_equal(runs, [], "runs of forward", cause="the model is checked after forward")
