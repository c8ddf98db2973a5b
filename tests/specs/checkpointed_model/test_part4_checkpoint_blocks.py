"""Checkpoints in models of others: which blocks, the same bits, bytes, and what may be held."""

import copy
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, nn

from kit.laws import draw
from kit.laws.checks import ERRORS, check_equal, check_raises
from kit.laws.scenarios import scenarios
from kit.laws.toys import Block
from kit.laws.untouched import observed
from kit.private_torch import DispatchMode
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
    counting,
    guarded,
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
    twin_of,
)
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast, draw_on

FLOAT, KEPT = torch.float32, (torch.ops.aten.addmm.default,)
ATEN = torch.ops.aten
ADDMM, GELU, NORM = ATEN.addmm.default, ATEN.gelu.default, ATEN.native_layer_norm.default
TOPK, ARGMAX, ITEM = ATEN.topk.default, ATEN.argmax.default, ATEN._local_scalar_dense.default
MATMULS = [ADDMM, ATEN.mm.default, ATEN.bmm.default, ATEN.baddbmm.default]
KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION = [getattr(ATEN, f"_scaled_dot_product_{kind}").default for kind in KINDS]
CHOICE = [TOPK, ARGMAX, ITEM, ADDMM]
DEAR = [*MATMULS, *ATTENTION]


class Calls(DispatchMode):
    """Counts the operators that run, by overload."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Choosing(Noisy):
    """By integers, in part without gradients, and a number; with two overloads of the mean."""

    def forward(self, x):
        y = torch.tanh(self.up(x))
        best, places = y.topk(1)
        with torch.no_grad():
            scores = self.up(y)
            more = places + scores.argmax(-1, keepdim=True)
        return x + torch.tanh(y * scores * best * more * y.mean(-1, keepdim=True) * y.mean().item())


class Looking(Noisy):
    """Attention and what draws after it. Without dropout its operator is not given any rate."""

    def forward(self, x):
        y = torch.tanh(self.up(x))[:, None]
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=self.rate)[:, 0]
        return x + torch.tanh(F.dropout(y, self.rate))


class Drawing(Noisy):
    """It draws from torch's stream, and from its generator, in two ways."""

    def forward(self, x):
        y = super().forward(x * torch.full_like(x, 0.75).bernoulli())
        return y * torch.full_like(y, 0.75).bernoulli(generator=self.first)


class Halving(Noisy):
    """It changes the result of a product, which its user can change, too."""

    def forward(self, x):
        self.hidden = self.up(x).mul_(0.5)
        return x + torch.tanh(self.up(torch.tanh(self.hidden)))


def transformer():
    return [Block(WIDTH, heads=2)]


def of_keep(got, want):
    """What is held wrongly, or not held, if it is only one of these."""
    again, held = ([op for op in a if op not in b] for a, b in ((got, want), (want, got)))
    if again and not held:
        return f"in `keep`, and not held: {', '.join(again)}"
    return f"not in `keep`, and held: {', '.join(held)}" if held and not again else None


@scenarios("operators that run again", of_keep)
def again(answer, device, name, make, keep, looked_at, dtype=None, later=lambda model: model):
    """Those that run more often than in the plain model, in forward and backward together."""
    counts = []
    for checkpoint in (False, True):
        draw.seed(3)
        model, own = nn.Sequential(*make()).to(device), keep.copy()
        if checkpoint:
            answer.checkpoint_blocks(model, type(model[0]), keep=own)
        own.clear()  # the caller's list is the caller's
        model = later(model)
        x = draw.randn(*SHAPE, device=device, requires_grad=True)
        with Calls() as calls:
            for _ in range(2):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    y = model(x)
                y.float().square().mean().backward()
        counts.append(calls.counts)
    before, now = counts
    return (
        [str(op) for op in looked_at if now[op] > before[op]],
        [str(op) for op in looked_at if before[op] and op not in keep],
    )


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

    @pytest.mark.exact("checkpoint_blocks", "runs")
    @checkpointed("the block's own mode is not asked, or not at each of its calls")
    def test_recomputes_where_it_trains(self):
        ready = lambda model: model.eval() and None  # noqa: E731
        yield "handed in in eval mode", chain(mixers, prepared=ready, later=nn.Module.train), [2]
        yield "in eval mode later", chain(mixers, later=nn.Module.eval), [2], 1
        layers = lambda model: [block.up.train() for block in model.eval().order] and None  # noqa: E731
        yield "only their layers in training mode", chain(mixers, later=layers), [2], 1
        yield "only blocks in training mode", chain(mixers, later=_blocks_alone), [2]
        for mode in (torch.no_grad, torch.inference_mode):
            yield mode.__name__, chain(mixers, step={"outer": mode}), [2], 1

    @pytest.mark.xdist_group("transformers")
    @pytest.mark.exact("checkpoint_blocks", "same bits")
    @checkpointed("the second run is in other modes, draws other numbers, or changes buffers again")
    def test_blocks_change_no_bit(self):
        yield "gpt2 of the transformers library", stranger(), [3]
        yield "two forward passes", chain(two_noisy, passes=2), [2]
        yield "x without gradient", chain(two_noisy, grad=False), [2]
        yield "counters", chain(lambda: [Counting(), Counting()], passes=2), [2]
        norms = lambda: [Normed(nn.BatchNorm1d(WIDTH)), Normed(nn.BatchNorm1d(WIDTH).eval())]  # noqa: E731
        yield "norms", chain(norms, passes=2, shape=(4, WIDTH, 3)), [2]

    @pytest.mark.saves("checkpoint_blocks", "held")
    @pytest.mark.parametrize("case", ["held", RETAINED])
    def test_holds_one_input_a_block_of_others(self, answer, reference, device, case):
        """Of 4 blocks 3 inputs, as x is the baseline's, and the output; the bar adds 1. At the peak
        it is one block's inside besides, with its output and gradients."""
        x = large_inputs(device)
        reads = partial(_reads, held, x=x)
        title, limit, formula = "held between the passes", 5 * one_input(x), "(4 + 1) inputs"
        if case == RETAINED:
            reads = partial(_reads, partial(peak, retain=True), x=x)
            title, formula = f"peak above the baseline, {case}", "4 inputs + 1 inside"
            limit = 4 * one_input(x) + reads(None, blocks=1)
        title, cause = f"{title}, 4 blocks, called by keyword", "more is held than inputs"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)

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
    @checkpointed("the second run has the hooks in it, or begins before one; or something is lost")
    def test_hooks_and_forwards_of_a_block_go_on_running(self):
        yield "a forward", chain(mixers, prepared=_own_forward), [2]
        yield "hooks, from before", chain(mixers, prepared=_hooked), [2]
        yield "hooks, from after", chain(mixers, later=_hooked), [2]
        yield "hooks, with keep", chain(mixers, prepared=_hooked), [2], 2, KEPT

    @pytest.mark.survives("checkpoint_blocks", 3)
    @checkpointed("an argument or result is handed on in one way only")
    def test_blocks_take_and_return_anything(self):
        kinds = {"shift": FLOAT, "both": [FLOAT, torch.complex64], "extra": {"d": FLOAT}}
        yield "tensors by keyword", chain(mixers, name="late", **kinds), [2]
        yield "x by keyword", chain(mixers, call=lambda run, block, x: block(that=x)), [2]
        yield "tensors by position", chain(mixers, FLOAT, Pair(FLOAT, 3)), [2]
        every = lambda run, block, x, /, **named: block(x, **named)  # noqa: E731
        names = dict.fromkeys(["function", "state", "keep", "debug"], FLOAT)
        for keep in ((), KEPT):
            named = chain(mixers, call=every, name="late", **names)
            yield f"keywords that functions here have too, keep={keep}", named, [2], 2, keep

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
            yield f"first {kinds[0].__name__}", chain(make, kinds=kinds), counts, None

    @pytest.mark.survives("checkpoint_blocks", 9)
    @checkpointed("torch's own stream alone is set, or not every generator at each call")
    def test_draws_from_generators_again(self):
        yield "an attribute", chain(lambda: [Noisy(7), Noisy(8)]), [2]
        yield "attributes of two, further inside", chain(_twins), [1]
        yield "an attribute that is set later", chain(lambda: [Noisy(7)], later=_seeded_anew), [1]
        yield "two backward passes", chain(lambda: [Noisy(7, 8)], late=draw_on), [1], 3

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_a_second_call(self, answer):
        for done, kind in (([2], Nest), ([0, 1, 2], Deeper)):
            model = Chain([Deeper() for _ in range(3)])
            answer.checkpoint_blocks(nn.ModuleList(model.order[n] for n in done), Nest)
            named = ("Nest", "Deeper", f"tree.{done[0]}")  # a class, or a block
            when = f"for a model of which {len(done)} of 3 blocks have been through it"
            _refused(answer, model, kind, ValueError, named, when)
            _refused(answer, copy.deepcopy(model), kind, ValueError, named, f"{when}, and a copy")

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
        yield "no_grad", chain(lambda: [Noisy()], step={"outer": torch.no_grad}), [1], 1, DEAR
        yield "choices", chain(lambda: [Choosing()]), [1], 2, CHOICE

    @pytest.mark.survives("checkpoint_blocks", 6)
    @checkpointed("what draws from some stream is held like the rest: later draws are others")
    def test_what_draws_random_numbers_runs_again(self):
        for op in (ATEN.bernoulli.default, ATEN.rand.generator):  # others draw on
            yield f"{op} draws", chain(lambda: [Drawing(7)]), [1], 2, [op]
        yield "attention draws", chain(lambda: [Looking()]), [1], 2, ATTENTION  # one op on CUDA

    @pytest.mark.survives("checkpoint_blocks", 6)
    @again("a fixed set decides, or all is held, or nothing, or operators count for overloads")
    def test_holds_the_results_of_these_operations_and_of_no_others(self):
        seen, dim, full = [ADDMM, GELU, NORM, *ATTENTION], ATEN.mean.dim, ATEN.mean.default
        yield "nothing", transformer, [], seen
        yield "a set", transformer, {NORM}, seen
        yield "matrix products and GELU", transformer, [*MATMULS, GELU], seen
        yield "attention", transformer, ATTENTION, seen
        plain = lambda: [Looking(rate=0.0)]  # noqa: E731
        yield "attention without a mask", plain, ATTENTION, [ADDMM, *ATTENTION]
        for kept in ([dim], [full], [TOPK, ARGMAX, ITEM], [ADDMM]):
            yield f"of them {kept[0]}", lambda: [Choosing()], kept, [dim, full, *CHOICE]
        yield "in a copy", transformer, MATMULS, seen, None, copy.deepcopy

    @pytest.mark.survives("checkpoint_blocks", 6)
    def test_holds_less_than_the_plain_model(self, answer, reference, device):
        """Of a block DEAR keeps qkv 3, attention 1 (its logsumexp heads / width = 2 / 16), out 1,
        up 3 and down 1. Kept besides, the GELU's result alone would be 3 more."""
        x = large_inputs(device)
        reads = lambda module: _reads(peak, module, x, keep=module.DEAR if module else ())  # noqa: E731
        limit = _reads(peak, answer, x) + 4 * (9 + 2 / WIDTH) * one_input(x)
        title, formula = "4 blocks, keep=DEAR", "all recomputed + 4 x 9.125 inputs"
        given = (f"peak above the baseline, {title}", limit, formula, reads, answer, reference)
        check_limit(*given, cause="more is kept than the results of the operations in keep")

    @pytest.mark.survives("checkpoint_blocks", 7)
    @checkpointed("the second run is without autocast, or has its default dtype")
    def test_autocast_changes_no_bit(self):
        for dtype, keep in product(HALVES, ((), DEAR)):
            step = {"outer": autocast(dtype)}
            yield f"{dtype}, {len(keep)} kept", chain(two_noisy, step=step), [2], 2, keep

    @pytest.mark.survives("checkpoint_blocks", 7)
    @again("keep is not heeded under autocast, or nothing is recomputed there")
    def test_keeps_under_autocast(self):
        for dtype in HALVES:
            yield f"{dtype}", transformer, MATMULS, [ADDMM, GELU], dtype
            # On CUDA its results are not tensors alone.
            yield f"attention, {dtype}", transformer, ATTENTION, [ADDMM, *ATTENTION], dtype

    @pytest.mark.survives("checkpoint_blocks", 8)
    @checkpointed("calls share contexts, or overwrite what another one holds")
    def test_what_is_kept_is_not_shared(self):
        for name, make in {"dropout": Noisy, "counters": Counting}.items():
            yield f"two passes, {name}", chain(lambda make=make: [make()], passes=2), [1], 2, DEAR
            yield f"thrice in a row, {name}", chain(lambda make=make: [make()] * 3), [1], 2, DEAR

    @pytest.mark.survives("checkpoint_blocks", 10)
    @guarded("what is held shares its memory, and nobody looks for a change")
    def test_notices_what_is_held_and_changed(self):
        world = partial(chain, lambda: [Halving()])
        yield "in the block", world(), world(), DEAR
        twice = lambda model, *_: model.order[0].hidden.detach().mul_(2)  # noqa: E731
        yield "between the passes", world(spoil=twice), world(), DEAR

    @pytest.mark.survives("checkpoint_blocks", 8)
    def test_a_call_leaves_nothing(self, answer, device):
        for keep in (DEAR, ()):
            two = [*transformer(), *transformer()]  # x is the caller's: the second's input is not
            model, x = nn.Sequential(*two).to(device), large_inputs(device)
            answer.checkpoint_blocks(model, Block, keep=keep)
            check_nothing_left(model, x, lambda model=model, x=x: model(x))

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    def test_refuses_to_keep_what_is_no_overload(self, answer):
        """pytorch/pytorch#176065: aten.mm, without .default, matches no operation."""
        model, when = nn.Sequential(*transformer()), "for aten.addmm in keep, which is no overload"
        for keep in ([ADDMM, ATEN.addmm], [ATEN.addmm, ADDMM]):
            _refused(answer, model, Block, TypeError, "addmm", when, keep=keep)


def _refused(answer, model, kind, error, named, when, **keep):
    """Fail unless it is an error, and the model is as it was."""
    __tracebackhide__ = True
    before = observed(model)
    call = partial(answer.checkpoint_blocks, model, kind, **keep)
    check_raises(call, error, mentions=[named], when=when)
    changed = [key for key, value in observed(model).items() if value != before[key]]
    cause = "something has been changed before everything was looked at"
    check_equal(changed, [], f"what is changed by a refusal {when}", cause=cause, clause=ERRORS)


def _reads(reads, module, x, blocks=4, keep=()):
    """What transformer blocks take that are called by keyword; for no module plain ones."""
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


def _blocks_alone(model):
    model.training = model.tree.training = False


def _hooked(model):
    """Hooks that count, and that change what goes in, the result, and gradients."""
    model.register_buffer("calls", torch.zeros(2, device=model.order[0].up.weight.device))
    model.order[0].register_forward_pre_hook(lambda *_: model.calls[0].add_(1) and None)
    model.order[0].register_forward_hook(lambda *_: model.calls[1].add_(1) and None)
    model.order[0].up.register_forward_hook(lambda _, args, out: out * 1.5)
    model.order[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
    model.order[1].register_forward_hook(lambda _, args, out: (out[0] * 1.5, out[1]))
    model.order[1].register_full_backward_hook(lambda _, into, out: (into[0] * 1.5,))


def _twins():
    """Two layers of a block share generators."""
    noise = Noisy(7, 8)
    return [Nest(noise, copy.copy(noise))]


def _seeded_anew(model):
    """Each epoch has a generator of its own."""
    for block in model.order:
        block(torch.ones(SHAPE))
        block.first = Generator(torch.get_default_device()).manual_seed(9)


def _own_forward(model):
    """As accelerate puts one there."""

    def own(block, *args, **kwargs):
        x, more = Mixer.forward(block, *args, **kwargs)
        return x * 1.5, more

    model.order[1].forward = partial(own, model.order[1])


def _copied(train, model):
    """A copy of a copy, with other weights, after a call; the original is in the other mode."""
    for block in model.order:
        block(torch.ones(SHAPE))
    twin = twin_of(copy.deepcopy(model))
    model.train(not train)
    return twin.train(train)
