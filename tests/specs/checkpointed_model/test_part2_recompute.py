"""The same bits for functions with a state, in every precision and after errors; bytes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_raises
from kit.laws.toys import Pair, mlp
from specs.checkpointed_model.blocks import (
    Counting,
    Nest,
    Noisy,
    Normed,
    call,
    chain,
    counting,
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
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast, draw_on, under_autocast

FLOAT, INT = torch.float32, torch.int64
STATES = {"generators": noisy, "buffers": counting}


class TestPart2Recompute:
    @pytest.mark.works("recompute", "bits")
    @recomputed("an argument or a result is lost on the way, or its gradient")
    def test_gives_what_a_plain_call_gives(self):
        yield "a dict with a tensor, a string and None comes back", chain(mixers)
        yield "a number and a word by position", chain(mixers, FLOAT, 3, "word")
        yield "keyword arguments", chain(mixers, FLOAT, name="early", flag=True)
        yield "integers", chain(mixers, INT)
        pair = lambda run, block, x: run(lambda p: block(p.first * p.second), Pair(x, x))  # noqa: E731
        yield "a namedtuple", chain(two_noisy, call=pair)
        yield "x without gradient", chain(two_noisy, grad=False)
        yield "a module in eval mode", chain(lambda: [Noisy().eval()])
        bare = lambda run, block, x: run(lambda: (block(x), x.argmax()))  # noqa: E731
        yield "no arguments, no state, and a result without gradient", chain(two_noisy, call=bare)

    @pytest.mark.works("recompute", "streams")
    @recomputed("the second run starts where the first one ended, or a stream is not restored")
    def test_draws_the_same_numbers_again(self):
        yield "torch's own stream", chain(two_noisy)
        yield "two generators, and torch's own", chain(noisy)
        yield "two calls that use one generator", chain(noisy, passes=2)

    @pytest.mark.works("recompute", "buffers")
    @recomputed("the second run sees buffers as they are by then, or changes them again")
    def test_finds_the_same_buffers_again(self):
        yield "a counter and a mean", chain(counting)
        yield "further inside", chain(lambda: [Nest(Nest(Counting()), Counting())])
        yield "replaced before the backward pass", chain(counting, between=_others)
        batch, instance = nn.BatchNorm1d(WIDTH), nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        for norm in (batch, instance, nn.BatchNorm1d(WIDTH).eval()):
            own = lambda norm=norm: [Normed(copy.deepcopy(norm))]  # noqa: E731
            yield (
                f"of {norm}, training: {norm.training}",
                chain(own, passes=2, shape=(4, WIDTH, 3), between=_others),
            )
        yield "a counter and a mean, in eval mode", chain(lambda: [Counting().eval()])

    @pytest.mark.saves("recompute", "held")
    def test_holds_arguments_and_results(self, answer, reference, device):
        """3 calls: 2 inputs (x is in the baseline) and the output; the bar adds 1. One call's
        inside would be 8 inputs more: its hidden layer and the ReLU of it."""
        layers = [nn.Sequential(mlp(WIDTH, 4 * WIDTH, WIDTH), nn.Dropout(0.25)) for _ in range(3)]
        model, x = nn.Sequential(*layers).to(device), large_inputs(device)

        def calls(run, y):
            for block in model:
                y = run(lambda *, y, b=block: b(y), y=y, state=[block])
            return y

        run = lambda module: module.recompute if module else plain  # noqa: E731
        reads = lambda module: held(model, x, lambda: calls(run(module), x))  # noqa: E731
        given = ("held between the passes, 3 calls, by keyword", 4 * one_input(x), "(3 + 1) inputs")
        cause = "part of the inside is kept"
        check_limit(*given, reads, answer, reference, cause=cause)

    @pytest.mark.saves("recompute", "held")
    def test_leaves_nothing_behind(self, answer, device):
        block = nn.Sequential(mlp(WIDTH, 4 * WIDTH, WIDTH), nn.BatchNorm1d(64)).to(device)
        x = large_inputs(device)
        one = lambda x: answer.recompute(block, x, state=[block])  # noqa: E731
        for forward in (one, lambda x: answer.recompute(one, x, state=[block])):
            check_nothing_left(block, x, lambda forward=forward: forward(x * 1))

    @pytest.mark.survives("recompute", 1)
    @recomputed("calls share saved state, or it serves only one second run")
    def test_calls_share_nothing(self):
        for name, make in STATES.items():
            yield f"three calls, {name}", chain(make, passes=3)
            yield f"others between two backward passes, {name}", chain(make, late=_others), 3

    @pytest.mark.survives("recompute", 2)
    @recomputed("an argument or a result is lost on the way, or its gradient")
    def test_gives_gradients_to_tensors_anywhere(self):
        yield "in containers by keyword", chain(mixers, a={"b": FLOAT, "c": [{"d": FLOAT}]})
        yield "in a tuple by position", chain(mixers, FLOAT, (FLOAT, 2.5, None))

    @pytest.mark.survives("recompute", 3)
    def test_notices_an_argument_changed_in_place(self, answer, device):
        """Autograd refuses a saved tensor that was changed; a closure saves nothing."""
        block, x = Noisy().to(device), draw.randn(*SHAPE, device=device, requires_grad=True) * 1
        loss = answer.recompute(block, x).sum()
        x.detach().zero_()
        cause = "x is kept in a closure or by reference, and nobody looks for a change"
        when = "in the backward pass, as x was set to zero after the call"
        check_raises(loss.backward, Exception, when=when, cause=cause)

    @pytest.mark.survives("recompute", 4)
    @recomputed("streams and buffers are restored only without an error: no finally")
    def test_restores_everything_after_an_error(self):
        for error in (ValueError, KeyboardInterrupt):
            for name, make in STATES.items():
                given = {"call": partial(_failing, error), "step": {"backward": _tried_again}}
                yield f"{error.__name__}, {name}", chain(make, between=draw_on, **given), 3

    @pytest.mark.survives("recompute", 5)
    @recomputed("the second run has the backward pass's autocast, or its default dtype")
    def test_runs_again_in_the_same_precision(self):
        for dtype in HALVES:
            for name, make in STATES.items():
                yield f"{dtype}, {name}", chain(make, step={"outer": autocast(dtype)})
        yield "the backward pass alone is under it", chain(noisy, step={"backward": under_autocast})

    @pytest.mark.survives("recompute", 6)
    @recomputed("gradients are switched on inside, or the function runs twice")
    def test_runs_once_without_gradients(self):
        for name, make in STATES.items():
            yield name, chain(make, step={"outer": torch.no_grad}), 1

    @pytest.mark.gpu
    @pytest.mark.survives("recompute", 7)
    @recomputed("checkpoint() keeps the random state of the devices of its tensor arguments only")
    def test_keeps_the_devices_stream(self):
        yield "by position", chain(two_noisy)
        named = lambda run, block, x: run(lambda *, y: block(y), y=x, state=[block])  # noqa: E731
        yield "by keyword", chain(two_noisy, call=named)
        captured = lambda run, block, x: run(lambda: block(x), state=[block])  # noqa: E731
        yield "in a closure", chain(two_noisy, call=captured)


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


def _others(model):
    """Draw numbers and replace buffers, as a step on other data would."""
    draw_on(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer + 1)
