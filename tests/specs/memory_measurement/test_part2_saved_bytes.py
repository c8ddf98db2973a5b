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
from kit.laws.checks import check_bar, check_equal, check_raises, with_cause
from kit.laws.endings import ENDINGS, check_ending
from kit.laws.scenarios import scenarios
from kit.laws.toys import mlp
from kit.memory.ruler import collector_paused, measure
from specs.memory_measurement.failing import check_leaves_nothing


@scenarios("saved bytes")
def counts(answer, device, name, want, forward, model=None):
    return answer.saved_bytes(forward, nn.Sequential() if model is None else model), want


@scenarios("gradients of two backward passes")
def gradients(answer, device, name, want, x, forward, make=nn.Module):
    """The model that is made is gone by then."""
    results = []
    run = lambda model: answer.saved_bytes(lambda: results.append(forward(model)), model)  # noqa: E731
    run(make())
    first = grad(results[0].sum(), x, retain_graph=True)[0]
    try:
        return [first, grad(results[0].sum(), x)[0]], [want, want]
    except Exception as error:
        cause = "the second backward pass finds nothing: what is saved is given back once"
        raise with_cause(error, cause) from None


@scenarios("the result, the model, and then a loss that was kept for a while: are they alive")
def alive(answer, device, name, forward):
    """The loss is kept in a dict that the forward pass refers to."""
    storages = []

    def count():
        losses, model = {}, nn.Module()

        def run():
            losses["auxiliary"], result = leaf(8).sigmoid(), forward()
            storages.extend(ref(y.untyped_storage()) for y in (result, losses["auxiliary"]))
            return result

        answer.saved_bytes(run, model)
        return losses, ref(model)

    with collector_paused():
        losses, model = count()
        result, loss = storages[-2:]
        got = [result() is not None, model() is not None]
        del losses
        return [*got, loss() is not None], [False, False, False]


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
        yield "a result that the caller keeps", 4 * 36, lambda: keep(x.exp())
        yield "deep in the result", 4 * 36, lambda: {"out": [(x.exp(), None)]}
        yield "a loss that is kept, and not returned", 4 * 36, lambda: kept.append(x.exp())
        yield "an auxiliary loss", 4 * 36 + 4 * 36, lambda: (keep(x.sigmoid().mean()), x.tanh())[1]
        with torch.no_grad():
            yield "under the caller's no_grad", 0, lambda: x.exp()
            yield "gradients on inside of it", 4 * 36, lambda: torch.enable_grad()(x.exp)()
        back = lambda **keep: ((y := x.exp().tanh()).sum().backward(**keep), y)[1]  # noqa: E731
        yield "a graph that went backward", 0, back
        yield "a graph that may go backward again", 2 * 4 * 36, partial(back, retain_graph=True)
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
        yield "one number of it", 8 * 500 * 6, lambda: w.double() * large[0, 0]
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
        wave = nn.Linear(6, 8, bias=False, dtype=torch.complex64)
        z = leaf(5, 6, dtype=torch.complex64)
        yield "a lazy conjugate is a view", 8 * 30, lambda: z @ wave.weight.mH, wave
        views = lambda: [*body.weight.chunk(2), body.weight.detach(), body.weight.data]  # noqa: E731
        yield "halves, and data", 4 * 30, lambda: [F.linear(x, w) for w in views()], body
        body.register_buffer("mask", torch.ones(6), persistent=False)
        yield "a hidden buffer", 0, lambda: row * body.mask, body
        anew = lambda: (row * body.mask, body.register_buffer("mask", torch.ones(6)))[0]  # noqa: E731
        yield "a buffer that is replaced after its use", 4 * 6, anew, body
        late = lambda: (setattr(body, "late", nn.Parameter(torch.ones(6))), row * body.late)[1]  # noqa: E731
        yield "a parameter that forward makes", 4 * 6, late, body
        body.seen = []
        yield "a kept activation", 4 * 30, lambda: body.seen.append(y := x.exp()) or y, body
        held = lambda: (setattr(body, "_last", x.exp()), body._last.sin())[1]  # noqa: E731
        yield "an activation kept as an attribute", 4 * 30, held, body
        scaled = lambda: loss(body(x)) * loss.bias  # noqa: E731
        size = 4 * (5 * 6 + 5 * 8 + 8 * 2 + 5 * 2 + 2)
        yield "a loss has weights, a view of one and one itself", size, scaled, body

    @pytest.mark.exact("saved_bytes", "after")
    @gradients("the hooks give back another tensor, or give it back once")
    def test_lets_the_caller_go_backward(self):
        """Lazy: a bit of the tensor says that its numbers are to be conjugated, or negated. What
        has them without the bit, or in another order, is saved beside it.
        """
        x = torch.tensor([1.0, 4.0, 16.0], requires_grad=True)
        number = x.detach()
        z = torch.complex(number, 3 * number)
        conjugate = lambda _: (x * z.conj()).imag + 2 * (x * z).imag  # noqa: E731
        yield "a lazy conjugate", 3 * number, x, conjugate
        yield "a lazy minus", 3 * number, x, lambda _: x * z.conj().imag + 2 * (x * z.imag)
        square = torch.arange(9.0).view(3, 3)
        both = lambda _: square @ x + square.t() @ x  # noqa: E731
        yield "a square matrix and its transpose", (square + square.t()).sum(0), x, both
        first = torch.stack((x.cos(), -2 * (2 * x).sin())).sum(0).detach()
        yield "a graph is gone when another begins", first, x, lambda _: sum(one_is_dropped(x))
        norm, two = lambda: nn.BatchNorm1d(3).requires_grad_(False), torch.full((3,), 2.0)
        yield "a frozen model is gone", two, x, lambda m: x * m.weight + x * m.running_var, norm

    @pytest.mark.exact("saved_bytes", "after")
    @pytest.mark.parametrize("end", ENDINGS)
    def test_leaves_no_hook(self, answer, device, end):
        check_leaves_nothing(lambda run: answer.saved_bytes(run, nn.Module()), end, device)

    @pytest.mark.saves("saved_bytes", "held")
    def test_shows_what_checkpointing_saves(self, answer, reference, device):
        """Per block a checkpoint holds its input only: bar = blocks x one input."""
        blocks = nn.ModuleList(mlp(32, 128, 32, device=device) for _ in range(5))
        remat = [partial(checkpoint, block, use_reentrant=False) for block in blocks]
        x, inputs = leaf(24, 32, device=device), 5 * 4 * 24 * 32

        def saved(module, layers):
            return module.saved_bytes(lambda: reduce(lambda y, layer: layer(y), layers, x), blocks)

        plain, got, true = saved(answer, blocks), saved(answer, remat), saved(reference, remat)
        title, formula = "saved with a checkpoint per block", "5 blocks x one input"
        cause = "what checkpointing drops is counted all the same"
        check_bar(title, got, inputs, plain=plain, reference=true, formula=formula, cause=cause)

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

    @pytest.mark.survives("saved_bytes", 2)
    @counts("what was there before is left out")
    def test_counts_saved_inputs(self):
        x, scale = leaf(10), leaf(1)
        yield "an input and a scale", 4 * 10 + 4, lambda: x * scale
        model = nn.Linear(10, 1, bias=False)
        model.weight.grad = torch.ones(1, 10)
        yield "a gradient", 4 * 10, lambda: x * model.weight.grad, model

    @pytest.mark.survives("saved_bytes", 3)
    @alive("a hook, or what it uses, keeps what was returned or saved, or refers to the model")
    def test_lets_go_of_the_graph(self):
        """exp saves its own result, whose grad_fn holds what it saved: no cycle may come of it."""
        x = leaf(32)
        yield "exp", x.exp
        yield "exp of complex numbers", leaf(32, dtype=torch.complex64).exp
        yield "square", x.square
        in_place = lambda: (y := torch.ones(32)).add_(y * x)  # noqa: E731
        yield "a residual in place: what was saved has a graph by then", in_place

    @pytest.mark.survives("saved_bytes", 4)
    @pytest.mark.parametrize("end", ENDINGS)
    def test_puts_the_callers_hooks_back(self, answer, device, end):
        packed, x = [], leaf(12, device=device)
        for name in ("outer", "inner"):
            hooks = saved_tensors_hooks(lambda t, n=name: packed.append(n) or t, lambda t: t)
            hooks.__enter__()
        check_ending(lambda forward: answer.saved_bytes(forward, nn.Module()), end, lambda: None)
        for _ in ("inner", "outer"):
            x.exp()
            with suppress(RuntimeError):  # there are none
                hooks.__exit__()
        cause = "hooks are removed that were there before, or come back in another order"
        check_equal(packed, ["inner", "outer"], "the caller's own hooks afterwards", cause=cause)
        inside = lambda: (x.exp(), answer.saved_bytes(x.tanh, nn.Module()), x.sin())  # noqa: E731
        got, cause = answer.saved_bytes(inside, nn.Module()), "a call inside ends the outer count"
        check_equal(got, 2 * x.nbytes, "bytes around another call", cause=cause)

    @pytest.mark.survives("saved_bytes", 5)
    def test_changes_nothing_that_forward_does_not(self, answer, device):
        model = mlp(4, 3, 2, device=device, activation=nn.Dropout)
        x, kept = torch.ones(5, 4, device=device), []

        def forward(error):
            kept.append(model(x))
            model(x).sum().backward()
            torch.set_grad_enabled(False)
            model[1].eval()
            if error:
                raise error

        def left_by(run, error):
            draw.seed(5)
            model.train()[0].eval()  # one layer is frozen, the others train
            model.zero_grad()
            model[0].weight.grad = torch.ones_like(model[0].weight)
            step, alive = lambda: run(partial(forward, error)), None
            with torch.enable_grad():
                with suppress(KeyError):
                    alive = measure(step, device, known=[model, x]).retained
                return {
                    "bytes alive while the result is": alive,
                    "grad mode": torch.is_grad_enabled(),
                    "training": [layer.training for layer in model],
                    "gradients": [p.grad for p in model.parameters()],
                    "the next random numbers": draw.next_random(device),
                }

        for error in (None, KeyError):
            want = left_by(lambda forward: forward(), error)
            got = left_by(lambda forward: answer.saved_bytes(forward, model), error)
            draw.seed(5)
            again = {**want, "the next random numbers": draw.next_random(device)}
            check_equal(
                got,
                want,
                "",
                cause="copies are saved, gradients cleared, or a mode or random state is put back",
                suspects={"the random state is put back to where it was before": again},
            )

    @pytest.mark.survives("saved_bytes", "Raises")
    def test_refuses_what_is_no_model(self, answer):
        runs = []
        call = lambda: answer.saved_bytes(lambda: runs.append(1), [nn.ReLU()])  # noqa: E731
        check_raises(call, TypeError, mentions=["list"], when="for a list as model")
        check_equal(runs, [], "runs of forward", cause="the model is checked after forward")
