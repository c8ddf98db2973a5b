"""Selective recomputation: what is dear is held, and only the rest runs again."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.laws import draw
from kit.laws.scenarios import scenarios
from kit.laws.toys import Block
from kit.private_torch import DispatchMode
from specs.checkpointed_model.blocks import (
    Counting,
    Noisy,
    Normed,
    chain,
    checkpointed,
    counting,
    refused,
    two_noisy,
)
from specs.checkpointed_model.large import (
    check_limit,
    check_nothing_left,
    large_inputs,
    one_input,
    peak,
)
from specs.checkpointed_model.steps import HALVES, SHAPE, WIDTH, autocast
from specs.checkpointed_model.strangers import stranger

ATEN = torch.ops.aten
ADDMM, GELU, NORM = ATEN.addmm.default, ATEN.gelu.default, ATEN.native_layer_norm.default
TOPK, ARGMAX, ITEM = ATEN.topk.default, ATEN.argmax.default, ATEN._local_scalar_dense.default
MATMULS = [ADDMM, ATEN.mm.default, ATEN.bmm.default, ATEN.baddbmm.default]
ATTENTION = [
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
]
CHOICE = [TOPK, ARGMAX, ITEM, ADDMM]
DEAR = [*MATMULS, *ATTENTION]
VIEWS = [ATEN.slice.Tensor, ATEN.select.int, ATEN.transpose.int, ATEN.view.default]


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
    """It draws from its generator in two ways."""

    def forward(self, x):
        y = super().forward(x)
        return y * torch.full_like(y, 0.75).bernoulli(generator=self.first)


class Copying(Counting):
    """Buffers, and a result that is a copy, as the first run's buffers may be."""

    def forward(self, x):
        return super().forward(torch.tanh(x).clone())


class Written(Noisy):
    """Results are changed in place: inside, or by the caller; of a choice it is the second."""

    def forward(self, x):
        y = self.up(x)
        half = y.mul_(0.5) if self.rate else y * 0.5
        z = F.layer_norm(half, (WIDTH,))
        _, places = half.topk(1)
        z = z * places * (places.mul_(2) if self.rate else places * 2)
        return y, z, torch.tanh(z.mul_(0.5) if self.rate else z * 0.5)


class Viewed(Noisy):
    """What is written to views is read from their base."""

    def forward(self, x):
        y = self.up(x) * 2.0
        y[:, 1:3].mul_(0.5)
        y[:, 0].mul_(0.5)
        y.transpose(0, 1).mul_(0.5)
        y.view(-1).mul_(0.5)
        return x + torch.tanh(y)


def doubled(run, block, x):
    y, z, more = block(x)
    return y.mul_(2.0), z.mul_(2.0), more


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


class TestPart4CheckpointBlocksKeep:
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
        yield "copies, of buffers too", chain(lambda: [Copying()]), [1], 2, [ATEN.clone.default]
        yield "choices", chain(lambda: [Choosing()]), [1], 2, CHOICE
        yield "views that are written to", chain(lambda: [Viewed()]), [1], 2, [ADDMM, *VIEWS]
        for dtype in HALVES:
            step = {"outer": autocast(dtype)}
            yield f"{dtype}", chain(two_noisy, step=step), [2], 2, DEAR

    @pytest.mark.survives("checkpoint_blocks", 6)
    @checkpointed("what draws is held like the rest, and the draws after it are others")
    def test_what_draws_random_numbers_runs_again(self):
        for op in (ATEN.rand.generator, ATEN.bernoulli.default):  # the other draws on
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
        """The peak with full recomputation + 9.125 inputs a block for the results that DEAR keeps.

        Of a block these are qkv 3, attention 1 (and its logsumexp, heads / width = 2 / 16), out 1,
        up 3 and down 1. Kept besides, the GELU's result alone would be 3 more.
        """
        x = large_inputs(device)

        def reads(module, keeps=True):
            model = nn.Sequential(*[Block(WIDTH, heads=2) for _ in range(4)]).to(device)
            if module:
                module.checkpoint_blocks(model, Block, keep=module.DEAR if keeps else ())
            return peak(model, x, lambda: model(x))

        title = "peak above the baseline, 4 blocks, keep=DEAR"
        formula = "all recomputed + 4 x 9.125 inputs"
        limit = reads(answer, keeps=False) + 4 * (9 + 2 / WIDTH) * one_input(x)
        cause = "more is kept than the results of the operations in keep"
        check_limit(title, limit, formula, reads, answer, reference, cause=cause)

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

    @pytest.mark.survives("checkpoint_blocks", 8)
    def test_a_call_leaves_nothing(self, answer, device):
        for keep in (DEAR, ()):
            two = [*transformer(), *transformer()]  # x is the caller's: the second's input is not
            model, x = nn.Sequential(*two).to(device), large_inputs(device)
            answer.checkpoint_blocks(model, Block, keep=keep)
            check_nothing_left(model, x, lambda model=model, x=x: model(x))

    @pytest.mark.survives("checkpoint_blocks", 9)
    @checkpointed("what is held is changed and nobody looks")
    def test_notices_a_change_of_what_is_held(self):
        rows = (5, WIDTH)  # of more dimensions nn.Linear may return a view of what is held
        for keep in (DEAR, [NORM], [TOPK], [ATEN.mul_.Tensor]):  # some have several results
            inside = chain(lambda: [Written()], shape=rows)
            yield f"changed in the block, {keep[0]}", inside, "or an error", 2, keep
            later = chain(lambda: [Written(rate=0)], shape=rows, call=doubled)
            yield f"changed later, {keep[0]}", later, "or an error", 2, keep
        cast = chain(lambda: [Written()], shape=rows, step={"outer": autocast(HALVES[0])})
        yield "changed in the block under autocast", cast, "or an error", 2, DEAR

    @pytest.mark.survives("checkpoint_blocks", "Raises")
    @pytest.mark.parametrize("bad", [ATEN.addmm, torch.addmm], ids=["an_operator", "a_function"])
    def test_refuses_to_keep_what_is_no_overload(self, answer, bad):
        """pytorch/pytorch#176065: aten.mm, without .default, matches no operation."""
        model, when = nn.Sequential(*transformer()), f"for {bad!r} in keep, which is no overload"
        for keep in ([ADDMM, bad], [bad, ADDMM]):
            refused(answer, model, Block, TypeError, "addmm", when, keep=keep)
