"""Checkpoints in somebody else's model: which blocks, the same bits, bytes, and what is kept."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.toys import Block, Pair
from kit.laws.untouched import observed
from specs.checkpointed_model.blocks import (
    Chain,
    Counting,
    Deeper,
    Mixer,
    Nest,
    Noisy,
    Normed,
    again,
    chain,
    checkpointed,
    counting,
    mixers,
    stranger,
    two_noisy,
)
from specs.checkpointed_model.large import (
    RETAINED,
    check_limit,
    check_nothing_left,
    held,
    large_inputs,
    one_input,
    peak,
)
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast

FLOAT = torch.float32
ATEN = torch.ops.aten
ADDMM, GELU, NORM = ATEN.addmm.default, ATEN.gelu.default, ATEN.native_layer_norm.default
MEANS = [ATEN.mean.dim, ATEN.mean.default]
MATMULS = [ADDMM, ATEN.mm.default, ATEN.bmm.default, ATEN.baddbmm.default]
KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION = [getattr(ATEN, f"_scaled_dot_product_{kind}").default for kind in KINDS]
DEAR = [*MATMULS, *ATTENTION]


def transformer():
    return [Block(WIDTH, heads=2)]


class TestPart4CheckpointBlocks:
    @pytest.mark.works("checkpoint_blocks", "blocks")
    @checkpointed(
        "the search stops too early, goes by names or exact types, or counts nested blocks"
    )
    def test_finds_every_block_wherever_it_is(self):
        yield "a list of 12", chain(partial(mixers, 12)), [12]
        yield "at several depths", chain(partial(mixers, 4), tree=_deep), [4]
        yield "a frozen block", chain(lambda: [*mixers(), Mixer().requires_grad_(False)]), [3]
        inside = lambda: [Nest(Nest(Deeper())), Deeper(Nest())]  # noqa: E731
        yield "blocks inside a block", chain(inside), [2]
        make = lambda: [*two_noisy(), *counting()]  # noqa: E731
        yield "two classes, a call for each", chain(make, kinds=(Noisy, Counting)), [2, 1]
        two = lambda blocks: nn.ModuleList(nn.Sequential(block) for block in blocks)  # noqa: E731
        yield "a block in two places", chain(lambda: mixers(1) * 2, tree=two), [1]

    @pytest.mark.exact("checkpoint_blocks", "runs")
    @checkpointed("the block's own mode is not checked, or not at each call")
    def test_recomputes_only_in_training(self):
        ready = lambda model: model.eval() and None  # noqa: E731
        yield (
            "checkpointed in eval mode, then trained",
            chain(mixers, prepared=ready, later=nn.Module.train),
            [2],
        )
        in_eval = lambda model: [block.eval() for block in model.order] and None  # noqa: E731
        yield "blocks in eval mode in a model that trains", chain(mixers, later=in_eval), [2], 1
        yield "no_grad", chain(mixers, step={"outer": torch.no_grad}), [2], 1

    @pytest.mark.exact("checkpoint_blocks", "same bits")
    @checkpointed("the second run is in other modes, draws other numbers, or changes buffers again")
    def test_blocks_change_no_bit(self):
        yield "two forward passes", chain(two_noisy, passes=2), [2]
        yield "x without gradient", chain(two_noisy, grad=False), [2]
        yield "counters", chain(lambda: [Counting(), Counting()], passes=2), [2]
        norm = chain(lambda: [Normed(nn.BatchNorm1d(WIDTH))], passes=2, shape=(4, WIDTH, 3))
        yield "batch norm", norm, [1]
        yield "a forward that an adapter has replaced", chain(mixers, prepared=_adapted), [2]

    @pytest.mark.saves("checkpoint_blocks", "held")
    @pytest.mark.parametrize("case", ["held", RETAINED])
    def test_each_block_of_any_model_holds_one_input(self, answer, reference, device, case):
        """4 blocks: 3 inputs (x is in the baseline) and the output; the bar adds 1. At the peak
        there is also one block's inside, with its output and gradients."""
        x = large_inputs(device)
        reads = partial(_reads, held, x=x)
        title, limit, formula = "held between the passes", 5 * one_input(x), "(4 + 1) inputs"
        if case == RETAINED:
            reads = partial(_reads, partial(peak, retain=True), x=x)
            title, formula = f"peak above the baseline, {case}", "4 inputs + 1 inside"
            limit = 4 * one_input(x) + reads(None, blocks=1)
        title, cause = f"{title}, 4 blocks, called by keyword", "more than inputs is held"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)

    @pytest.mark.saves("checkpoint_blocks", "held")
    @pytest.mark.parametrize("keep", [(), DEAR], ids=["nothing kept", "DEAR kept"])
    def test_blocks_leave_nothing_behind(self, answer, device, keep):
        two = [*transformer(), *transformer()]  # x is the caller's: the second's input is not
        model, x = nn.Sequential(*two).to(device), large_inputs(device)
        answer.checkpoint_blocks(model, Block, keep=keep)
        check_nothing_left(model, x, lambda: model(x))

    @pytest.mark.survives("checkpoint_blocks", 1)
    def test_leaves_classes_and_other_models_alone(self, answer, device):
        # A new class, so that an answer that patches it spoils no other spec.
        fresh = type("Fresh", (Mixer,), {})
        model, before = Chain([fresh(), fresh()]), {**vars(fresh)}
        keys = [*model.state_dict()]
        answer.checkpoint_blocks(model, fresh)
        got = {"keys": [*model.state_dict()], "classes": [*map(type, model.order)]}
        want = {"keys": keys, "classes": [fresh, fresh], "attributes of the class": before}
        got["attributes of the class"] = {**vars(fresh)}
        check_equal(got, want, "the model", cause="a block is wrapped, or the class is patched")

    @pytest.mark.survives("checkpoint_blocks", 2)
    @checkpointed("hooks run again in the second run, or are lost")
    def test_hooks_of_a_block_run_once(self):
        yield "registered before", chain(mixers, prepared=_hooked), [2]
        yield "registered after", chain(mixers, later=_hooked), [2]

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.survives("checkpoint_blocks", 3)
    @checkpointed("some kind of argument or result is not passed on")
    def test_blocks_take_and_return_anything(self):
        yield "by keyword", chain(mixers, name="late", shift=FLOAT, extra={"d": FLOAT}), [2]
        yield "x by keyword", chain(mixers, call=lambda run, block, x: block(that=x)), [2]
        yield "by position", chain(mixers, FLOAT, Pair(FLOAT, 3)), [2]
        every = lambda run, block, x, /, **named: block(x, **named)  # noqa: E731
        yield "a keyword that recompute has too", chain(mixers, call=every, state=FLOAT), [2]
        yield "gpt2 of the transformers library", stranger(), [3]

    @pytest.mark.survives("checkpoint_blocks", 4)
    @checkpointed("something in the copy, such as a closure, still belongs to the original block")
    def test_a_deep_copy_checkpoints_its_own_blocks(self):
        """facebookresearch/fairscale#816: the copy of a patched block calls the original."""
        yield "a copy in training mode", chain(two_noisy, later=partial(_copied, True)), [2]
        yield "a copy in eval mode", chain(two_noisy, later=partial(_copied, False)), [2], 1

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_a_second_call(self, answer):
        model = Chain([Deeper() for _ in range(3)])
        answer.checkpoint_blocks(nn.ModuleList(model.order[2:]), Nest)
        named = ("Nest", "Deeper", "tree.2")  # a class, or a block
        _refused(answer, model, Nest, ValueError, named, "for a model whose last block is done")
        _refused(answer, copy.deepcopy(model), Nest, ValueError, named, "for a copy of it")

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_a_class_without_blocks(self, answer):
        _refused(answer, Chain(mixers()), Nest, ValueError, "Nest", "for a model without a Nest")

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.survives("checkpoint_blocks", "keep")
    @checkpointed("what is held is not what the first run computed, or statistics count twice")
    def test_keep_changes_no_bit(self):
        yield "gpt2", stranger(), [3], 2, DEAR
        yield "dropout", chain(two_noisy), [2], 2, DEAR
        yield "counters", chain(counting), [1], 2, DEAR
        norm = chain(lambda: [Normed(nn.BatchNorm1d(WIDTH))], shape=(4, WIDTH, 3))
        yield "batch norm", norm, [1], 2, DEAR

    @pytest.mark.survives("checkpoint_blocks", 5)
    @again("everything, nothing or a fixed set is held, or overloads are not told apart")
    def test_keeps_exactly_the_listed_operations(self):
        seen = [ADDMM, GELU, NORM, *ATTENTION]
        yield "nothing", transformer, [], seen
        yield "a set", transformer, {NORM}, seen
        yield "matrix products and GELU", transformer, [*MATMULS, GELU], seen
        yield "attention", transformer, ATTENTION, seen
        for mean in MEANS:
            yield f"{mean}", counting, [mean], MEANS

    @pytest.mark.survives("checkpoint_blocks", 5)
    def test_holds_less_than_the_plain_model(self, answer, reference, device):
        """Per block DEAR keeps qkv 3, attention 1 (its logsumexp heads / width = 2 / 16), out 1,
        up 3 and down 1. Keeping the GELU's result too would be 3 more."""
        x = large_inputs(device)
        reads = lambda module: _reads(peak, module, x, keep=module.DEAR if module else ())  # noqa: E731
        limit = _reads(peak, answer, x) + 4 * (9 + 2 / WIDTH) * one_input(x)
        title, formula = "4 blocks, keep=DEAR", "all recomputed + 4 x 9.125 inputs"
        given = (f"peak above the baseline, {title}", limit, formula, reads, answer, reference)
        check_limit(*given, cause="more is kept than the results of the operations in keep")

    @pytest.mark.survives("checkpoint_blocks", 6)
    @checkpointed("the second run is without autocast, or has its default dtype")
    def test_autocast_changes_no_bit(self):
        for dtype, keep in product(HALVES, ((), DEAR)):
            step = {"outer": autocast(dtype)}
            yield f"{dtype}, {len(keep)} kept", chain(two_noisy, step=step), [2], 2, keep

    @pytest.mark.survives("checkpoint_blocks", 6)
    @again("keep is ignored under autocast, or nothing is recomputed there")
    def test_keeps_under_autocast(self):
        for dtype in HALVES:
            yield f"{dtype}", transformer, MATMULS, [ADDMM, GELU], dtype

    @pytest.mark.survives("checkpoint_blocks", 7)
    @checkpointed("calls share contexts, or overwrite each other's results")
    def test_what_is_kept_is_not_shared(self):
        yield "two passes", chain(two_noisy, passes=2), [2], 2, DEAR
        yield "one block thrice in a row", chain(lambda: counting() * 3), [1], 2, DEAR

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_to_keep_what_is_no_overload(self, answer):
        """pytorch/pytorch#176065: aten.mm, without .default, matches no operation."""
        model, when = nn.Sequential(*transformer()), "for aten.addmm in keep, which is no overload"
        keep = [ADDMM, ATEN.addmm]
        _refused(answer, model, Block, TypeError, "addmm", when, keep=keep)


def _refused(answer, model, kind, error, named, when, **keep):
    """Fail unless it raises and leaves the model as it was."""
    __tracebackhide__ = True
    before = observed(model)
    call = partial(answer.checkpoint_blocks, model, kind, **keep)
    check_raises(call, error, mentions=[named], when=when)
    changed = [key for key, value in observed(model).items() if value != before[key]]
    cause = "something was changed before everything was checked"
    check_equal(changed, [], f"what is changed by a refusal {when}", cause=cause, clause=ERRORS)


def _reads(reads, module, x, blocks=4, keep=()):
    """The bytes of transformer blocks called by keyword; without a module they are plain."""
    model = nn.ModuleList(Block(WIDTH, heads=2) for _ in range(blocks)).to(x.device)
    if module:
        module.checkpoint_blocks(model, Block, keep=keep)

    def forward():
        y = x
        for block in model:
            y = block(x=y)
        return y

    return reads(model, x, forward)


def _deep(blocks):
    inner = nn.ModuleDict({"late": nn.Sequential(nn.ModuleList(blocks[2:3]))})
    tree = {"early": nn.ModuleList(blocks[:2]), "deeper": inner, "last": blocks[3]}
    return nn.ModuleDict(tree)


def _adapted(model):
    """The first block has a forward of its own."""
    first, plain = model.order[0], model.order[0].forward
    first.forward = lambda x, *args, **kwargs: plain(x * 1.5, *args, **kwargs)


def _hooked(model):
    """Hooks that count, and that change what goes in, the result, and gradients."""
    model.register_buffer("calls", torch.zeros(2, device=model.order[0].up.weight.device))
    model.order[0].register_forward_pre_hook(lambda *_: model.calls[0].add_(1) and None)
    model.order[0].register_forward_hook(lambda *_: model.calls[1].add_(1) and None)
    model.order[0].up.register_forward_hook(lambda _, args, out: out * 1.5)
    model.order[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
    model.order[1].register_forward_hook(lambda _, args, out: (out[0] * 1.5, out[1]))
    model.order[1].register_full_backward_hook(lambda _, into, out: (into[0] * 1.5,))


def _copied(train, model):
    """A copy with other weights, after a call; the original is in the other mode."""
    for block in model.order:
        block(torch.ones(SHAPE))
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.detach().mul_(1.5)
    model.train(not train)
    return twin.train(train)
