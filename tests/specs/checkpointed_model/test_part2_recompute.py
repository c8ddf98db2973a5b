"""The same bits for functions with a state: their own random streams, buffers that they change."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws.toys import mlp
from specs.checkpointed_model.blocks import (
    Counting,
    Nest,
    Noisy,
    Normed,
    Pair,
    chain,
    counting,
    frozen,
    mixers,
    noisy,
    plain,
    recomputed,
    replace_buffers,
    two_noisy,
)
from specs.checkpointed_model.large import check_limit, held, large_inputs, one_input
from specs.checkpointed_model.steps import WIDTH

FLOAT, COMPLEX, INT = torch.float32, torch.complex64, torch.int64


class Batch(dict):
    """As the batches of libraries: a dict that can do more, and has attributes."""

    scale = 1.0

    @property
    def pixels(self):
        return self["pixels"] * self.scale


class TestPart2Recompute:
    @pytest.mark.works("recompute", "bits")
    @recomputed("an argument, a result, or the graph of one of them is lost on the way")
    def test_gives_what_a_plain_call_gives(self):
        yield "a dict with a tensor, a string and None comes back", chain(mixers)
        yield "a number and a word by position", chain(mixers, FLOAT, 3, "word")
        yield "keyword arguments", chain(mixers, FLOAT, name="early", flag=True)
        yield "integers and complex numbers", chain(mixers, INT, COMPLEX)
        yield "a namedtuple", chain(two_noisy, call=_of_a_pair)
        yield "x without gradient", chain(two_noisy, grad=False)
        yield "a module in eval mode", chain(lambda: [Noisy().eval()])
        through = lambda run, block, x: run(lambda x: (x + block(x), x, x[1:]), x, state=[block])  # noqa: E731
        yield "x and a part of it come back", chain(two_noisy, call=through)
        last = lambda run, block, x: run(lambda x: (block(x), x.argmax()), x)  # noqa: E731
        yield "no state, and a result without gradient", chain(two_noisy, call=last)
        yield "one tensor as query and key, and its data", chain(two_noisy, call=_of_itself)

    @pytest.mark.works("recompute", "streams")
    @recomputed("the second run draws on where the first one ended, or moves a stream for good")
    def test_draws_the_same_numbers_again(self):
        """As tensor parallelism draws dropout: a generator for what differs between ranks."""
        yield "torch's own stream", chain(two_noisy)
        yield "two generators, and torch's own", chain(noisy)
        yield "generators, and x without gradient", chain(noisy, grad=False)
        yield "two blocks with one generator", chain(_one_generator)
        yield "three calls inside of one", chain(lambda: [Noisy(7)], call=_three_inside), None
        in_eval = lambda: [Noisy(7).eval()]  # noqa: E731
        yield "dropout after a block in eval mode", chain(in_eval, call=_dropped)

    @pytest.mark.works("recompute", "buffers")
    @recomputed("the second run finds what is there by then, or changes it again")
    def test_finds_the_same_buffers_again(self):
        """What depends on a counter or a running mean depends on when it runs."""
        yield "a counter and a mean", chain(counting)
        yield "further inside", chain(lambda: [Nest(Nest(Counting()), Counting())])
        yield "replaced before the backward pass", chain(counting, spoil=replace_buffers)
        norm = lambda: [Normed(frozen())]  # noqa: E731
        yield "of a norm in eval mode", chain(norm, shape=(4, WIDTH, 3), spoil=replace_buffers)
        read = {"prepared": _shifted, "call": _reads}
        later = lambda model, *_: model.order[0].shift.add_(1)  # noqa: E731
        yield "only read, and written to later", chain(lambda: [Noisy()], **read, spoil=later)
        yield "a counter and a mean, in eval mode", chain(lambda: [Counting().eval()])
        both = lambda: [Nest(Noisy(7), Counting())]  # noqa: E731
        once = lambda run, block, x: run(block, x, state=iter([block, block.inner[0].first]))  # noqa: E731
        yield "state that can be read once", chain(both, call=once)
        every = lambda run, block, x: run(block, x, state=[*block.modules(), block])  # noqa: E731
        yield "modules named twice", chain(lambda: [Nest(Counting())], call=every, passes=2)

    @pytest.mark.saves("recompute", "held")
    def test_holds_arguments_and_results(self, answer, reference, device):
        """Of a chain of 3 calls: 2 inputs (x is the baseline's) and the output; buffers are small.
        The inside of one call would be 8 inputs more, for its hidden layer and the ReLU of it.
        The bar adds 1."""
        step = lambda run, chain, x, model: chain(run, x)  # noqa: E731
        cause = "something of the inside is kept"
        _check_held(answer, reference, device, 3, "3 calls", step, cause)

    @pytest.mark.survives("recompute", "held")
    def test_a_call_around_others_frees_what_they_hold(self, answer, reference, device):
        """It is the output alone, and the bar adds 1."""
        step = lambda run, chain, x, model: run(partial(chain, run), x, state=[model])  # noqa: E731
        cause = "arguments are held by something else than the graph, as a closure, so that a call "
        cause += "around cannot free them: give checkpoint() each tensor by position"
        _check_held(answer, reference, device, 1, "3 calls in one more", step, cause)

    @pytest.mark.survives("recompute", "function")
    @recomputed("an argument, a result, or the graph of one of them is lost on the way")
    def test_takes_and_returns_anything(self):
        yield "a dict of another class", chain(two_noisy, call=_batched)
        by_sort = lambda run, block, x: run(lambda y: block(y[0]).sort(dim=1), x.sort(dim=1))  # noqa: E731
        yield "what sort() gives comes and goes", chain(two_noisy, call=by_sort)
        given = {"d": FLOAT, "c": FLOAT}
        yield "keywords and a dict that are not sorted", chain(mixers, given, b=FLOAT, a=FLOAT)
        yield "in containers by keyword", chain(mixers, a={"b": FLOAT, "c": [{"d": FLOAT}]})
        yield "in a tuple by position", chain(mixers, FLOAT, (FLOAT, 2.5, None))


def _shifted(model):
    model.order[0].register_buffer("shift", torch.zeros(WIDTH))


def _reads(run, block, x):
    return run(lambda x: block(x + block.shift), x, state=[block])


def _of_a_pair(run, block, x):
    return run(lambda pair: block(pair.first * pair.second), Pair(x, 0.5), state=[block])


def _of_itself(run, block, x):
    """As nn.MultiheadAttention does, it asks whether they are one; and one more has no graph."""
    both = lambda query, key, data: block((query if query is key else -key) * data)  # noqa: E731
    return run(both, x, x, x.detach(), state=[block])


def _batched(run, block, x):
    batch = Batch(pixels=x)
    batch.scale = 0.5
    return run(lambda batch: block(batch.pixels), batch)


def _three_inside(run, block, x):
    def three(x):
        for _ in range(3):
            x = run(block, x, state=block.generators)
        return x

    return run(three, x, state=block.generators)


def _dropped(run, block, x):
    return run(lambda x: F.dropout(block(x), 0.25), x, state=[block, *block.generators])


def _one_generator():
    blocks = [Noisy(7), Noisy()]
    blocks[1].first = blocks[0].first
    return blocks


def _check_held(answer, reference, device, inputs, what, step, cause):
    __tracebackhide__ = True
    layers = [nn.Sequential(mlp(WIDTH, 4 * WIDTH, WIDTH), nn.Dropout(0.25)) for _ in range(3)]
    model, x = nn.Sequential(*layers).to(device), large_inputs(device)

    def calls(run, y):
        for block in model:
            y = run(lambda *, y, b=block: b(y), y=y, state=[block])
        return y

    reads = lambda m: held(model, x, lambda: step(m.recompute if m else plain, calls, x, model))  # noqa: E731
    title, formula = f"held between the passes, {what}, by keyword", f"({inputs} + 1) inputs"
    limit = (inputs + 1) * one_input(x)
    check_limit(title, limit, formula, reads, answer, reference, cause=cause)
