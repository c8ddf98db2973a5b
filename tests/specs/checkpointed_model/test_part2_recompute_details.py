"""The same bits in other ways: containers, errors, precisions, what is dropped."""

from functools import partial

import pytest
import torch
from torch import nn

from kit.laws.checks import check_equal, check_raises
from kit.laws.toys import mlp
from specs.checkpointed_model.blocks import (
    NORMS,
    Noisy,
    Normed,
    call,
    chain,
    counting,
    guarded,
    mixers,
    noisy,
    recomputed,
    replace_buffers,
    two_noisy,
)
from specs.checkpointed_model.large import check_nothing_left, large_inputs
from specs.checkpointed_model.steps import HALVES, WIDTH, autocast, draw_on

FLOAT, INT = torch.float32, torch.int64
STATES = {"generators": noisy, "buffers": counting}


def failing(error, run, block, x):
    """The second run fails, the third does not."""
    ends = iter([None, error])

    def function(x):
        y = block(x)
        if next(ends, None):
            raise error
        return torch.tanh(y)

    return call(lambda block, x, state: run(function, x, state=state), block, x)


def tried_again(loss):
    """A backward pass, and another one if it fails."""
    try:
        loss.backward(retain_graph=True)
    except (ValueError, KeyboardInterrupt):
        loss.backward()


def others(model, *_):
    """Other numbers are drawn, and buffers are replaced."""
    replace_buffers(model)
    draw_on(model)


class TestPart2RecomputeDetails:
    @pytest.mark.survives("recompute", 1)
    @recomputed("a kind of norm is not known, or one does something else when it runs again")
    def test_counts_each_batch_once(self):
        """pytorch/pytorch#96136: the second run counts the batch again."""
        for name, (dims, norm) in NORMS.items():
            shape = (4, WIDTH, 3, 2, 2)[:dims]
            yield name, chain(lambda norm=norm: [Normed(norm())], passes=2, shape=shape)

    @pytest.mark.survives("recompute", 2)
    @recomputed("calls share what they found, or it serves one second run only")
    def test_calls_share_nothing(self):
        for name, make in STATES.items():
            yield f"three calls, {name}", chain(make, passes=3)
            yield f"others between two backward passes, {name}", chain(make, late=others), 3

    @pytest.mark.survives("recompute", 3)
    @guarded("such a tensor is kept without being saved, so that nobody notices a change")
    def test_tensors_anywhere_are_guarded(self):
        tensors = {
            "x": (lambda x, args, kwargs: x, ()),
            "integers": (lambda x, args, kwargs: args[0], (INT,)),
            "in a tuple": (lambda x, args, kwargs: args[0][1], ((None, FLOAT),)),
            "in a list": (lambda x, args, kwargs: args[0][1], ([None, FLOAT],)),
            "by keyword": (lambda x, args, kwargs: kwargs["b"], (), {"b": FLOAT}),
            "in a dict": (lambda x, args, kwargs: kwargs["b"]["c"], (), {"b": {"c": FLOAT}}),
        }
        for what, (find, args, *kwargs) in tensors.items():
            zero = lambda model, *given, find=find: find(*given).detach().zero_()  # noqa: E731
            world = partial(chain, mixers, *args, **dict(*kwargs))
            yield what, world(spoil=zero), world()
            late = f"{what}, between two backward passes"
            yield late, world(late=zero), world(late=lambda *_: None)

    @pytest.mark.survives("recompute", 4)
    @recomputed("they are put back if all goes well: no finally")
    def test_puts_everything_back_after_an_error(self):
        """The second run ends by an error, and the third one finds what was there before it."""
        for error in (ValueError, KeyboardInterrupt):
            for name, make in STATES.items():
                given = {"call": partial(failing, error), "step": {"backward": tried_again}}
                yield f"{error.__name__}, {name}", chain(make, spoil=draw_on, **given), 3

    @pytest.mark.survives("recompute", 5)
    @recomputed("torch's checkpoint takes the function's keyword argument for its own")
    def test_keyword_arguments_may_have_any_name(self):
        names = ["use_reentrant", "context_fn", "preserve_rng_state", "function", "args"]
        yield "debug", chain(mixers, debug=0.5)
        others = dict.fromkeys([*names, "determinism_check", "early_stop", "kwargs"], 0.5)
        yield "others", chain(mixers, **others)

    @pytest.mark.survives("recompute", 6)
    @recomputed("the second run is without autocast, or has its default dtype")
    def test_runs_again_in_the_same_precision(self):
        for dtype in HALVES:
            for name, make in STATES.items():
                yield f"{dtype}, {name}", chain(make, step={"outer": autocast(dtype)})

    @pytest.mark.survives("recompute", 7)
    @recomputed("gradients are switched on again inside, or it runs twice at once")
    def test_runs_once_without_gradients(self):
        for mode in (torch.no_grad, torch.inference_mode):
            for name, make in STATES.items():
                yield f"{mode.__name__}, {name}", chain(make, step={"outer": mode}), 1

    @pytest.mark.gpu
    @pytest.mark.survives("recompute", 8)
    @recomputed("checkpoint() keeps the random state of the devices of its tensor arguments only")
    def test_keeps_the_devices_stream(self):
        """`checkpoint(lambda: function(*args))` has no tensor argument."""
        yield "by position", chain(two_noisy)
        named = lambda run, block, x: run(lambda *, y: block(y), y=x, state=[block])  # noqa: E731
        yield "by keyword", chain(two_noisy, call=named)
        captured = lambda run, block, x: run(lambda: block(x), state=[block])  # noqa: E731
        yield "in a closure", chain(two_noisy, call=captured)

    @pytest.mark.survives("recompute", 9)
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
        block, ran = Noisy(), []
        for bad in (torch.ones(2), Noisy):
            for state in ([block, bad], [bad, block]):
                call = partial(answer.recompute, ran.append, torch.ones(2), state=state)
                for mode in (torch.enable_grad, torch.no_grad):
                    when = f"for {bad!r} in state, under {mode.__name__}"
                    check_raises(mode()(call), TypeError, mentions=[bad], when=when)
        check_equal(ran, [], "runs of the function", cause="state is checked too late")
