"""The second run sees what the first one saw: random numbers, autocast, arguments, results."""

from collections import OrderedDict, defaultdict
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_equal, check_raises
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
        off = block(enabled=False)

        def inside(block, step):
            def under(call):
                with block:
                    return step(call)

            return under

        bfloat16, float16 = block(torch.bfloat16), block(torch.float16)
        yield "bfloat16, backward outside", inside(bfloat16, lambda c: c(model, x))
        yield "float16, backward outside", inside(float16, lambda c: c(model, x))

        def backward_in_bfloat16(of, function):
            def step(call):
                out = inside(of, lambda c: c(function, x))(call)
                with bfloat16:  # which finds a weight that was cast, to whatever dtype
                    before = layer(x).detach()
                    w.loss_of(out).backward()
                    return layer(before)

            return step

        yield "off, backward inside of bfloat16", backward_in_bfloat16(off, model)
        yield "float16, backward inside of bfloat16", backward_in_bfloat16(float16, layer)
        dtype_only = block(torch.float16, enabled=False)
        own = lambda a: block()(lambda t: model(t))(a)  # noqa: E731
        yield "float16, but off until inside", inside(dtype_only, lambda c: c(own, x))
        cast = nn.Linear(4, 4, bias=False)  # of numbers that bfloat16 holds and adds exactly
        nn.init.eye_(cast.weight)
        bits = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]], requires_grad=True)
        # pytorch#112583: in torch 2.6 a copy without a graph is found.
        yield "a weight inside and outside", inside(bfloat16, lambda c: cast(c(cast, bits)))

    @pytest.mark.exact("checkpoint", "result")
    @w.as_plain("gradients go to other outputs than theirs, or a result is not what was returned")
    def test_arguments_and_results_are_handed_on(self):
        """Small integers, and sizes that are powers of two: sums are the same in every order."""
        a, b, which = w.leaf(5), w.leaf(5), torch.tensor([3, 1, 3])

        def mixture(call):
            def function(a, none, scale, b, which, *rest):
                call.note((none, scale, rest[0] is NAME, rest[1:]))
                out = (a * b).sin() * scale
                others = rest[0], which.flip(0), b[which], *rest[1:4]
                return scale, out, None, True, a.exp() + b, *others

            others = NAME, [1, 2], {"k": None}, "word", nn.BatchNorm1d(1), np.ones(2)
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

    @pytest.mark.saves("checkpoint", 3)
    def test_nested_checkpoints_save_at_both_levels(self, answer, reference, device):
        """12 layers: a checkpoint for each 4 of them, inside one around all.

        Bar: 3 inputs of the inner ones, and one more of that size (an output that is there
        again) + the plain peak of 4 layers.
        """
        layers, x = w.big_chain(12, device)

        def peak(call, layers=layers):
            def outer(y):
                for start in range(0, len(layers), 4):
                    y = call(nn.Sequential(*layers[start : start + 4]), y)
                return y

            step = lambda: w.loss_of(call(outer, x)).backward()  # noqa: E731
            return w.peak_of(step, device, layers, x)

        calls = answer.checkpoint, reference.checkpoint, w.plain_call
        limit = 4 * x.nbytes + peak(w.plain_call, layers[:4])
        title, formula = "peak of 12 layers, nested", "4 inputs + the plain peak of 4 layers"
        cause = "the inner checkpoints do nothing when they run inside another"
        w.check_bytes(title, peak, calls, limit, formula, cause)

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

    @pytest.mark.survives("checkpoint", 1)
    @w.as_plain("zeros stand in for the gradient that is not there, or others take its place")
    def test_an_output_that_is_not_used_gets_no_gradient(self):
        """sqrt has an infinite derivative at 0, and 0 times infinity is NaN."""
        x = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)
        v = torch.tensor(2.0, requires_grad=True)
        outputs = lambda t: (t * 3, t.sqrt(), v.exp() * t)  # noqa: E731
        yield "output 0 is used", lambda c: c(outputs, x)[0]
        yield "output 2 is used", lambda c: c(outputs, x)[2]

    @pytest.mark.survives("checkpoint", 2)
    @w.as_plain("an output that is a parameter or a buffer loses its gradient, or its values")
    def test_a_parameter_or_a_buffer_may_be_returned(self):
        weight, x, fixed = w.leaf(5), w.leaf(3, 5), w.data(5)

        def leaf_of(result):  # before backward, which would start itself again without end
            cause = "a tensor that is returned as it is becomes part of the graph: detach it"
            check_equal(weight.is_leaf, True, "is_leaf of the parameter", cause=cause)
            return result

        both = lambda t: ((t * weight).exp(), weight, fixed)  # noqa: E731
        yield "both, in a tuple", lambda c: sum(map(w.loss_of, leaf_of(c(both, x))))
        yield "a parameter alone", lambda c: leaf_of(c(lambda t: weight, x)) * 3

    @pytest.mark.survives("checkpoint", "Raises")
    @w.refuses("only save_for_backward looks for changes in place, and only before the second run")
    def test_refuses_an_argument_that_was_changed_since(self):
        for which, name in enumerate(ARGUMENTS):

            def step(call, which=which):
                args, runs = arguments(), []

                def function(a, b, i, scale, weight, rows):
                    runs.append(1)
                    return (a * b).exp()[i] * scale * weight * rows

                # A partial function has no __name__ for a message.
                loss = call(partial(function), *args[:-1], args[-1][1:]).sum()
                loss.backward(retain_graph=True)
                change((*args, args[0][1:])[which])
                runs.clear()
                try:
                    loss.backward()
                except RuntimeError as error:
                    raise (
                        KeyError("it has run on the changed argument") if runs else error
                    ) from None

            yield f"{name} is changed before backward", RuntimeError, step

    @pytest.mark.survives("checkpoint", "Raises")
    def test_a_result_that_shares_an_arguments_memory_may_not_change_it(self, answer, device):
        """Who hands out copies has nothing to notice, and the gradients of what was given."""
        x = draw.randn(4, 3, device=device, requires_grad=True)
        copied = lambda function, *args: [out.clone() for out in function(*args)]  # noqa: E731

        def ask(call):
            shared, out = call(lambda a: (a[1:], a * a), x * 1)
            with torch.no_grad():
                shared.mul_(100)
            out.sum().backward()

        cause = "a slice is returned with a version of its own: .data has one, detach() has not"
        w.check_right_or_refused(ask, copied, answer.checkpoint, [x], cause)

    @pytest.mark.survives("checkpoint", "Raises")
    @w.refuses("no version (tensor._version) is compared before and after the first run")
    def test_refuses_a_function_that_changes_its_argument(self):
        results = {"numbers": torch.exp, "a mask": lambda a: a > 0, "nothing": lambda a: None}
        for (which, name), (what, result) in product(enumerate(ARGUMENTS), results.items()):

            def function(*args, which=which, result=result):
                change((*args, args[0][1:])[which])
                return result(args[0])

            step = lambda call, f=function: call(partial(f), *arguments())  # noqa: E731
            yield f"the function changes {name} and returns {what}", RuntimeError, step

    @pytest.mark.survives("checkpoint", 8)
    def test_an_overwritten_result_gives_no_wrong_gradients(self, answer, device):
        """The gradient of exp needs its result."""
        x = draw.randn(5, device=device, requires_grad=True)
        ask = lambda call: call(lambda a: a.exp().mul_(2), x).sum().backward()  # noqa: E731
        plain = lambda _, a: a.exp() * 2  # noqa: E731
        cause = "hooks on saved tensors: nobody but them compares versions"
        w.check_right_or_refused(ask, plain, answer.checkpoint, [x], cause)

    @pytest.mark.survives("checkpoint", 9)
    @w.as_plain("each argument is detached on its own: one tensor becomes two")
    def test_a_tensor_that_is_given_twice_is_one(self):
        """nn.MultiheadAttention, for one, computes otherwise where its query is its key."""
        x, fixed = w.leaf(11, 5), w.data(5)

        def step(call):
            def attend(query, key, scale, bias, other):
                same = {"query is key": query is key, "scale is bias": scale is bias}
                call.note(same | {"scale is another one": scale is other})
                return (query.sin() * key).exp() * scale + bias

            return call(attend, x, x, fixed, fixed, fixed.view(5))

        yield "given twice", step

    @pytest.mark.survives("checkpoint", "Raises")
    def test_refuses_tensors_that_autograd_cannot_see(self, answer, device):
        x, runs = draw.randn(5, device=device, requires_grad=True), []
        data, weight = x.detach(), nn.Parameter(x.detach())
        hidden = {"list": [x], "list of lists": [[x]], "tuple": (1, x), "namedtuple": w.Pair(1, x)}
        hidden |= {"list, of data": [data], "list, of indices": [x.argsort()]}
        hidden |= {"list, of parameters": [weight], "dict": {"x": data}, "dict in a list": [{1: x}]}
        hidden |= {"OrderedDict": OrderedDict(x=x), "defaultdict": defaultdict(list, x=[x])}
        hidden["dict of one's own"] = type("Batch", (dict,), {})(x=weight)
        for name, given in hidden.items():
            call = partial(answer.checkpoint, lambda *_: runs.append(1) or x * 2, 3, given)
            when, kind = f"for a tensor in a {name} that is given", type(given).__name__
            check_raises(call, TypeError, mentions=[kind], when=when)
        cause = "arguments are looked at after the first run"
        check_equal(len(runs), 0, "runs of a function that is refused its arguments", cause=cause)

    @pytest.mark.survives("checkpoint", 7)
    def test_a_tensor_hidden_in_a_result_is_no_constant(self, answer, device):
        x = draw.randn(5, device=device, requires_grad=True)
        cause = "autograd does not see the tensors inside a list: refuse them, or take them out"
        for hide, find in (
            (lambda t: [t], lambda result: result[0]),
            (lambda t: OrderedDict(y=t), lambda result: result["y"]),
            (lambda t: (t, {"y": w.Pair(1, [t])}), lambda result: result[1]["y"][1][0]),
        ):

            def ask(call, hide=hide, find=find):
                (x * find(call(lambda a: hide(a.sin()), x))).sum().backward()

            w.check_right_or_refused(ask, w.plain_call, answer.checkpoint, [x], cause, TypeError)


def arguments():
    scale, weight, rows = torch.tensor(2.0), nn.Parameter(w.data(3)), w.data(3, 3)
    return w.leaf(5) * 1, w.data(5), torch.arange(3), scale, weight, rows


@torch.no_grad()
def change(tensor):
    """In place, and what the numbers add up to stays."""
    tensor.copy_(tensor.flip(0)) if tensor.dim() else tensor.add_(1)


ARGUMENTS = ("the input", "a tensor without gradient", "indices", "a scale of 0 dimensions")
ARGUMENTS += ("a parameter", "rows of a batch", "a view of the input")
