"""The second run repeats the first: random numbers, autocast, arguments, results."""

from functools import partial

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.bars import bar
from kit.laws.checks import ERRORS, UNTOUCHED, check_equal, check_raises
from kit.laws.endings import check_ending
from kit.laws.toys import Pair
from kit.laws.untouched import observed
from specs.segment_checkpointing import worlds as w


class TestPart2SecondRun:
    @pytest.mark.works("checkpoint", "random state")
    @w.as_plain("the second run draws other numbers, or the stream afterwards is not put back")
    def test_random_numbers_are_as_after_one_run(self):
        x, fixed = w.leaf(13, 5), w.data(13, 5)
        *layers, part = (w.probed(nn.Linear(5, 5), nn.Dropout(0.4)) for _ in range(4))
        inner, outer = w.chain(2, x.device)[0]
        yield "dropout", lambda call: call(layers[0], x)
        yield "a row", lambda c: c(layers[2], c(layers[1], c(layers[0], x)))
        yield "one inside another", lambda c: c(lambda a: outer(c(inner, a)), x)
        yield "a function without arguments", lambda c: c(lambda: layers[0](fixed))
        part.eval()[3].train()
        yield "dropout that trains in an eval model", lambda c: c(part, x)

    @pytest.mark.gpu
    @pytest.mark.works("checkpoint", "random state")
    @w.as_plain("the state of the cuda generator is not restored, or not put back")
    def test_random_numbers_of_the_gpu_are_as_after_one_run(self):
        x = w.leaf(13, 5)
        layers = w.chain(2, x.device)[0]
        yield "dropout", lambda c: c(layers[1], c(layers[0], x))

    @pytest.mark.exact("checkpoint", "autocast")
    @w.as_plain("the second run or the backward pass has another autocast than the plain call")
    def test_autocast_is_as_in_the_first_run(self):
        """A wrong dtype changes gradients by only 0.5 %: hence dtypes and bits."""
        layer, model, x = nn.Linear(7, 7), w.probed(nn.Linear(7, 7)), w.leaf(11, 7)
        block = partial(torch.autocast, x.device.type)
        off, bfloat16, float16 = block(enabled=False), block(torch.bfloat16), block(torch.float16)
        yield "bfloat16, backward outside", bfloat16(lambda c: c(model, x))

        def train(call):
            w.loss_of(bfloat16(call)(layer, x)).backward()
            layer.weight.data.neg_()
            after = bfloat16(layer)(x).detach()
            layer.weight.data.neg_()
            return after

        yield "bfloat16, then the weight changes and is used", train
        yield "float16, backward outside", float16(lambda c: c(model, x))

        def backward_in_bfloat16(call):
            out = off(call)(model, x)
            with bfloat16:
                w.loss_of(out).backward()
            return out.detach()

        yield "off, backward under bfloat16", backward_in_bfloat16
        cast = nn.Linear(4, 4, bias=False)  # numbers that bfloat16 adds exactly
        nn.init.eye_(cast.weight)
        bits = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]], requires_grad=True)
        # pytorch#112583: torch 2.6 finds a cached copy that has no graph.
        yield "a weight inside and outside", bfloat16(lambda c: cast(c(cast, bits)))

    @pytest.mark.exact("checkpoint", "result")
    @w.as_plain("a result has another type or value, or gets the gradient of another one")
    def test_arguments_and_results_are_handed_on(self):
        """Small integers and sizes that are powers of two: sums are exact in every order."""
        a = torch.tensor([1.0, -2.0, 3.0, -1.0, 2.0], requires_grad=True)
        b = torch.tensor([2.0, 1.0, -1.0, 3.0, -2.0], requires_grad=True)
        which = torch.tensor([3, 1, 3])

        def mixture(call):
            def function(a, none, scale, b, which, *rest):
                out = a * b * scale if none is None and rest == others else a
                return scale, out, None, True, a.square() + b, which.flip(0), b[which], *rest

            others = torch.exp, [1, 2], {"k": None}, Pair(1, None), a.shape
            out = call(function, a, None, 3, b, which, *others)
            return out[1].sum() + 5 * out[4].square().sum() + 7 * out[6].sum()

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
        yield "a tuple of one", all_of(lambda x: ((x * v).exp(),))
        yield "a namedtuple", all_of(lambda x: Pair(x * v, (x - v).exp()))
        model = w.probed(nn.Linear(2, 2))
        yield "one inside, two outputs", all_of(lambda x: (y := model(x * v), y.exp()))
        yield "the argument itself", all_of(lambda x: (x, x * v))
        change = lambda item: (item.mul_(2)[1].add_(1), item)[1]  # noqa: E731
        yield "two results changed in place", all_of(lambda x: (x * v, x + v), change)

    @pytest.mark.saves("checkpoint", 2)
    @bar(
        "peak of 12 layers, nested",
        "6 inputs + 2 plain layers",
        "inner checkpoints do nothing, or keep their arguments after the outer first run",
    )
    def test_nested_checkpoints_save_at_every_level(self, device):
        """One per 2 layers, inside one per 6, inside one around all 12. Bar: 3 + 2 inputs and one
        output that is computed again + the plain peak of 2 layers."""
        layers, x = w.big_chain(12, device)

        def nested(call, parts, sizes, y):
            if not sizes:
                return w.plain(parts, y)
            for start in range(0, len(parts), sizes[0]):
                y = call(partial(nested, call, parts[start : start + sizes[0]], sizes[1:]), y)
            return y

        def peak(call, layers=layers):
            step = lambda: w.loss_of(nested(call, layers, (12, 6, 2), x)).backward()  # noqa: E731
            return w.peak_of(step, device, layers, x)

        limit = 6 * x.nbytes + peak(w.plain_call, layers[:2])
        return lambda module: peak(module.checkpoint), limit, peak(w.plain_call)

    @pytest.mark.survives("checkpoint", 3)
    @w.as_plain(
        "the first backward pass drops what the second needs, or its gradients are added again"
    )
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

    @pytest.mark.survives("checkpoint", 4)
    @pytest.mark.parametrize("end", ["error", "ctrl_c"])
    @pytest.mark.parametrize("run", [1, 2])
    def test_an_error_in_either_run_comes_through(self, answer, device, run, end):
        layer = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)).to(device)
        x = draw.randn(3, 5, device=device, requires_grad=True)
        runs = []

        def step(ends):
            def function(a):
                runs.append(1)
                out = layer(a)
                return (ends() if len(runs) == run else None, out.exp())[1]

            with torch.autocast(device.type, torch.float16):
                loss = w.loss_of(answer.checkpoint(function, x))
            draw.seed(8)
            loss.backward()

        before = observed()
        check_ending(step, end, lambda: None)
        cause = "it is set by hand for a run, and not restored after an error: use `with`"
        check_equal(observed(), before, "what is in force", cause=cause, clause=UNTOUCHED)
        if run == 2:
            numbers = draw.next_random(device)
            draw.seed(8)
            cause = "the random state is not put back when the second run fails: use `with`"
            check_equal(numbers, draw.next_random(device), "the next random numbers", cause=cause)

    @pytest.mark.survives("checkpoint", 1)
    @w.as_plain("an unused output gets zeros, or the gradient of another output")
    def test_an_output_that_is_not_used_gets_no_gradient(self):
        """sqrt has an infinite derivative at 0, and 0 times infinity is NaN."""
        x = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)
        v = torch.tensor(2.0, requires_grad=True)
        outputs = lambda t: (t * 3, t.sqrt(), v.exp() * t)  # noqa: E731
        yield "output 0 is used", lambda c: c(outputs, x)[0]
        yield "output 2 is used", lambda c: c(outputs, x)[2]

    @pytest.mark.survives("checkpoint", "Raises")
    @w.refuses(
        "save_for_backward watches what it is given, unless that is .data or a copy; for changes by"
        " the function compare each argument's version (tensor._version) before and after it"
    )
    def test_refuses_an_argument_that_is_changed_in_place(self):
        """By the function, as nn.ReLU(inplace=True) does, or between two backward passes."""
        for which, name in enumerate(arguments()):

            def later(call, which=which):
                args, function = [*arguments().values()], lambda a, b, w, i: (a * b * w).exp()[i]
                loss = call(function, *args).sum()
                loss.backward(retain_graph=True)
                change(args[which])
                loss.backward()

            yield f"{name} is changed between two backward passes", later
            for what, result in {"it": lambda a: a, "numbers": lambda a: a * 2.0}.items():

                def inside(call, which=which, result=result):
                    def function(*given):
                        change(given[which])
                        return result(given[which])

                    call(function, *arguments().values())

                yield f"the function changes {name} and returns {what}", inside

    @pytest.mark.survives("checkpoint", "Raises")
    def test_refuses_tensors_that_autograd_cannot_see(self, answer, device):
        x, runs = draw.randn(5, device=device, requires_grad=True), []
        for name, given in {
            "list": [x],
            "tuple": (nn.Parameter(x.detach()),),
            "dict": {"x": x.detach()},
            "namedtuple": Pair(1, x.detach()),
            "dict in a list": [{1: x}],
        }.items():
            call = partial(answer.checkpoint, lambda *_: runs.append(1) or x * 2, 3, given)
            when = f"for a tensor in a {name} that is given"
            cause = "no check looks for a tensor in there, or not so deep"
            check_raises(call, TypeError, when=when, cause=cause)
        cause = "arguments are checked after the first run"
        check_equal(len(runs), 0, "runs of a refused function", cause=cause, clause=ERRORS)


def arguments():
    """One of each kind."""
    numbers = {
        "the input": w.leaf(5) * 1,
        "data": w.data(5),
        "a parameter": nn.Parameter(w.data(5)),
    }
    return numbers | {"indices": torch.arange(5)}


@torch.no_grad()
def change(tensor):
    """In place; the sum stays the same."""
    tensor.copy_(tensor.flip(0))
