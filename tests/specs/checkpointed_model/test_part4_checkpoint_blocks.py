"""Checkpoints in models of others: which blocks, the same bits, bytes, hooks, copies, refusals."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Generator, nn

from kit.laws.checks import check_equal
from kit.laws.toys import Block
from kit.private_torch import tree_leaves
from specs.checkpointed_model.blocks import (
    Chain,
    Counting,
    Deeper,
    Mixer,
    Nest,
    Noisy,
    Normed,
    Pair,
    chain,
    checkpointed,
    failed,
    mixers,
    refused,
    two_noisy,
)
from specs.checkpointed_model.large import (
    RETAINED,
    check_limit,
    held,
    large_inputs,
    one_input,
    peak,
    twin_of,
)
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast, draw_on
from specs.checkpointed_model.strangers import stranger

FLOAT, KEPT = torch.float32, (torch.ops.aten.addmm.default,)


class TestPart4CheckpointBlocks:
    @pytest.mark.works("checkpoint_blocks", "blocks")
    @checkpointed("the search stops too early, goes by names or ==, or counts one inside another")
    def test_finds_every_block_wherever_it_is(self):
        yield "a list of 12", chain(partial(mixers, 12)), [12]
        yield "at several depths", chain(partial(mixers, 4), tree=_deep), [4]
        yield "a frozen block", chain(lambda: [*mixers(), Mixer().requires_grad_(False)]), [3]
        inside = lambda: [Nest(Nest(Deeper())), Deeper(Nest())]  # noqa: E731
        yield "blocks inside a block", chain(inside), [2]
        two = lambda blocks: nn.ModuleList(nn.Sequential(block) for block in blocks)  # noqa: E731
        yield "a block in two places", chain(lambda: mixers(1) * 2, tree=two), [1]
        other = lambda run, block, x: block(x, x.mean((0, 1)))  # noqa: E731
        yield "with other arguments each time", chain(lambda: mixers(1) * 3, call=other), [1]

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.works("checkpoint_blocks", "same bits")
    @checkpointed("the second run has other arguments, or draws other numbers")
    def test_works_on_models_of_the_transformers_library(self):
        yield "gpt2", stranger(), [3]
        yield "gpt2 in eval mode", stranger(train=False), [3], 1

    @pytest.mark.exact("checkpoint_blocks", "runs")
    @checkpointed("the block's own mode is not asked, or not at each of its calls")
    def test_recomputes_where_it_trains(self):
        ready = lambda model: model.eval() and None  # noqa: E731
        yield "handed in in eval mode", chain(mixers, prepared=ready, later=nn.Module.train), [2]
        yield "in eval mode later", chain(mixers, later=nn.Module.eval), [2], 1
        yield "blocks in eval mode, their layers in training mode", chain(_layers_alone), [2], 1
        yield "only blocks in training mode", chain(mixers, later=_blocks_alone), [2]
        yield "after an error in a block", chain(mixers, later=failed), [2]
        for mode in (torch.no_grad, torch.inference_mode):
            yield mode.__name__, chain(mixers, step={"outer": mode}), [2], 1

    @pytest.mark.exact("checkpoint_blocks", "same bits")
    @checkpointed("the second run is in other modes, draws other numbers, or changes buffers again")
    def test_blocks_change_no_bit(self):
        yield "two forward passes", chain(two_noisy, passes=2), [2]
        yield "x without gradient", chain(two_noisy, grad=False), [2]
        yield "counters", chain(lambda: [Counting(), Counting()], passes=2), [2]
        for dtype in HALVES:
            yield f"{dtype}", chain(two_noisy, step={"outer": autocast(dtype)}), [2]
        norms = lambda: [Normed(nn.BatchNorm1d(WIDTH)), Normed(nn.BatchNorm1d(WIDTH).eval())]  # noqa: E731
        yield "norms", chain(norms, passes=2, shape=(4, WIDTH, 3)), [2]

    @pytest.mark.saves("checkpoint_blocks", "held")
    @pytest.mark.parametrize("case", ["held", RETAINED])
    def test_holds_one_input_a_block_of_others(self, answer, reference, device, case):
        """Of 4 blocks 3 inputs, as x is the baseline's, and the output. The bar adds 1.

        At the peak it is one block's inside besides, with its output and gradients.
        """
        x = large_inputs(device)

        def reads(module, blocks=4):
            model = nn.ModuleList(Block(WIDTH, heads=2) for _ in range(blocks)).to(device)
            if module:
                module.checkpoint_blocks(model, Block)

            def forward():
                y = x
                for block in model:
                    y = block(x=y)
                return y

            if case == RETAINED:
                return peak(model, x, forward, retain=True)
            return held(model, x, forward)

        title, limit, formula = "held between the passes", 5 * one_input(x), "(4 + 1) inputs"
        if case == RETAINED:
            title, formula = f"peak above the baseline, {case}", "4 inputs + 1 inside"
            limit = 4 * one_input(x) + reads(None, 1)
        title, cause = f"{title}, 4 blocks, called by keyword", "more is held than inputs"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)

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
            }

        before = look()
        answer.checkpoint_blocks(model, fresh)
        check_equal(look(), before, "", cause="a block is wrapped, or the class is patched")

    @pytest.mark.survives("checkpoint_blocks", 2)
    @checkpointed("the second run has the hooks in it, or begins before one; or something is lost")
    def test_hooks_and_forwards_of_a_block_go_on_running(self):
        """Once for each call; libraries put a forward on the instance too."""
        puts = {"hooks": _hooked, "a forward": _own_forward, "a partial": _partial_forward}
        for name, put in puts.items():
            yield f"{name}, from before", chain(mixers, prepared=put), [2]
        yield "hooks, from after", chain(mixers, later=_hooked), [2]
        yield "hooks, with keep", chain(mixers, prepared=_hooked), [2], 2, KEPT

    @pytest.mark.survives("checkpoint_blocks", 3)
    @checkpointed("an argument or result is handed on in one way only")
    def test_blocks_take_and_return_anything(self):
        kinds = {"shift": FLOAT, "both": [FLOAT, torch.complex64], "extra": {"d": FLOAT}}
        yield "tensors by keyword", chain(mixers, name="late", **kinds), [2]
        yield "x by keyword", chain(mixers, call=lambda run, block, x: block(that=x)), [2]
        yield "tensors by position", chain(mixers, FLOAT, Pair(FLOAT, 3)), [2]
        yield "keywords, with keep", chain(mixers, shift=FLOAT, name="late"), [2], 2, KEPT

    @pytest.mark.survives("checkpoint_blocks", 4)
    @checkpointed("something in the copy, such as a closure, still belongs to the original block")
    def test_a_deep_copy_checkpoints_its_own_blocks(self):
        """facebookresearch/fairscale#816: the copy of a patched block calls the original."""
        trained, in_eval = partial(_copied, True), partial(_copied, False)
        yield "a copy of a copy", chain(two_noisy, later=trained), [2]
        yield "a copy in eval mode", chain(two_noisy, later=in_eval), [2], 1
        own = chain(mixers, prepared=_own_forward, later=trained)
        yield "with a forward of its own", own, [2]

    @pytest.mark.survives("checkpoint_blocks", 5)
    @checkpointed("it goes by the model, or by what is inside a block, or around it")
    def test_takes_blocks_of_another_class_in_a_second_call(self):
        make = lambda: [nn.Sequential(*two_noisy())]  # noqa: E731
        for kinds, counts in (((Noisy, nn.Sequential), [2, 1]), ((nn.Sequential, Noisy), [1, 2])):
            name = f"{kinds[0].__name__}, then {kinds[1].__name__}"
            yield name, chain(make, kinds=kinds), counts, None
            one_in_eval = lambda model: setattr(model.order[0], "training", False)  # noqa: E731
            in_eval = chain(make, kinds=kinds, later=one_in_eval)
            yield f"{name}, the outer one in eval mode", in_eval, counts

    @pytest.mark.survives("checkpoint_blocks", 10)
    @checkpointed(
        "torch's own stream alone is set, or not every generator at each call and second run"
    )
    def test_draws_from_generators_again(self):
        yield "an attribute", chain(lambda: [Noisy(7), Noisy(8)]), [2]
        yield "attributes further inside", chain(lambda: [Nest(Noisy(7, 8))]), [1]
        yield "an attribute that is set later", chain(lambda: [Noisy(7)], later=_seeded_anew), [1]
        yield "two backward passes", chain(lambda: [Noisy(7, 8)], late=draw_on), [1], 3

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_a_second_call(self, answer):
        for done, kind in (([2], Nest), ([0, 1, 2], Deeper)):
            model = Chain([Deeper() for _ in range(3)])
            answer.checkpoint_blocks(nn.ModuleList(model.order[n] for n in done), Nest)
            named = ("Nest", "Deeper", f"tree.{done[0]}")  # a class, or a block
            when = f"for a model of which {len(done)} of 3 blocks have been through it"
            refused(answer, model, kind, ValueError, named, when)
            refused(answer, copy.deepcopy(model), kind, ValueError, named, f"{when}, and a copy")

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    @pytest.mark.parametrize(
        ("kind", "error", "named"),
        [
            (Nest, ValueError, "Nest"),
            ("Mixer", TypeError, "Mixer"),
            (nn.Linear(3, 2), TypeError, "Linear"),
        ],
        ids=["a_class_without_blocks", "a_name", "a_module"],
    )
    def test_refuses_what_is_no_class_of_a_block(self, answer, kind, error, named):
        refused(answer, Chain(mixers()), kind, error, named, f"for block_type={kind!r}")


def _deep(blocks):
    inner = nn.ModuleDict({"late": nn.Sequential(nn.ModuleList(blocks[2:3]))})
    tree = {"early": nn.ModuleList(blocks[:2]), "deeper": inner, "last": blocks[3]}
    return nn.ModuleDict(tree)


def _blocks_alone(model):
    model.training = model.tree.training = False


def _layers_alone():
    blocks = [block.eval() for block in mixers()]
    for block in blocks:
        block.up.train()
    return blocks


def _hooked(model):
    """Hooks that count, and that change what goes in, the result, and gradients."""
    model.register_buffer("calls", torch.zeros(2, device=model.order[0].up.weight.device))
    model.order[0].register_forward_pre_hook(lambda *_: model.calls[0].add_(1) and None)
    model.order[0].register_forward_hook(lambda *_: model.calls[1].add_(1) and None)
    model.order[0].up.register_forward_hook(lambda _, args, out: out * 1.5)
    model.order[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
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


def _partial_forward(model):
    """No bound method, as where a library puts a function there."""
    model.order[1].forward = partial(model.order[1].forward, name="early")


def _copied(train, model):
    """A copy of a copy, with other weights, after a step; the original is in the other mode."""
    for block in model.order:
        tree_leaves(block(torch.ones(SHAPE, device=block.up.weight.device)))[0].sum().backward()
    model.zero_grad()
    twin = twin_of(copy.deepcopy(model))
    model.train(not train)
    return twin.train(train)
