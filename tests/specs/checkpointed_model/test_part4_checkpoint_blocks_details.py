"""Checkpoints in models of others: hooks, arguments, copies, generators, refusals."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Generator, nn

from kit.laws.checks import check_equal
from specs.checkpointed_model.blocks import (
    Chain,
    Deeper,
    Frozen,
    Mixer,
    Nest,
    Noisy,
    chain,
    checkpointed,
    mixers,
    refused,
    two_noisy,
)
from specs.checkpointed_model.steps import SHAPE, twice

FLOAT = torch.float32


class TestPart4CheckpointBlocksDetails:
    @pytest.mark.survives("checkpoint_blocks", 1)
    def test_leaves_classes_and_other_models_alone(self, answer, device):
        # A new class, so that an answer that patches it spoils no other spec.
        fresh = type("Fresh", (Mixer,), {})
        model = Chain([fresh(), fresh()])

        def look():
            return {
                "keys of state_dict()": list(model.state_dict()),
                "classes of the blocks": [type(block) for block in model.order],
                "attributes of the class": {k: id(value) for k, value in vars(fresh).items()},
                "modules of the model": [id(module) for module in model.modules()],
            }

        before = look()
        answer.checkpoint_blocks(model, fresh)
        check_equal(look(), before, "", cause="a block is wrapped, or the class is patched")

    @pytest.mark.survives("checkpoint_blocks", 2)
    @checkpointed("the second run calls the block, hooks and all; or something put on it is lost")
    def test_hooks_and_forwards_of_a_block_go_on_running(self):
        """Once for each call; libraries put a forward on the instance too."""
        for keep, also in {(): "", (torch.ops.aten.addmm.default,): ", with keep"}.items():
            for name, put in {"hooks": _hooked, "a forward": _own_forward}.items():
                yield f"{name}, from before{also}", chain(mixers, prepared=put), [2], 2, keep
            yield f"hooks, from after{also}", chain(mixers, later=_hooked), [2], 2, keep

    @pytest.mark.survives("checkpoint_blocks", 3)
    @checkpointed("an argument or result is handed on in one way only")
    def test_blocks_take_and_return_anything(self):
        yield "keyword `debug`", chain(mixers, debug=0.5), [2]
        names = ("use_reentrant", "context_fn", "function", "block", "args", "kwargs", "forward")
        yield "other keywords", chain(mixers, keep=0.5, **dict.fromkeys(names, 0.5)), [2]
        state = lambda run, block, x: block(x, state=0.5)  # noqa: E731
        yield "keyword `state`", chain(mixers, call=state), [2]
        yield "x by keyword", chain(mixers, call=lambda run, block, x: block(that=x)), [2]
        kinds = {"shift": FLOAT, "both": [FLOAT, torch.complex64], "extra": {"d": FLOAT}}
        yield "tensors by keyword", chain(mixers, name="late", **kinds), [2]
        yield "tensors by position", chain(mixers, FLOAT, (FLOAT, 3)), [2]
        yield "a frozen dataclass", chain(mixers, Frozen(0.5)), [2]

    @pytest.mark.survives("checkpoint_blocks", 4)
    @checkpointed("something in the copy, such as a closure, still belongs to the original block")
    def test_a_deep_copy_checkpoints_its_own_blocks(self):
        """facebookresearch/fairscale#816: the copy of a patched block calls the original."""
        for steps, times in ((0, 2), (1, 1)):
            twin = partial(_copied, steps, times, True)
            yield f"copied after {steps} steps, {times} times", chain(two_noisy, later=twin), [2]
        yield "a copy in eval mode", chain(two_noisy, later=partial(_copied, 1, 1, False)), [2], 1
        twin = partial(_copied, 0, 1, True)
        yield "with a forward of its own", chain(mixers, prepared=_own_forward, later=twin), [2]

    @pytest.mark.survives("checkpoint_blocks", 5)
    @checkpointed("it goes by the model, or by what is inside a block, or around it")
    def test_takes_blocks_of_another_class_in_a_second_call(self):
        make = lambda: [nn.Sequential(*two_noisy())]  # noqa: E731
        for kinds, counts in (((Noisy, nn.Sequential), [2, 1]), ((nn.Sequential, Noisy), [1, 2])):
            name = f"{kinds[0].__name__}, then {kinds[1].__name__}"
            yield name, chain(make, kinds=kinds), counts, None
            one_in_eval = chain(make, kinds=kinds, later=_outer_in_eval)
            yield f"{name}, the outer one in eval mode", one_in_eval, counts

    @pytest.mark.survives("checkpoint_blocks", 10)
    @checkpointed("torch's own stream alone is set, or generators are not looked for at each call")
    def test_draws_from_generators_again(self):
        yield "an attribute", chain(lambda: [Noisy(7), Noisy(8)]), [2]
        yield "attributes further inside", chain(lambda: [Nest(Noisy(7, 8))]), [1]
        yield "an attribute that is set later", chain(lambda: [Noisy(7)], later=_seeded_anew), [1]
        seeded = lambda run, block, x: block(x, Generator(x.device).manual_seed(9))  # noqa: E731
        yield "an argument", chain(two_noisy, call=seeded), [2]
        again = chain(two_noisy, call=seeded, step={"backward": twice})
        yield "an argument, two backward passes", again, [2], 3
        named = lambda run, block, x: block(x, noise=Generator(x.device).manual_seed(9))  # noqa: E731
        yield "an argument by keyword", chain(two_noisy, call=named), [2]

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    @pytest.mark.parametrize("done", [[0], [2], [0, 1, 2]], ids=["first", "last", "all"])
    def test_refuses_a_second_call(self, answer, done):
        named = ("Nest", "Deeper", f"tree.{done[0]}")  # a class, or a block
        for first, then in ((Nest, Nest), (Nest, Deeper), (Deeper, Nest)):
            model = Chain([Deeper() for _ in range(3)])
            answer.checkpoint_blocks(nn.ModuleList(model.order[n] for n in done), first)
            asked = f"{then.__name__} after {first.__name__}"
            when = f"for a model of which {len(done)} of 3 blocks have been through it, {asked}"
            refused(answer, model, then, ValueError, named, when)
            refused(answer, copy.deepcopy(model), then, ValueError, named, f"{when}, and a copy")

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    @pytest.mark.parametrize(
        ("kind", "error", "named"),
        [
            (Nest, ValueError, "Nest"),
            ("Mixer", TypeError, "Mixer"),
            (int, TypeError, "int"),
            (nn.Linear(3, 2), TypeError, "Linear"),
            ((Mixer, Nest), TypeError, "Nest"),
        ],
        ids=["a_class_without_blocks", "a_name", "no_module", "a_module", "two_classes"],
    )
    def test_refuses_what_is_no_class_of_a_block(self, answer, kind, error, named):
        refused(answer, Chain(mixers()), kind, error, named, f"for block_type={kind!r}")


def _outer_in_eval(model):
    model.order[0].training = False


def _hooked(model):
    """Hooks that count, that change the result, and that change gradients."""
    model.register_buffer("calls", torch.zeros(2, device=model.order[0].up.weight.device))
    model.order[0].register_forward_pre_hook(lambda *_: model.calls[0].add_(1) and None)
    model.order[0].register_forward_hook(lambda *_: model.calls[1].add_(1) and None)
    model.order[0].up.register_forward_hook(lambda _, args, out: out * 1.5)
    model.order[1].register_forward_hook(lambda _, args, out: (out[0] * 1.5, out[1]))
    model.order[1].register_full_backward_hook(lambda _, into, out: (into[0] * 1.5,))


def _seeded_anew(model):
    """Each epoch has a generator of its own."""
    for block in model.order:
        block(torch.ones(SHAPE, device=block.up.weight.device))
        block.first = Generator(block.up.weight.device).manual_seed(9)


def _own_forward(model):
    def own(block, *args, **kwargs):
        x, more = Mixer.forward(block, *args, **kwargs)
        return x * 1.5, more

    model.order[1].forward = MethodType(own, model.order[1])


def _copied(steps, times, train, model):
    """A copy with other weights, after some steps; the original is in the other mode."""
    twin = model
    for _ in range(steps):
        x = torch.ones(SHAPE, device=model.order[0].up.weight.device)
        for block in model.order:
            x = block(x)
        x.sum().backward()
        model.zero_grad()
    for _ in range(times):
        twin = copy.deepcopy(twin)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    model.train(not train)
    return twin.train(train)
