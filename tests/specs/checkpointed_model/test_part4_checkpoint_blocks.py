"""Checkpoints in models of others: which blocks, the same bits, and bytes."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Generator, nn

from kit.laws.checks import check_equal, check_raises
from kit.laws.toys import Block
from kit.laws.untouched import observed
from kit.private_torch import tree_leaves
from specs.checkpointed_model.blocks import (
    Chain,
    Counting,
    Mixer,
    Nest,
    Noisy,
    Normed,
    chain,
    checkpointed,
)
from specs.checkpointed_model.large import check_limit, held, large_inputs, one_input, peak
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast
from specs.checkpointed_model.strangers import Stranger, stranger

FLOAT = torch.float32


def mixers(count=2):
    return [Mixer() for _ in range(count)]


def noisy():
    return [Noisy(), Noisy()]


class Wider(Mixer):
    pass


class TestPart4CheckpointBlocks:
    @pytest.mark.works("checkpoint_blocks", "blocks")
    @checkpointed("the search stops too early, goes by names, or compares classes with ==")
    def test_finds_every_block_wherever_it_is(self):
        yield "a list of 12", chain(partial(mixers, 12)), [12]
        yield "a derived class", chain(lambda: [Mixer(), Wider()]), [2]
        yield "at several depths", chain(partial(mixers, 4), tree=_deep), [4]
        yield "names that begin alike", chain(partial(mixers, 3), tree=_alike), [3]
        yield "a frozen block", chain(lambda: [*mixers(), Mixer().requires_grad_(False)]), [3]
        yield "blocks inside a block", chain(lambda: [Nest(Nest(Nest())), Nest()]), [2]
        yield "a block in two places", chain(lambda: mixers(1) * 2, tree=_two_places), [1]
        other = lambda run, block, x: block(x, x.mean((0, 1)))  # noqa: E731
        yield "with other arguments each time", chain(lambda: mixers(1) * 3, call=other), [1]

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.works("checkpoint_blocks", "same bits")
    @checkpointed("the second run has other arguments, or draws other numbers")
    def test_works_on_models_of_the_transformers_library(self):
        for name in ("gpt2", "vit"):
            yield name, stranger(name), [4]
            yield f"{name} in eval mode", stranger(name, train=False), [4], 1

    @pytest.mark.exact("checkpoint_blocks", "runs")
    @checkpointed("the block's own mode is not asked, or not at each of its calls")
    def test_recomputes_where_it_trains(self):
        ready = lambda model: model.eval() and None  # noqa: E731
        yield "handed in in eval mode", chain(mixers, prepared=ready, later=nn.Module.train), [2]
        yield "in eval mode later", chain(mixers, later=nn.Module.eval), [2], 1
        yield "blocks in eval mode", chain(lambda: [block.eval() for block in mixers()]), [2], 1
        yield "layers in training mode, in blocks in eval mode", chain(_layers_alone), [2], 1
        yield "only blocks in training mode", chain(mixers, later=_blocks_alone), [2]
        for mode in (torch.no_grad, torch.inference_mode):
            yield mode.__name__, chain(mixers, step={"outer": mode}), [2], 1

    @pytest.mark.exact("checkpoint_blocks", "same bits")
    @checkpointed("the second run draws other numbers, or changes buffers again")
    def test_blocks_change_no_bit(self):
        yield "two forward passes", chain(noisy, passes=2), [2]
        yield "x without gradient", chain(noisy, grad=False), [2]
        yield "counters", chain(lambda: [Counting(), Counting()], passes=2), [2]
        for dtype in HALVES:
            yield f"{dtype}", chain(noisy, step={"outer": autocast(dtype)}), [2]
        norms = lambda: [Normed(nn.BatchNorm1d(WIDTH)), Normed(nn.BatchNorm1d(WIDTH).eval())]  # noqa: E731
        yield "norms", chain(norms, passes=2, shape=(4, WIDTH, 3)), [2]
        yield "in eval mode by then", chain(noisy, spoil=lambda model, *_: model.eval()), [2]

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.saves("checkpoint_blocks", "held")
    def test_gpt2_peaks_at_one_input_a_block_and_one_inside(self, answer, reference, device):
        """(blocks + 4) inputs + 1 inside, measured on one block of the library by itself.

        Two inputs more than for a LargeModel: embeddings and a last norm have results too.
        """
        gpt2 = Stranger("gpt2", device)
        block, hidden = gpt2.blocks[0], gpt2.hidden
        inside = peak(block, hidden, lambda: tree_leaves(block(hidden))[0])  # of some, a tuple

        def reads(module):
            gpt2 = Stranger("gpt2", device)
            if module:
                module.checkpoint_blocks(gpt2.model, gpt2.block_type)
            return peak(gpt2.model, gpt2.x, gpt2.forward)

        title, formula = "peak above the baseline, GPT-2 with 4 blocks", "(4 + 4) inputs + 1 inside"
        limit, cause = 8 * one_input(hidden) + inside, "blocks are not checkpointed one by one"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)

    @pytest.mark.saves("checkpoint_blocks", "held")
    @pytest.mark.parametrize("how", ["by_position", "by_keyword"])
    def test_holds_one_input_a_block_of_others(self, answer, reference, device, how):
        """Of 6 blocks 5 inputs, as x is the baseline's, and the output. The bar adds 1."""
        x = large_inputs(device)

        def reads(module):
            model = nn.ModuleList(Block(WIDTH, heads=2) for _ in range(6)).to(device)
            if module:
                module.checkpoint_blocks(model, Block)

            def forward():
                y = x
                for block in model:
                    y = block(x=y) if how == "by_keyword" else block(y)
                return y

            return held(model, x, forward)

        title, cause = (
            f"held between the passes, 6 blocks, called {how}",
            "more is held than inputs",
        )
        check_limit(
            title, 7 * one_input(x), "(6 + 1) inputs", reads, answer, reference, cause=cause
        )


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
        for name, put in {"hooks": _hooked, "a forward": _own_forward}.items():
            yield f"{name}, from before", chain(mixers, prepared=put), [2]
        yield "hooks, from after", chain(mixers, later=_hooked), [2]

    @pytest.mark.survives("checkpoint_blocks", 3)
    @checkpointed("an argument or result is handed on in one way only")
    def test_blocks_take_and_return_anything(self):
        names = ("debug", "use_reentrant", "context_fn", "function", "block", "args", "kwargs")
        for name in (*names, "forward", "keep"):
            yield f"keyword `{name}`", chain(mixers, **{name: 0.5}), [2]
        state = lambda run, block, x: block(x, state=0.5)  # noqa: E731
        yield "keyword `state`", chain(mixers, call=state), [2]
        yield "x by keyword", chain(mixers, call=lambda run, block, x: block(that=x)), [2]
        kinds = {"shift": FLOAT, "both": [FLOAT, torch.complex64], "extra": {"d": FLOAT}}
        yield "tensors by keyword", chain(mixers, name="late", **kinds), [2]
        yield "tensors by position", chain(mixers, FLOAT, (FLOAT, 3)), [2]

    @pytest.mark.survives("checkpoint_blocks", 4)
    @checkpointed("something in the copy, such as a closure, still belongs to the original block")
    def test_a_deep_copy_checkpoints_its_own_blocks(self):
        """facebookresearch/fairscale#816: the copy of a patched block calls the original."""
        for steps in (0, 1):
            for times in (1, 2):
                copies = partial(_copied, steps, times, True)
                yield f"copied after {steps} steps, {times} times", chain(noisy, later=copies), [2]

        yield "a copy in eval mode", chain(noisy, later=partial(_copied, 1, 1, False)), [2], 1
        twin = partial(_copied, 0, 1, True)
        yield "with a forward of its own", chain(mixers, prepared=_own_forward, later=twin), [2]

    @pytest.mark.survives("checkpoint_blocks", 5)
    def test_takes_blocks_of_another_class_in_a_second_call(self, answer):
        model, got = nn.Sequential(Nest(), nn.Sequential(Noisy()), Noisy()), []
        for kind in (Nest, Noisy):
            got.append(answer.checkpoint_blocks(model, kind))
        check_equal(got, [1, 2], "numbers of blocks", cause="it goes by the model")

    @pytest.mark.survives("checkpoint_blocks", 10)
    @checkpointed("torch's own stream alone is set, or generators that state is asked for")
    def test_draws_from_generators_again(self):
        yield "an attribute", chain(lambda: [Noisy(7), Noisy(8)]), [2]
        seeded = lambda run, block, x: block(x, Generator(x.device).manual_seed(9))  # noqa: E731
        yield "an argument", chain(noisy, call=seeded), [2]

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    @pytest.mark.parametrize("done", [[0], [2], [0, 1, 2]], ids=["first", "last", "all"])
    def test_refuses_a_second_call(self, answer, done):
        model = Chain(mixers(3))
        answer.checkpoint_blocks(nn.ModuleList(model.order[n] for n in done), Mixer)
        when = f"for a model of which {len(done)} of 3 blocks have been through it"
        refused(answer, model, Mixer, ValueError, "Mixer", when)
        refused(answer, copy.deepcopy(model), Mixer, ValueError, "Mixer", f"{when}, and a copy")

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_a_model_without_such_blocks(self, answer):
        refused(answer, Chain(mixers()), Nest, ValueError, "Nest", "for a model without Nest")

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    @pytest.mark.parametrize(
        ("kind", "named"),
        [("Mixer", "Mixer"), (int, "int"), (nn.Linear(3, 2), "Linear"), ((Mixer, Nest), "Nest")],
        ids=["a_name", "no_module", "a_module", "two_classes"],
    )
    def test_refuses_what_is_no_class_of_modules(self, answer, kind, named):
        when = f"for block_type={kind!r}"
        refused(answer, Chain(mixers()), kind, TypeError, named, when)


def refused(answer, model, kind, error, named, when, **keep):
    """An error, and a model that is as it was."""
    __tracebackhide__ = True
    before = observed(model)
    call = partial(answer.checkpoint_blocks, model, kind, **keep)
    check_raises(call, error, mentions=[named], when=when)
    changed = [key for key, value in observed(model).items() if value != before[key]]
    cause = "something has been changed before everything was looked at"
    check_equal(changed, [], f"what is otherwise after the refusal {when}", cause=cause)


def _deep(blocks):
    inner = nn.ModuleDict({"late": nn.Sequential(nn.ModuleList(blocks[2:3]))})
    tree = {"early": nn.ModuleList(blocks[:2]), "deeper": inner, "last": blocks[3]}
    return nn.ModuleDict(tree)


def _alike(blocks):
    """None of these is inside another."""
    return nn.ModuleDict(dict(zip(("block", "block2", "block2_norm"), blocks, strict=True)))


def _two_places(blocks):
    return nn.ModuleDict({"one": nn.Sequential(blocks[0]), "two": nn.ModuleList(blocks[1:])})


def _blocks_alone(model):
    model.training = model.tree.training = False


def _layers_alone():
    blocks = [block.eval() for block in mixers()]
    for block in blocks:
        block.up.train()
    return blocks


def _hooked(model):
    """Hooks that count, that change the result, and that change gradients."""
    model.register_buffer("calls", torch.zeros(2, device=model.order[0].up.weight.device))
    model.order[0].register_forward_pre_hook(lambda *_: model.calls[0].add_(1) and None)
    model.order[0].register_forward_hook(lambda *_: model.calls[1].add_(1) and None)
    model.order[0].up.register_forward_hook(lambda _, args, out: out * 1.5)
    model.order[1].register_forward_hook(lambda _, args, out: (out[0] * 1.5, out[1]))
    model.order[1].register_full_backward_hook(lambda _, into, out: (into[0] * 1.5,))


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
