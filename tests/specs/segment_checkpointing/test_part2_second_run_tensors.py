"""Tensors between the runs: returned, hidden, given twice, changed in place."""

from collections import OrderedDict, defaultdict
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.equal import same
from specs.segment_checkpointing import worlds as w


def kinds(given):
    """The types that a tensor is hidden in: the outermost, and what is inside."""
    if isinstance(given, (list, tuple, dict)):
        yield type(given).__name__
        for part in given.values() if isinstance(given, dict) else given:
            yield from kinds(part)


class RanAgain(Exception):
    """There was a second run although something was changed."""

    def __repr__(self):
        return f"a second run, {self}"


COPY = "on a copy of the argument as it was"
STAYS = "it is put back, or the function was given a copy: the change should stay"


class TestPart2Tensors:
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
    @w.refuses(
        "what is kept is not watched for changes: save_for_backward does that, for a tensor or its"
        " detach(), not for .data or a copy"
    )
    def test_refuses_an_argument_that_was_changed_since(self):
        for which, name in enumerate(ARGUMENTS):

            def step(call, which=which):
                args, runs = arguments(), []

                def function(*given):
                    runs.append([each.detach().clone() for each in given])
                    a, b, i, scale, weight, rows = given
                    return (a * b).exp()[i] * scale * weight * rows

                # A partial function has no __name__ for a message.
                loss = call(partial(function), *args[:-1], args[-1][1:]).sum()
                loss.backward(retain_graph=True)
                change((*args, args[0][1:])[which])
                first, *_ = runs
                runs.clear()
                try:
                    loss.backward()
                finally:
                    if runs:
                        raise RanAgain(COPY if same(runs[-1], first) else "on the changed argument")

            yield f"{name} is changed between two backward passes", RuntimeError, step

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
    @w.refuses("compare the version (tensor._version) of every argument before and after the call")
    def test_refuses_a_function_that_changes_its_argument(self):
        results = {"numbers": torch.exp, "a mask": lambda a: a > 0, "nothing": lambda a: None}
        # As nn.ReLU(inplace=True) does.
        results |= {"it": lambda a: a, "it in a tuple": lambda a: (a.exp(), a)}
        for (which, name), (what, result) in product(enumerate(ARGUMENTS), results.items()):

            def step(call, which=which, result=result):
                args, changed = arguments(), []

                def function(*given):
                    change(it := (*given, given[0][1:])[which])
                    changed.append(it.detach().clone())
                    return result(it)

                try:
                    call(partial(function), *args)
                finally:
                    it = (*args, args[0][1:])[which].detach()
                    for want in changed:
                        check_equal(it, want, "the changed argument after the call", cause=STAYS)

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
    @w.as_plain(
        "one tensor becomes two, each saved or detached on its own; or two on one memory become one"
    )
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
        with torch.autograd.graph.save_on_cpu():
            yield "given twice, while saved tensors are offloaded", step

    @pytest.mark.survives("checkpoint", "Raises")
    def test_refuses_tensors_that_autograd_cannot_see(self, answer, device):
        x, runs = draw.randn(5, device=device, requires_grad=True), []
        data, weight = x.detach(), nn.Parameter(x.detach())
        hidden = {"list": [x], "list of lists": [[x]], "tuple": (1, x), "namedtuple": w.Pair(1, x)}
        hidden |= {"list, of data": [data], "list, of indices": [x.argsort()]}
        hidden |= {"list, of parameters": [weight], "dict": {"x": data}, "dict in a list": [{1: x}]}
        hidden |= {"result of topk": x.topk(2)}
        hidden |= {"OrderedDict": OrderedDict(x=x), "defaultdict": defaultdict(list, x=[x])}
        answer.checkpoint(lambda a, _: a * 2, x, grows := [1])
        grows.append(data)
        hidden["list that was given before, without it"] = grows
        hidden["dict of one's own"] = type("Batch", (dict,), {})(x=weight)
        for name, given in hidden.items():
            call = partial(answer.checkpoint, lambda *_: runs.append(1) or x * 2, 3, given)
            when = f"for a tensor in a {name} that is given"
            check_raises(call, TypeError, mentions=[(*kinds(given),)], when=when)
        cause = "arguments are looked at after the first run"
        check_equal(
            len(runs),
            0,
            "runs of a function that is refused its arguments",
            cause=cause,
            clause=ERRORS,
        )

    @pytest.mark.survives("checkpoint", 7)
    def test_a_tensor_hidden_in_a_result_is_no_constant(self, answer, device):
        x = draw.randn(5, device=device, requires_grad=True)
        cause = "autograd does not see a tensor in a list, tuple or dict: refuse it, or take it out"
        for where, hide, find in (
            ("a list", lambda t: [t], lambda result: result[0]),
            ("an OrderedDict", lambda t: OrderedDict(y=t), lambda result: result["y"]),
            (
                "a namedtuple in a dict in a tuple",
                lambda t: (t, {"y": w.Pair(1, [t])}),
                lambda result: result[1]["y"][1][0],
            ),
        ):

            def ask(call, hide=hide, find=find):
                (x * find(call(lambda a: hide(a.sin()), x))).sum().backward()

            both, where = (w.plain_call, answer.checkpoint), f", for a tensor in {where}"
            w.check_right_or_refused(ask, *both, [x], cause, TypeError, where)


def arguments():
    scale, weight, rows = torch.tensor(2.0), nn.Parameter(w.data(3)), w.data(3, 3)
    return w.leaf(5) * 1, w.data(5), torch.arange(3), scale, weight, rows


@torch.no_grad()
def change(tensor):
    """In place, and what the numbers add up to stays."""
    tensor.copy_(tensor.flip(0)) if tensor.dim() else tensor.add_(1)


ARGUMENTS = ("the input", "a tensor without gradient", "indices", "a scale of 0 dimensions")
ARGUMENTS += ("a parameter", "rows of a batch", "a view of the input")
