"""A checkpoint and the plain call, side by side: results, gradients, runs and bytes."""

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
from kit.memory.ruler import collector_paused
from specs.segment_checkpointing import worlds as w


class TestPart1Checkpoint:
    @pytest.mark.works("checkpoint", "gradients")
    def test_gives_the_gradients_that_one_can_do_by_hand(self, answer, device):
        """v x x = 18 for v = 2 and x = 3; the gradient of x is 2 v x = 12, that of v is x x = 9."""
        x, v = (torch.tensor(n, device=device, requires_grad=True) for n in (3.0, 2.0))
        out = answer.checkpoint(lambda t: v * t * t, x)
        out.backward()
        got = [out.item(), *(None if t.grad is None else t.grad.item() for t in (x, v))]
        check_equal(
            got,
            [18.0, 12.0, 9.0],
            "result, gradient of the argument, gradient of the weight inside",
            cause="draw the second run's graph: where does it end, and who gets which gradient?",
            suspects={
                "the graph is cut at the argument and never joined again": [18.0, None, 9.0],
                "gradients for the arguments only: the weight needs backward()": [18.0, 12.0, None],
                w.TWICE: [18.0, 24.0, 9.0],
            },
        )

    @pytest.mark.works("checkpoint", "runs")
    @w.as_plain(
        "it runs twice in the call or once per saved tensor in backward, or keeps all activations"
    )
    def test_runs_once_and_once_more_in_the_backward_pass(self):
        model, x = w.probed(nn.Linear(5, 5)), w.leaf(3, 5)
        yield "a module", lambda c: c(model, x)

    @pytest.mark.works("checkpoint", "written here")
    def test_is_not_torchs_own(self, answer, device):
        model, x = mlp(7, 13, 5, device=device), draw.randn(11, 7, device=device).requires_grad_()
        w.check_not_torchs_own(lambda: w.loss_of(answer.checkpoint(model, x)).backward())

    @pytest.mark.exact("checkpoint", "gradients")
    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    @w.as_plain("the second run differs from the first, or a gradient goes to the wrong tensor")
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
        yield "used outside too", lambda c: x + c(layer, x.tanh()) + layer.weight.square().sum()
        z, v = w.leaf(6, 7, dtype=torch.complex64), w.leaf(7, 3, dtype=torch.complex64)
        yield "complex numbers", lambda call: call(lambda a: (a @ v).sin(), z)
        fixed, index = w.data(7), torch.tensor([2, 0])
        mask = torch.tensor([True, False, True, True, False, True, False])
        mix = lambda a, b, c, d, times: ((a + b)[c] * d).exp() * times  # noqa: E731
        yield "integers, booleans and data", lambda c: c(mix, x, fixed, index, mask, 0.5)
        norm = w.probed(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.5).eval())
        yield "batch norm in train mode", lambda c: c(norm, x)
        norm.eval()
        yield "batch norm and dropout in eval mode", lambda c: c(norm, x)
        yield "gradients from before", lambda c: (w.loss_of(layer(x)).backward(), c(layer, x))[1]
        yield "in-place activations inside", lambda c: c(lambda a: layer(a).mul_(2).relu_(), x)
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
        weight = nn.Parameter(w.data(7))
        yield "a function that uses a leaf", lambda c: c(lambda a: (a * weight).exp(), x)
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
        """Bar: the argument, 16 KiB, + 8 KiB for the loss, the random state and small things. The
        outputs, which sum() does not need, have 24 and 48 KiB, the activations 128."""
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
        "a second run's activations stay until the whole backward pass ends",
    )
    def test_holds_one_inside_at_a_time(self, device, retain):
        """A block's gradients may exist at once. With retain_graph=True nothing more is kept."""
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
    @pytest.mark.parametrize("kind", ["data", "no gradient inside"])
    @bar(
        "bytes after the backward pass",
        "the output + 8 KiB",
        "the graph's node still holds the arguments, or the second run's results",
    )
    def test_the_backward_pass_frees_what_was_kept(self, device, kind):
        """Bar: the output + 8 KiB. Arguments have 32 KiB, indices 64 and the activations 64."""
        model, x = mlp(32, 64, 48, device=device), draw.randn(256, 32, device=device)
        scale = torch.ones(48, device=device)
        known = w.zero_grads(model, x.requires_grad_(), scale.requires_grad_())

        def function(a, factor, index):
            out = model((a * factor).gather(0, index))
            return out.detach() if kind == "no gradient inside" else out

        def left(call, kept):
            a = (x.detach() if kind == "data" else x) * 2
            kept.append(call(function, a, x.detach() * 2, x.argsort(0)))
            w.loss_of(kept[0] * scale).backward()

        read = w.bytes_left(left, device, *known)
        limit = 256 * 48 * 4 + 8192
        return lambda module: read(module.checkpoint), limit, read(w.plain_call)

    @pytest.mark.saves("checkpoint", "freed")
    @pytest.mark.parametrize("kind", ["nested", "not run"])
    def test_leaves_nothing_to_the_garbage_collector(self, answer, device, kind):
        model, seen = nn.Linear(5, 5).to(device), []
        x = draw.randn(3, 5, device=device, requires_grad=True)

        def step():
            def function(a):
                inside = model(a).exp()
                out = inside.tanh()
                seen.extend(ref(t.untyped_storage()) for t in (a, inside, out))
                return out

            seen.append(ref(function))
            whole = partial(answer.checkpoint, function) if kind == "nested" else function
            loss = w.loss_of(answer.checkpoint(whole, x * 2))
            if kind != "not run":
                loss.backward()

        with collector_paused() as collect:
            step()
            left = alive(seen)
            collect()
        cycle = {"a reference cycle keeps them alive: only the collector frees it": left}
        cause = "something outside the graph keeps them"
        what = f"of {len(seen)} (the function; storages of argument, inside, output) still alive"
        check_equal(left, 0, what, cause=cause, suspects={} if alive(seen) else cycle)

    @pytest.mark.survives("checkpoint", "no_grad")
    @w.as_plain(
        "nothing checks torch.is_grad_enabled(): no_grad() and inference_mode() turn it off"
    )
    def test_without_gradients_it_is_the_plain_call(self):
        model = w.probed(nn.Linear(5, 5), nn.Dropout(0.5))
        with torch.inference_mode():
            x = w.data(3, 5)
            yield "inference_mode", lambda c: c(model, x)
        with torch.no_grad():
            yield "no_grad", lambda c: c(model, w.data(3, 5))

    @pytest.mark.survives("checkpoint", 5)
    @pytest.mark.filterwarnings("ignore:Using backward")
    @w.right_or_refuses(
        "backward() inside adds to .grad of all parameters, and its gradients have no graph: refuse"
        " what would come out wrong"
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

    @pytest.mark.survives("checkpoint", 6)
    @w.right_or_refuses("autograd does not look for tensors inside a list or dict, at any depth")
    def test_refuses_tensors_that_are_hidden_in_a_result(self):
        x = w.leaf(11, 7)

        def hidden(hide, find):
            return lambda c: (x * find(c(lambda a: hide(a.sin()), x))).sum().backward()

        yield "a list is returned", TypeError, hidden(lambda t: [t], lambda r: r[0])
        deep = hidden(lambda t: (t, {"y": [t]}), lambda r: r[1]["y"][0])
        yield "a tuple with a list in a dict", TypeError, deep
