"""The same bits in other ways: containers, errors, precisions, modes, what is dropped."""

from collections import OrderedDict, defaultdict
from functools import partial

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import check_equal, check_raises
from kit.laws.scenarios import once, scenarios
from kit.laws.toys import mlp
from specs.checkpointed_model.blocks import (
    NORMS,
    Counting,
    Nest,
    Noisy,
    Normed,
    call,
    chain,
    counting,
    frozen,
    mixers,
    noisy,
    nothing,
    plain,
    recomputed,
    replace_buffers,
    seen,
)
from specs.checkpointed_model.large import check_nothing_left, large_inputs
from specs.checkpointed_model.steps import HALVES, WIDTH, autocast, never_wrong, twice

FLOAT, INT = torch.float32, torch.int64
# Dicts of other classes
DICTS = {"an ordered dict": OrderedDict, "a defaultdict": partial(defaultdict, float)}
Row = type("Row", (list,), {})
DICTS["a dict of a class of one's own"] = type("Output", (OrderedDict,), {})


@scenarios("the step")
def guarded(answer, device, name, late, spoil, args=(), kwargs=None):
    """A tensor is set to zero between the passes, or `late`, between two backward passes."""
    given = []

    def backward(spoils, loss):
        if late:
            loss.backward(retain_graph=True)
        if spoils:
            spoil(*given).detach().zero_()
        loss.backward()

    def step(spoils):
        note = lambda *passed: given.extend(passed)  # noqa: E731
        steps = {"backward": partial(backward, spoils)}
        return chain(mixers, *args, **kwargs or {}, spoil=note, step=steps)

    mine = seen(step(True), answer.recompute, nothing, device, any_error=True)
    true = once(name, lambda: seen(step(False), plain, nothing, device))
    got, want = never_wrong(mine, lambda: true)
    drawn = "numbers drawn after the backward pass"  # after an error too
    return {"backward": got, drawn: mine[drawn]}, {"backward": want, drawn: true[drawn]}


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


def in_autocast(dtype, loss):
    with autocast(dtype)():
        loss.backward()


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
        for name, make in {"generators": noisy, "buffers": counting}.items():
            yield f"three calls, {name}", chain(make, passes=3)
            yield f"two backward passes, {name}", chain(make, step={"backward": twice}), 3
            yield f"others between two backward passes, {name}", _others_between(make), 3

    @pytest.mark.survives("recompute", 3)
    @guarded("such a tensor is kept without being saved, so that nobody notices a change")
    def test_tensors_anywhere_are_guarded(self):
        tensors = {
            "x": (lambda _, x, args, kwargs: x,),
            "integers": (lambda _, x, args, kwargs: args[0], (INT,)),
            "in a tuple": (lambda _, x, args, kwargs: args[0][1], ((None, FLOAT),)),
            "in a list of one's own": (
                lambda _, x, args, kwargs: args[0][1],
                (Row((None, FLOAT)),),
            ),
            "by keyword": (lambda _, x, args, kwargs: kwargs["b"], (), {"b": FLOAT}),
            "in a dict": (lambda _, x, args, kwargs: kwargs["b"]["c"], (), {"b": {"c": FLOAT}}),
        }
        for kind, of in DICTS.items():
            within = lambda _, x, args, kwargs: args[0]["b"]  # noqa: E731
            tensors[f"in {kind}"] = (within, (of(b=FLOAT),))
        for what, given in tensors.items():
            yield what, False, *given
            yield f"{what}, between two backward passes", True, *given

    @pytest.mark.survives("recompute", 3)
    @recomputed("the second run is handed the caller's own container, with what is in it by then")
    def test_containers_may_be_changed_afterwards(self):
        changed = lambda model, x, args, kwargs: args[0].update(b=2.0)  # noqa: E731
        yield "a dict of numbers", chain(mixers, {"b": 0.5}, spoil=changed)
        longer = lambda model, x, args, kwargs: kwargs["c"][0].append(2.0)  # noqa: E731
        yield "a list in a list, by keyword", chain(mixers, c=[[0.5]], spoil=longer)
        inside = lambda model, x, args, kwargs: args[0][0].update(b=2.0)  # noqa: E731
        yield "a dict in a tuple", chain(mixers, ({"b": 0.5},), spoil=inside)
        for kind, of in DICTS.items():
            yield f"{kind} with a tensor too", chain(mixers, of(a=FLOAT, b=0.5), spoil=changed)

    @pytest.mark.survives("recompute", 4)
    @recomputed("they are put back if all goes well: no finally; or a mode is left behind")
    def test_puts_everything_back_after_an_error(self):
        """The second run ends by an error, and the third one finds what was there before it."""
        in_eval = lambda model, *_: model.order[0].inner[1].eval()  # noqa: E731
        nest = lambda: [Nest(Counting(), nn.Dropout(0.25))]  # noqa: E731
        for error in (ValueError, KeyboardInterrupt):
            given = {"call": partial(failing, error), "step": {"backward": tried_again}}
            drawn = chain(noisy, spoil=_draw_on, **given)  # all streams go on until then
            yield f"{error.__name__}, generators", drawn, 3
            yield f"{error.__name__}, buffers and modes", chain(nest, spoil=in_eval, **given), 3

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
            for name, make in {"generators": noisy, "buffers": counting}.items():
                yield f"{dtype}, {name}", chain(make, step={"outer": autocast(dtype)})
                backward = {"backward": partial(in_autocast, dtype)}
                yield f"{dtype} in the backward pass alone, {name}", chain(make, step=backward)

    @pytest.mark.survives("recompute", 7)
    @recomputed("gradients are switched on again inside, or it runs twice at once")
    def test_runs_once_without_gradients(self):
        for mode in (torch.no_grad, torch.inference_mode):
            for name, make in {"generators": noisy, "buffers": counting}.items():
                yield f"{mode.__name__}, {name}", chain(make, step={"outer": mode}), 1

    @pytest.mark.gpu
    @pytest.mark.survives("recompute", 8)
    @recomputed("checkpoint() keeps the random state of the devices of its tensor arguments only")
    def test_keeps_the_devices_stream(self):
        """`checkpoint(lambda: function(*args))` has no tensor argument."""
        yield "by position", chain(lambda: [Noisy()])
        named = lambda run, block, x: run(lambda *, y: block(y), y=x, state=[block])  # noqa: E731
        yield "by keyword", chain(lambda: [Noisy()], call=named)
        captured = lambda run, block, x: run(lambda: block(x), state=[block])  # noqa: E731
        yield "in a closure", chain(lambda: [Noisy()], call=captured)

    @pytest.mark.survives("recompute", 9)
    @recomputed(
        "the second run goes by the modes that it finds, or leaves others behind; or train() is"
        " called, which may do more than to set flags"
    )
    def test_runs_again_in_the_same_modes(self):
        to_eval, to_training = (lambda model, *_, m=m: model.train(m) for m in (False, True))
        yield "in eval mode by then", chain(noisy, spoil=to_eval)
        yield "in training mode by then", chain(lambda: [Noisy(7).eval()], spoil=to_training)
        yield "a train() of its own", chain(counting, spoil=to_eval)
        norm = chain(lambda: [Normed(frozen())], shape=(4, WIDTH, 3), spoil=to_training)
        yield "a norm in training mode by then", norm
        yield "in eval mode for a part of the function", chain(noisy, call=_part_in_eval)
        again = chain(noisy, call=_part_in_eval, step={"backward": twice})
        yield "in eval mode for a part of the function, two passes", again, 3

    @pytest.mark.survives("recompute", 10)
    def test_a_dropped_result_leaves_nothing(self, answer, device):
        with device:
            noise = Noisy(7)
        noise.register_buffer("table", torch.ones(WIDTH))
        block = nn.Sequential(mlp(WIDTH, 4 * WIDTH, WIDTH), noise, nn.Dropout(0.25)).to(device)
        x, state = large_inputs(device), [block, *noise.generators]
        one = lambda x: answer.recompute(block, x, state=state)  # noqa: E731
        for forward in (one, lambda x: answer.recompute(one, x, state=state)):
            check_nothing_left(block, x, lambda forward=forward: forward(x * 1))

    @pytest.mark.survives("recompute", "Raises")
    def test_refuses_other_state(self, answer):
        block, ran = Noisy(), []
        for bad in (3, "generator", torch.ones(2), None, Noisy):
            for state in ([block, bad], [bad, block]):
                call = partial(answer.recompute, ran.append, torch.ones(2), state=state)
                for mode in (torch.enable_grad, torch.no_grad):
                    when = f"for {bad!r} in state, under {mode.__name__}"
                    check_raises(mode()(call), TypeError, mentions=[bad], when=when)
        check_equal(ran, [], "runs of the function", cause="state is checked too late")


def _draw_on(model, *_):
    """From torch's stream, and from all of the model's."""
    draw.next_random(torch.get_default_device())
    for module in model.modules():
        for generator in getattr(module, "generators", ()):
            torch.rand(3, generator=generator, device=generator.device)


def _others_between(make):
    """Other numbers are drawn between two backward passes, and buffers are replaced."""
    models = []

    def backward(loss):
        loss.backward(retain_graph=True)
        replace_buffers(models[-1])
        _draw_on(models[-1])
        loss.backward()

    return chain(make, spoil=lambda model, *_: models.append(model), step={"backward": backward})


def _part_in_eval(run, block, x):
    def function(x):
        y = block(x)
        return torch.tanh(block.eval()(y))

    state = iter([block, *block.generators])  # an iterator: what is in a list keeps its mode
    return run(function, x, state=state)
