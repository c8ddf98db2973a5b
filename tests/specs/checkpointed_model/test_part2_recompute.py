"""The same bits for functions with a state, in every precision and after errors; bytes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from kit.laws.checks import check_equal, check_raises
from kit.laws.toys import mlp
from specs.checkpointed_model.blocks import (
    Counting,
    Nest,
    Noisy,
    Normed,
    Pair,
    call,
    chain,
    counting,
    guarded,
    mixers,
    noisy,
    plain,
    recomputed,
    two_noisy,
)
from specs.checkpointed_model.large import (
    check_limit,
    check_nothing_left,
    held,
    large_inputs,
    one_input,
)
from specs.checkpointed_model.steps import HALVES, WIDTH, autocast, changed, draw_on, under_autocast

FLOAT, COMPLEX, INT = torch.float32, torch.complex64, torch.int64
STATES = {"generators": noisy, "buffers": counting}


class TestPart2Recompute:
    @pytest.mark.works("recompute", "bits")
    @recomputed("an argument, a result, or the graph of one of them is lost on the way")
    def test_gives_what_a_plain_call_gives(self):
        yield "a dict with a tensor, a string and None comes back", chain(mixers)
        yield "a number and a word by position", chain(mixers, FLOAT, 3, "word")
        yield "keyword arguments", chain(mixers, FLOAT, name="early", flag=True)
        yield "integers and complex numbers", chain(mixers, INT, COMPLEX)
        alike = lambda p, data: (p.first if p.first is p.second else -p.second) * data  # noqa: E731
        pair = lambda run, block, x: run(lambda *p: block(alike(*p)), Pair(x, x), x.detach())  # noqa: E731
        yield "a namedtuple with one tensor twice, and its data", chain(two_noisy, call=pair)
        yield "x without gradient", chain(two_noisy, grad=False)
        yield "a module in eval mode", chain(lambda: [Noisy().eval()])
        through = lambda run, block, x: run(lambda x: (x + block(x), x, x[1:]), x, state=[block])  # noqa: E731
        yield "x and a part of it come back", chain(two_noisy, call=through)
        bare = lambda run, block, x: run(lambda: (block(x), x.argmax()))  # noqa: E731
        yield "no arguments, no state, and a result without gradient", chain(two_noisy, call=bare)

    @pytest.mark.works("recompute", "streams")
    @recomputed("the second run draws on where the first one ended, or moves a stream for good")
    def test_draws_the_same_numbers_again(self):
        yield "torch's own stream", chain(two_noisy)
        yield "two generators, and torch's own", chain(noisy)
        yield "two calls that use one generator", chain(noisy, passes=2)
        own = torch.default_generator
        twice = lambda run, block, x: run(block, x, state=2 * [own, block.first])  # noqa: E731
        yield "generators named twice, torch's own too", chain(lambda: [Noisy(7)], call=twice)

    @pytest.mark.works("recompute", "buffers")
    @recomputed("the second run finds what is there by then, or changes it again")
    def test_finds_the_same_buffers_again(self):
        yield "a counter and a mean", chain(counting)
        yield "further inside", chain(lambda: [Nest(Nest(Counting()), Counting())])
        yield "replaced before the backward pass", chain(counting, spoil=_others)
        batch, instance = nn.BatchNorm1d(WIDTH), nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        for norm in (batch, instance, nn.BatchNorm1d(WIDTH).eval()):
            own = lambda norm=norm: [Normed(copy.deepcopy(norm))]  # noqa: E731
            yield (
                f"of {norm}, training: {norm.training}",
                chain(own, passes=2, shape=(4, WIDTH, 3), spoil=_others),
            )
        read = lambda run, block, x: run(lambda x: block(x + block.shift), x, state=[block])  # noqa: E731
        later = lambda model, *_: model.order[0].shift.add_(1)  # noqa: E731
        only = chain(lambda: [Noisy()], prepared=_shifted, call=read, spoil=later)
        yield "only read, and written to later", only
        write = lambda block, x: (block.shift.add_(1), block(x + block.also))[1]  # noqa: E731
        both = lambda run, block, x: run(partial(write, block), x, state=[block])  # noqa: E731
        yield "one under two names", chain(lambda: [Noisy()], prepared=_shifted, call=both)
        yield "a counter and a mean, in eval mode", chain(lambda: [Counting().eval()])
        both = lambda: [Nest(Noisy(7), Counting())]  # noqa: E731
        iterator = lambda run, block, x: run(block, x, state=iter([block, block.inner[0].first]))  # noqa: E731
        yield "state that can be read once", chain(both, call=iterator)
        every = lambda run, block, x: run(block, x, state=[*block.modules(), block])  # noqa: E731
        yield "modules named twice", chain(lambda: [Nest(Counting())], call=every, passes=2)

    @pytest.mark.saves("recompute", "held")
    def test_holds_arguments_and_results(self, answer, reference, device):
        """Of a chain of 3 calls: 2 inputs (x is the baseline's) and the output; the bar adds 1. The
        inside of one call would be 8 inputs more, for its hidden layer and the ReLU of it."""
        layers = [nn.Sequential(mlp(WIDTH, 4 * WIDTH, WIDTH), nn.Dropout(0.25)) for _ in range(3)]
        model, x = nn.Sequential(*layers).to(device), large_inputs(device)

        def calls(run, y):
            for block in model:
                y = run(lambda *, y, b=block: b(y), y=y, state=[block])
            return y

        run = lambda module: module.recompute if module else plain  # noqa: E731
        reads = lambda module: held(model, x, lambda: calls(run(module), x))  # noqa: E731
        given = ("held between the passes, 3 calls, by keyword", 4 * one_input(x), "(3 + 1) inputs")
        cause = "something of the inside is kept"
        check_limit(*given, reads, answer, reference, cause=cause)

    @pytest.mark.survives("recompute", 2)
    @recomputed("an argument, a result, or the graph of one of them is lost on the way")
    def test_takes_and_returns_anything(self):
        by_sort = lambda run, block, x: run(lambda y: block(y[0]).sort(dim=1), x.sort(dim=1))  # noqa: E731
        yield "what sort() gives comes and goes", chain(two_noisy, call=by_sort)
        given = {"d": FLOAT, "c": FLOAT}
        yield "keywords and a dict that are not sorted", chain(mixers, given, b=FLOAT, a=FLOAT)
        yield "in containers by keyword", chain(mixers, a={"b": FLOAT, "c": [{"d": FLOAT}]})
        yield "in a tuple by position", chain(mixers, FLOAT, (FLOAT, 2.5, None))
        yield "debug", chain(mixers, debug=0.5)
        names = ["use_reentrant", "context_fn", "preserve_rng_state", "determinism_check"]
        others = dict.fromkeys([*names, "early_stop", "function", "args", "kwargs"], 0.5)
        yield "other keywords of torch's checkpoint", chain(mixers, **others)

    @pytest.mark.survives("recompute", 1)
    @recomputed("calls share what they found, or it serves one second run only")
    def test_calls_share_nothing(self):
        for name, make in STATES.items():
            yield f"three calls, {name}", chain(make, passes=3)
            yield f"others between two backward passes, {name}", chain(make, late=_others), 3

    @pytest.mark.survives("recompute", 2)
    @guarded("such a tensor is kept without being saved, so that nobody notices a change")
    def test_tensors_anywhere_are_guarded(self):
        tensors = {
            "x": (lambda x, args, kwargs: x, ()),
            "integers": (lambda x, args, kwargs: args[0], (INT,)),
            "in a tuple": (lambda x, args, kwargs: args[0][1], ((None, FLOAT),)),
            "in a dict in a list": (
                lambda x, args, kwargs: args[0][1]["d"],
                ([0.5, {"d": FLOAT}],),
            ),
            "by keyword": (lambda x, args, kwargs: kwargs["b"], (), {"b": FLOAT}),
            "in a list in a dict": (
                lambda x, args, kwargs: kwargs["b"]["c"][0],
                (),
                {"b": {"c": [FLOAT]}},
            ),
        }
        for what, (find, args, *kwargs) in tensors.items():
            zero = lambda model, *given, find=find: find(*given).detach().zero_()  # noqa: E731
            world = partial(chain, mixers, *args, **dict(*kwargs))
            yield from changed(what, world, zero)

    @pytest.mark.survives("recompute", 3)
    @recomputed("they are put back if all goes well: no finally")
    def test_puts_everything_back_after_an_error(self):
        for error in (ValueError, KeyboardInterrupt):
            for name, make in STATES.items():
                given = {"call": partial(_failing, error), "step": {"backward": _tried_again}}
                yield f"{error.__name__}, {name}", chain(make, spoil=draw_on, **given), 3

    @pytest.mark.survives("recompute", 4)
    @recomputed("the second run has the backward pass's autocast, or its default dtype")
    def test_runs_again_in_the_same_precision(self):
        for dtype in HALVES:
            for name, make in STATES.items():
                yield f"{dtype}, {name}", chain(make, step={"outer": autocast(dtype)})
        yield "the backward pass alone is under it", chain(noisy, step={"backward": under_autocast})

    @pytest.mark.survives("recompute", 5)
    @recomputed("gradients are switched on again inside, or it runs twice at once")
    def test_runs_once_without_gradients(self):
        for mode in (torch.no_grad, torch.inference_mode):
            for name, make in STATES.items():
                yield f"{mode.__name__}, {name}", chain(make, step={"outer": mode}), 1

    @pytest.mark.gpu
    @pytest.mark.survives("recompute", 6)
    @recomputed("checkpoint() keeps the random state of the devices of its tensor arguments only")
    def test_keeps_the_devices_stream(self):
        yield "by position", chain(two_noisy)
        named = lambda run, block, x: run(lambda *, y: block(y), y=x, state=[block])  # noqa: E731
        yield "by keyword", chain(two_noisy, call=named)
        captured = lambda run, block, x: run(lambda: block(x), state=[block])  # noqa: E731
        yield "in a closure", chain(two_noisy, call=captured)

    @pytest.mark.survives("recompute", 7)
    def test_a_dropped_result_leaves_nothing(self, answer, device):
        with device:
            noise = Noisy(7)
        block = nn.Sequential(mlp(WIDTH, 4 * WIDTH, WIDTH), noise, nn.BatchNorm1d(64)).to(device)
        x, state = large_inputs(device), [block, *noise.generators]
        one = lambda x: answer.recompute(block, x, state=state)  # noqa: E731
        for forward in (one, lambda x: answer.recompute(one, x, state=state)):
            check_nothing_left(block, x, lambda forward=forward: forward(x * 1))

    @pytest.mark.survives("recompute", "Raises")
    def test_refuses_other_state(self, answer):
        bad, ran = torch.ones(2), []
        for state in ([Noisy(), bad], [bad, Noisy()]):
            call = partial(answer.recompute, ran.append, torch.ones(2), state=state)
            for mode in (torch.enable_grad, torch.no_grad):
                when = f"for {bad!r} in state, under {mode.__name__}"
                check_raises(mode()(call), TypeError, mentions=[bad], when=when)
        check_equal(ran, [], "runs of the function", cause="state is checked too late")


def _failing(error, run, block, x):
    """The second run fails, the third does not."""
    ends = iter([None, error])

    def function(x):
        y = block(x)
        if next(ends, None):
            raise error
        return torch.tanh(y)

    return call(lambda block, x, state: run(function, x, state=state), block, x)


def _tried_again(loss, leaves):
    """A backward pass, and another one if it fails."""
    try:
        loss.backward(retain_graph=True)
    except (ValueError, KeyboardInterrupt):
        loss.backward()


def _shifted(model):
    """The block has a buffer more, under two names."""
    block = model.order[0]
    block.register_buffer("shift", torch.zeros(WIDTH))
    block.register_buffer("also", block.shift)


def _others(model, *_):
    """Other numbers are drawn, and buffers are replaced, as by a step on other data."""
    draw_on(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer + 1)
