"""The second run sees what the first one saw: random numbers, autocast, arguments, results."""

from functools import partial, reduce
from operator import setitem

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_equal
from kit.laws.endings import ENDINGS, check_ending
from kit.laws.untouched import observed
from specs.segment_checkpointing import worlds as w

NAME = object()  # one for all answers, so that theirs can be compared


class TestPart2SecondRun:
    @pytest.mark.works("checkpoint", "random state")
    @w.as_plain("the second run draws other numbers, or its state or the first one's is put back")
    def test_random_numbers_are_as_after_one_run(self):
        x, fixed = w.leaf(13, 5), w.data(13, 5)
        *layers, part, fresh = (w.probed(nn.Linear(5, 5), nn.Dropout(0.4)) for _ in range(5))
        inner, outer = w.chain(2, x.device)[0]
        yield "dropout", lambda call: call(layers[0], x)
        yield "a row", lambda c: c(layers[2], c(layers[1], c(layers[0], x)))
        yield "one inside another", lambda c: c(lambda a: outer(c(inner, a)), x)
        yield "one layer twice on one tensor", lambda c: c(layers[0], x) * 2 + c(layers[0], x)
        yield "a function without arguments", lambda c: c(lambda: layers[0](fixed))
        part.eval()[3].train()
        yield "dropout that trains in an eval model", lambda c: c(part, x)
        layers[0][0].weight.register_hook(lambda grad: grad + torch.empty_like(grad).uniform_())
        yield "gradients with noise", lambda c: c(layers[1], c(layers[0], x))
        evaluated = lambda c: (w.loss_of(c(fresh.eval(), x)).backward(), c(fresh.train(), x))[1]  # noqa: E731
        yield "evaluated, then trained", evaluated
        forked = torch.random.fork_rng()(lambda a: layers[1](a))
        yield "a function that puts the stream back itself", lambda c: c(forked, x)

        def seeded_twice(call):
            draw.seed(8)
            out = call(layers[2], x)
            draw.seed(8)
            w.loss_of(out).backward()
            return out.detach()

        yield "seeded alike before the call and before backward", seeded_twice

    @pytest.mark.gpu
    @pytest.mark.works("checkpoint", "random state")
    @w.as_plain("the state of the cuda generator is not restored, or not put back")
    def test_random_numbers_of_the_gpu_are_as_after_one_run(self):
        x = w.leaf(13, 5)
        layers = w.chain(2, x.device)[0]
        yield "dropout", lambda c: c(layers[1], c(layers[0], x))

    @pytest.mark.exact("checkpoint", "autocast")
    @w.as_plain("the second run or the backward pass has another autocast than in the plain call")
    def test_autocast_is_as_in_the_first_run(self):
        """A wrong dtype changes gradients by some 0.5 % only: hence dtypes and bits."""
        layer, model, x = nn.Linear(7, 7), w.probed(nn.Linear(7, 7)), w.leaf(11, 7)
        block = partial(torch.autocast, x.device.type)
        off, bfloat16, float16 = block(enabled=False), block(torch.bfloat16), block(torch.float16)
        yield "bfloat16, backward outside", bfloat16(lambda c: c(model, x))
        yield "float16, backward outside", float16(lambda c: c(model, x))
        yield "bfloat16, without arguments", bfloat16(lambda c: c(lambda: model(x)))

        def backward_in_bfloat16(of, function):
            def step(call):
                out = of(lambda: call(function, x))()
                with bfloat16:  # which finds a weight that was cast, to whatever dtype
                    before = layer(x).detach()
                    w.loss_of(out).backward()
                    return layer(before)

            return step

        yield "off, backward inside of bfloat16", backward_in_bfloat16(off, model)
        cached = "float16, backward inside of bfloat16, whose cache has the weight in bfloat16"
        yield cached, backward_in_bfloat16(float16, layer)
        dtype_only = block(torch.float16, enabled=False)
        own = lambda a: block()(lambda t: model(t))(a)  # noqa: E731
        yield "float16, but off until inside", dtype_only(lambda c: c(own, x))
        cast = nn.Linear(4, 4, bias=False)  # of numbers that bfloat16 holds and adds exactly
        nn.init.eye_(cast.weight)
        bits = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]], requires_grad=True)
        # pytorch#112583: in torch 2.6 a copy without a graph is found.
        yield "a weight inside and outside", bfloat16(lambda c: cast(c(cast, bits)))
        with w.unusual_modes():
            yield "other modes of torch than usual", block(torch.bfloat16)(lambda c: c(model, x))

    @pytest.mark.exact("checkpoint", "result")
    @w.as_plain("a result is of another kind, or another object, or gets the gradient of another")
    def test_arguments_and_results_are_handed_on(self):
        """Small integers, and sizes that are powers of two: sums are the same in every order."""
        a = torch.tensor([1.0, -2.0, 3.0, -1.0, 2.0], requires_grad=True)
        b = torch.tensor([2.0, 1.0, -1.0, 3.0, -2.0], requires_grad=True)
        which = torch.tensor([3, 1, 3])

        def mixture(call):
            def function(a, none, scale, b, which, *rest):
                call.note((none, scale, rest[0] is NAME, rest[1:]))
                out = a * b * scale
                others = rest[0], which.flip(0), b[which], *rest[1:6]
                return scale, out, None, True, a.square() + b, *others

            others = NAME, [1, 2], {"k": None}, w.Pair(1, None), a.shape, "word"
            others += nn.BatchNorm1d(1), np.ones(2)
            out = call(function, a, None, 3, b, which, *others)
            return out[1].sum() + 5 * out[4].square().sum() + 7 * out[7].sum()

        yield "tensors and other things", mixture
        x = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0], [-7.0, 8.0]], requires_grad=True)
        v = torch.tensor(2.0, requires_grad=True)

        def all_of(function, change=lambda item: item):
            def step(call):
                out = call(function, x)
                outputs = map(change, out if isinstance(out, tuple) else (out,))
                return sum(n * w.loss_of(item) for n, item in enumerate(outputs, 1))

            return step

        yield "views of one tensor", all_of(lambda x: (x * v).unbind(0))
        yield "a tuple of one", all_of(lambda x: (x * v,))
        yield "a namedtuple", all_of(lambda x: w.Pair(x * v, (x - v).exp()))
        yield "what topk returns", lambda call: call(lambda x: (x * v).topk(1), x).values
        model = w.probed(nn.Linear(2, 2))
        yield "one inside, two outputs", all_of(lambda x: (y := model(x * v), y.exp()))
        aliases = lambda x: ((y := x * v).detach(), y, y[:], y.detach(), x.detach(), x)  # noqa: E731
        yield "a tensor, and the same without its graph", all_of(aliases)
        yield "an auxiliary loss", all_of(lambda x: (x * v, x.square().mean()))
        yield "one tensor twice, and another", all_of(lambda x: (y := x * v, y, x + v))
        yield "the argument itself", all_of(lambda x: (x, (x * v).view(-1), x[2:]))
        change = lambda item: (item.mul_(2)[1].add_(1), item)[1]  # noqa: E731
        yield "a slice changed in place", all_of(lambda x: (x * v)[1:], change)
        yield "two of them changed in place", all_of(lambda x: (x * v, x + v), change)

    @pytest.mark.exact("checkpoint", "args")
    @w.as_plain("what is no tensor comes as a copy: what the function writes into it is lost")
    def test_what_the_function_writes_into_an_argument_is_there(self):
        x = w.leaf(5)
        write = lambda a, place: (setitem(place, 0, 7), a.sin())[1]  # noqa: E731

        def writes_into(make):  # a new one for each call
            return lambda call: call(write, x, place := make()) * float(place[0])

        yield "a list", writes_into(lambda: [0])
        yield "a dict", writes_into(lambda: {0: 0})
        yield "an array", writes_into(lambda: np.zeros(1))

    @pytest.mark.saves("checkpoint", 3)
    def test_nested_checkpoints_save_at_both_levels(self, answer, reference, device):
        """12 layers: a checkpoint for each 4 of them, inside one around all; or one more between.

        Bar: 3 inputs of the inner ones, and one more of that size (an output that is there
        again) + the plain peak of 4 layers. With one for each 6 between, and one for each 2 inside:
        2 inputs and 3, and one more.
        """
        layers, x = w.big_chain(12, device)

        def nested(call, parts, sizes, y):
            if not sizes:
                return w.plain(parts, y)
            for start in range(0, len(parts), sizes[0]):
                inside = parts[start : start + sizes[0]]
                y = call(partial(nested, call, inside, sizes[1:]), y)
            return y

        def peak(call, layers=layers, sizes=(12, 4)):
            step = lambda: w.loss_of(nested(call, layers, sizes, x)).backward()  # noqa: E731
            return w.peak_of(step, device, layers, x)

        calls = answer.checkpoint, reference.checkpoint, w.plain_call
        cause = "the inner checkpoints do nothing when they run inside another"
        for sizes, inputs, levels in (((12, 4), 4, ""), ((12, 6, 2), 6, " at three levels")):
            limit = inputs * x.nbytes + peak(w.plain_call, layers[: sizes[-1]])
            formula = f"{inputs} inputs + the plain peak of {sizes[-1]} layers"
            title = f"peak of 12 layers, nested{levels}"
            w.check_bytes(title, partial(peak, sizes=sizes), calls, limit, formula, cause)

        def kept(call, found):
            found.append(call(lambda y: reduce(lambda a, layer: call(layer, a), layers, y), x))

        read = w.bytes_left(kept, device, layers, x)
        title, formula = "kept by 12 checkpoints inside of one", "the output + one input"
        cause = "the inner ones keep their arguments after the outer one's first run"
        w.check_bytes(title, read, calls, 2 * x.nbytes, formula, cause)

    @pytest.mark.survives("checkpoint", 4)
    @w.as_plain("the first backward pass uses up what the second one needs")
    def test_backward_works_again_where_the_graph_is_retained(self):
        x, index = w.leaf(13, 5), torch.tensor([2, 0, 1])
        layers = w.chain(2, x.device)[0]
        function = lambda y, n, rows: (y := layers[0](y[rows]) * n, layers[1](y))  # noqa: E731

        def step(call):
            first, second = call(function, x, 3, index)
            for out in (first, second, first):
                w.loss_of(out).backward(retain_graph=True)
            return first

        yield "each of two outputs twice", step

    @pytest.mark.survives("checkpoint", 5)
    @pytest.mark.parametrize("end", [end for end in ENDINGS if end != "success"])
    @pytest.mark.parametrize("run", [1, 2])
    def test_an_error_in_either_run_comes_through(self, answer, device, run, end):
        layer, x = nn.Linear(5, 5).to(device), draw.randn(3, 5, device=device, requires_grad=True)
        runs, after, before = [], [], observed(layer)

        def step(ends):
            def function(a):
                runs.append(1)
                out = F.dropout(layer(a), 0.5)
                return (ends() if len(runs) == run else None, out.exp())[1]

            with torch.autocast(device.type, torch.float16):
                out = answer.checkpoint(function, x)
            loss = w.loss_of(out)
            draw.seed(8)
            after.append(draw.next_random(device))
            draw.seed(8)
            loss.backward()

        check_ending(step, end, lambda: None)
        cause = "what is set for the second run is not put back when it fails: use `with`"
        for numbers in after:
            check_equal(draw.next_random(device), numbers, "the next random numbers", cause=cause)
        check_equal(observed(layer), before, "what is in force afterwards", cause=cause)
