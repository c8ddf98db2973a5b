"""A checkpoint and the plain call, side by side: results, gradients, runs and bytes."""

from collections import OrderedDict
from functools import partial, reduce
from weakref import ref

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.bars import bar
from kit.laws.checks import check_equal
from kit.laws.endings import alive
from kit.laws.toys import mlp
from kit.laws.twists import Pair
from kit.memory.ruler import collector_paused
from specs.segment_checkpointing import worlds as w


class TestPart1Checkpoint:
    @pytest.mark.works("checkpoint", "gradients")
    def test_gives_the_gradients_that_one_can_do_by_hand(self, answer, device):
        """v x x with v = 2 and x = 3 is 18; its derivative by x is 2 v x = 12, by v x x = 9."""
        x, v = (torch.tensor(n, device=device, requires_grad=True) for n in (3.0, 2.0))
        out = answer.checkpoint(lambda t: v * t * t, x)
        out.backward()
        got = [out.item(), *(None if t.grad is None else t.grad.item() for t in (x, v))]
        check_equal(
            got,
            [18.0, 12.0, 9.0],
            "result, gradient of the argument, gradient of the weight inside",
            cause="draw the graph of the second run: where does it end, and who gets what?",
            suspects={
                "the graph is cut at the argument and never joined again": [18.0, None, 9.0],
                "gradients for the arguments only: the weight needs backward()": [18.0, 12.0, None],
                w.TWICE: [18.0, 24.0, 9.0],
            },
        )

    @pytest.mark.works("checkpoint", "runs")
    @w.as_plain(
        "it runs twice at once, or again for each saved tensor; or nothing runs again: all was kept"
    )
    def test_runs_once_and_once_more_in_the_backward_pass(self):
        model, x = w.probed(nn.Linear(5, 5)), w.leaf(3, 5)
        yield "a module", lambda c: c(model, x)

    @pytest.mark.works("checkpoint", "written here")
    def test_is_not_torchs_own(self, answer, device):
        model, x = mlp(7, 13, 5, device=device), draw.randn(11, 7, device=device).requires_grad_()
        for args in (model, x), (model, x.detach()), (lambda: model(x),):
            w.check_not_torchs_own(lambda a=args: w.loss_of(answer.checkpoint(*a)).backward())

    @pytest.mark.exact("checkpoint", "gradients")
    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    @w.as_plain("the second run is not the first one's, or a gradient lands with the wrong tensor")
    def test_every_gradient_is_the_plain_one_to_the_bit(self):
        x, model = w.leaf(11, 7), w.probed(nn.Linear(7, 13), nn.Linear(13, 5))
        yield "a module", lambda call: call(model, x)
        weight = nn.Parameter(w.data(7, 3))
        yield "a function that uses a leaf", lambda c: c(lambda a: (a @ weight).tanh(), x)
        yield "one argument twice", lambda c: c(lambda a, b: a.sin() * b, x, x)
        yield "given, and used besides", lambda c: c(lambda a: (a * weight.sin()).exp(), weight)
        yield "an unused argument", lambda c: c(lambda a, _: a.sin(), x, weight)
        tied = nn.Sequential(layer := nn.Linear(7, 7), nn.Tanh(), layer)
        yield "a layer used twice, on what was changed before", lambda c: c(tied, x.sin().mul_(2))
        row = nn.ModuleList(w.probed(nn.Linear(7, 7)) for _ in range(12))
        yield "12 checkpoints in a row", lambda c: reduce(lambda y, block: c(block, y), row, x)
        yield "used outside too", lambda c: x + c(layer, x.tanh()) + layer.weight.square().sum()
        tripled = nn.Linear(7, 5)
        tripled.register_forward_hook(lambda _, args, out: out * 3)
        yield "a layer with a hook on its output", lambda c: c(tripled, x)
        z, v = w.leaf(6, 7, dtype=torch.complex64), w.leaf(7, 3, dtype=torch.complex64)
        yield "complex numbers", lambda call: call(lambda a: (a @ v).sin(), z)
        doubles = w.leaf(5, 4, dtype=torch.float64)
        yield "transposed float64", lambda c: c(torch.exp, doubles.t())
        fixed, index = w.data(7), torch.tensor([2, 0])
        mask = torch.tensor([True, False, True, True, False, True, False])
        mix = lambda a, b, c, d, times: ((a + b)[c] * d).exp() * times  # noqa: E731
        yield "integers, booleans and data", lambda c: c(mix, x, fixed, index, mask, 0.5)
        look = lambda *args: args[0].sin() * sum(t.requires_grad for t in args)  # noqa: E731
        yield "a function that asks what requires a gradient", lambda c: c(look, x, fixed, mask, x)
        norm = w.probed(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.5).eval())
        yield "batch norm in train mode", lambda c: c(norm, x)
        norm.eval()
        yield "batch norm and dropout in eval mode", lambda c: c(norm, x)
        zero = torch.zeros(3, requires_grad=True)
        yield "an infinite gradient", lambda c: c(torch.sqrt, zero) + 1
        yield "gradients from before", lambda c: (w.loss_of(layer(x)).backward(), c(layer, x))[1]
        yield "a function that changes its own", lambda c: c(lambda a: layer(a).mul_(2).relu_(), x)
        yield "an empty batch", lambda c: c(model, x[:0]).sum()
        hooked, added = w.leaf(4, 5), w.leaf(5)
        hooked.register_hook(lambda grad: grad * 10)
        added.register_post_accumulate_grad_hook(lambda t: (t.grad.mul_(0.5), None)[1])
        yield "hooks on an argument and a leaf", lambda c: c(lambda a: (a + added).sin(), hooked)
        table = {}  # as layers of rotary embeddings keep one
        turned = lambda a: (a * table.setdefault(0, torch.ones_like(a))).sin()  # noqa: E731
        yield "a table that the first run makes", lambda c: (table.clear(), c(turned, x))[1]

    @pytest.mark.exact("checkpoint", "data")
    @w.as_plain("a Function none of whose inputs requires a gradient is left out of the graph")
    def test_parameters_get_gradients_though_no_argument_requires_one(self):
        model, x = w.probed(nn.Linear(7, 13)), w.data(11, 7)
        yield "numbers", lambda call: call(model, x)
        words = nn.Sequential(nn.Embedding(17, 7), nn.Tanh())
        yield "indices", lambda call: call(words, torch.arange(12).view(4, 3))
        yield "no argument", lambda call: call(lambda: model(x))
        weight = nn.Parameter(w.data(7))
        frozen = nn.Linear(7, 13, bias=False).requires_grad_(False)
        frozen.register_forward_hook(lambda _, args, out: out * weight[0])
        more = lambda c: w.loss_of(c(frozen, x)) + weight.sum()  # noqa: E731
        yield "a frozen module that uses a leaf from elsewhere", more
        yield "nothing but numbers", lambda c: weight * c(lambda a, b: (a + b, None), 1, 2)[0]
        before, body, head = nn.Linear(7, 7), nn.Linear(7, 5), nn.Linear(5, 2)
        inside = torch.no_grad()(lambda a: body(a))
        yield "no gradients inside, after another", lambda c: head(c(inside, c(before, x)))
        both = lambda a: (inside(a), head(body(a)))  # noqa: E731
        yield "none in half of it", lambda c: sum(map(w.loss_of, c(both, x)))

    @pytest.mark.saves("checkpoint", "kept")
    @pytest.mark.parametrize("kind", ["trained", "data"])
    @bar(
        "bytes between forward and backward",
        "one argument + 8 KiB",
        "the first run builds a graph, or the outputs are kept with the arguments",
    )
    def test_keeps_its_arguments_and_nothing_else(self, device, kind):
        """Bar: the argument, of 16 KiB, + 8 KiB for the loss, a random state, and what else an
        answer needs. The outputs, which sum() does not need, have 24 and 48 KiB, the inside 128."""
        model, x = mlp(32, 256, 48, device=device), draw.randn(128, 32, device=device)
        x.requires_grad_(kind != "data")

        def held(call, kept):
            kept.append(call(lambda a: (y := model(a), y.argsort()), x * 2)[0].sum())

        read = w.bytes_left(held, device, model, x)
        return lambda module: read(module.checkpoint), x.nbytes + 8192, read(w.plain_call)

    @pytest.mark.saves("checkpoint", "kept")
    @pytest.mark.parametrize("retain", [False, True], ids=["once", "retained"])
    @bar(
        "peak of 4 in a row",
        "one plain block + 6 inputs + a block's gradients",
        "a second run's inside stays until the whole backward pass ends",
    )
    def test_holds_one_inside_at_a_time(self, device, retain):
        """Gradients may be handed over at once. A graph that is retained keeps no more."""
        blocks = [mlp(32, 256, 32, device=device) for _ in range(4)]
        x = draw.randn(512, 32, device=device, requires_grad=True)
        known = w.zero_grads(*blocks, x)

        def peak(call, count=4):
            def step():
                out = reduce(lambda a, block: call(block, a), blocks[:count], x)
                w.loss_of(out).backward(retain_graph=retain)

            return w.peak_of(step, device, *known)

        limit = peak(w.plain_call, 1) + 6 * x.nbytes + sum(p.nbytes for p in blocks[0].parameters())
        return lambda module: peak(module.checkpoint), limit, peak(w.plain_call)

    @pytest.mark.saves("checkpoint", "freed")
    @pytest.mark.parametrize(
        "kind", ["both kept", "data, one dropped", "retained before", "no gradient inside"]
    )
    @bar(
        "bytes after the backward pass",
        "outputs in hand, the argument for one that is not used, 8 KiB",
        "the arguments hang on the graph's node, or the second run's results wait for an output",
    )
    def test_the_backward_pass_frees_what_was_kept(self, device, kind):
        """Arguments have 32 KiB, indices 64. Of two outputs one is not used: the argument may wait
        for it, but no inside of 64 KiB. If it was dropped, nothing may."""
        model, other = (mlp(32, 64, 48, device=device) for _ in range(2))
        x, scale = draw.randn(256, 32, device=device), torch.ones(48, device=device)
        known = w.zero_grads(model, other, x.requires_grad_(), scale.requires_grad_())
        outputs = 2 if kind == "both kept" else 1

        def function(a, *rest):
            a = (a * rest[0]).gather(0, rest[1]) if rest else a
            out = model(a).detach() if kind == "no gradient inside" else model(a)
            return out, other(a)

        def left(call, kept):
            rest = () if kind == "both kept" else (x.detach() * 2, x.argsort(0))
            a = (x.detach() if kind == "data, one dropped" else x) * 2
            kept += call(function, a, *rest)[:outputs]
            loss = w.loss_of(kept[0] * scale)
            if kind == "retained before":
                loss.backward(retain_graph=True)
            loss.backward()

        limit = outputs * 256 * 48 * 4 + (outputs - 1) * x.nbytes + 8192
        read = w.bytes_left(left, device, *known)
        return lambda module: read(module.checkpoint), limit, read(w.plain_call)

    @pytest.mark.saves("checkpoint", "freed")
    @pytest.mark.parametrize("kind", ["trained", "nested", "not run"])
    def test_leaves_nothing_to_the_garbage_collector(self, answer, device, kind):
        model, seen = nn.Linear(5, 5).to(device), []
        x = draw.randn(3, 5, device=device, requires_grad=True)

        def step():
            def function(a, *lists):
                inside = model(a).exp()
                out = inside.tanh()
                seen.extend(ref(t.untyped_storage()) for t in (a, inside, out))
                return out

            seen.append(ref(function))
            whole = partial(answer.checkpoint, function) if kind == "nested" else function
            loss = w.loss_of(answer.checkpoint(whole, x * 2, [3, 5], {"sizes": (5, 5)}))
            if kind != "not run":
                loss.backward()

        with collector_paused() as collect:
            step()
            left = alive(seen)
            collect()
        cycle = {"a reference cycle keeps them alive: only the collector frees it": left}
        cause = "something outside of the graph keeps them"
        what = f"of {len(seen)} (the function; storages of argument, inside, output) still alive"
        check_equal(left, 0, what, cause=cause, suspects={} if alive(seen) else cycle)

    @pytest.mark.survives("checkpoint", "no_grad")
    @w.as_plain("no_grad() and inference_mode() are not asked for")
    def test_without_gradients_it_is_the_plain_call(self):
        model = w.probed(nn.Linear(5, 5), nn.Dropout(0.5))
        with torch.inference_mode():
            x = w.data(3, 5)
            yield "inference_mode", lambda c: c(model, x)
        change = lambda a, b, xs: {"y": model(a.add_(xs[0]) + b)}  # noqa: E731
        with torch.no_grad():
            yield "no_grad, and all that is refused", lambda c: c(change, x * 1, x, [x])["y"]
            fixed, head = w.data(3, 5), torch.enable_grad()(nn.Linear(5, 5))
            yield "in eval mode, and then a head", lambda c: head(c(model.eval(), fixed))

    @pytest.mark.survives("checkpoint", 6)
    @pytest.mark.filterwarnings("ignore:Using backward")
    @w.right_or_refuses(
        "backward() inside reaches all parameters, and its gradients have no graph: what would be"
        " wrong is to be refused"
    )
    def test_refuses_what_would_lose_gradients(self):
        x, model = w.leaf(11, 7), w.probed(nn.Linear(7, 5))
        loss = lambda c: c(model, x).sum() + (x**3).sum()  # noqa: E731

        def grad(call):
            x.grad = torch.autograd.grad(loss(call), x)[0]

        def create_graph(call):
            loss(call).backward(create_graph=True)
            first, x.grad = x.grad, None
            first.square().sum().backward()

        yield "autograd.grad()", RuntimeError, grad
        yield "backward(inputs=)", RuntimeError, lambda c: loss(c).backward(inputs=[x])
        yield "backward(create_graph=True)", RuntimeError, create_graph

    @pytest.mark.survives("checkpoint", 7)
    @w.right_or_refuses("autograd sees no tensor inside of anything, and nothing looks so deep")
    def test_refuses_tensors_that_are_hidden_in_a_result(self):
        x, deep = w.leaf(11, 7), lambda t: (t, {"y": Pair(1, [t])})

        def hidden(hide, find):
            return lambda c: (x * find(c(lambda a: hide(a.sin()), x))).sum().backward()

        yield "a list is returned", TypeError, hidden(lambda t: [t], lambda r: r[0])
        yield "an OrderedDict", TypeError, hidden(lambda t: OrderedDict(y=t), lambda r: r["y"])
        yield "a tuple with a dict inside", TypeError, hidden(deep, lambda r: r[1]["y"][1][0])
