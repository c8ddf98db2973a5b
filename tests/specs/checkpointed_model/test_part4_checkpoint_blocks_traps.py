"""Checkpoints in models of others: copies, hooks, batch normalisation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kit.laws import draw
from kit.laws.checks import check, check_equal
from kit.laws.toys import Block
from specs.checkpointed_model.common import WIDTH, Runs, back, check_same, rounding, step
from specs.checkpointed_model.models import (
    Calls,
    Host,
    Named,
    Nest,
    Normed,
    host,
    host_runs,
    transformer,
)

KEEPS = pytest.mark.parametrize("dear", [False, True], ids=["recompute_all", "keep_dear"])


def statistics(model: nn.Module) -> dict[str, Any]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class TestPart4CheckpointBlocksTraps:
    subject = "checkpoint_blocks"

    @pytest.mark.survives
    def test_leaves_the_class_and_its_other_models_alone(self, answer, device):
        model, x = host(device)
        other = Host(model.mixer).to(device)
        keys = list(model.state_dict())
        answer.checkpoint_blocks(model, model.mixer)
        cause = "blocks are wrapped in other modules, or registered under a second name"
        check_equal(list(model.state_dict()), keys, "keys of state_dict()", cause=cause)
        for module, when in ((other, "made before"), (Host(model.mixer).to(device), "made after")):
            runs = host_runs(module)
            back(module(x))
            cause = "forward is replaced on the class, not on the blocks of this model"
            check_equal(runs.counts, 3 * [1], f"runs in another model, {when}", cause=cause)

    @pytest.mark.survives
    def test_a_block_in_several_places_is_one_block(self, answer, device):
        """One block used as several layers, as ALBERT does: two calls, so 2 + 2 runs."""
        shared = Nest()
        model = nn.Sequential(nn.Sequential(shared), nn.Tanh(), nn.Sequential(shared)).to(device)
        runs = Runs([shared.up])
        cause = "places are counted, not blocks"
        check_equal(answer.checkpoint_blocks(model, Nest), 1, "blocks", cause=cause)
        back(model(draw.randn(3, WIDTH, device=device)))
        cause = "the block is checkpointed once for every place, one checkpoint within another"
        check_equal(runs.counts, [4], "runs of the block", cause=cause)

    @pytest.mark.survives
    def test_hooks_of_a_block_run_as_they_did(self, answer, device):
        """Once for each call and not in the recomputation, those from before and from after."""
        model, x = host(device)
        seen: list[str] = []

        def hook_on(block: nn.Module, name: str) -> None:
            block.register_forward_pre_hook(lambda *_: seen.append(f"before {name}"))
            block.register_forward_hook(lambda *_: seen.append(f"after {name}"))

        hook_on(model.blocks[0], "an old block")
        plain = copy.deepcopy(model)
        for module in (model, plain):
            scaled = module.blocks[2]
            scaled.register_forward_hook(lambda _, args, out: (out[0] * 1.5, out[1]))
        answer.checkpoint_blocks(model, model.mixer)
        hook_on(model.blocks[1], "a new block")
        got = step(model, lambda: model(x))
        want = [f"{when} {which} block" for which in ("an old", "a new") for when in _AROUND]
        cause = "the recomputation calls the block, hooks and all; or hooks are lost"
        check_equal(seen, want, "hooks that ran", cause=cause)
        cause = "a hook that changes the result is lost, or runs twice"
        check_same(got, step(plain, lambda: plain(x)), cause=cause)

    @pytest.mark.survives
    def test_a_forward_of_the_blocks_own_goes_on_running(self, answer, device):
        """Libraries put one on the instance too, and it is no sign of a checkpoint."""
        model = nn.Sequential(Nest(), Nest()).to(device)
        plain = copy.deepcopy(model)
        for module in (model, plain):
            forward = module[1].forward
            module[1].forward = lambda x, forward=forward: forward(x) * 1.5
        x = draw.randn(3, WIDTH, device=device)
        answer.checkpoint_blocks(model, Nest)
        runs = Runs([model[0].up, model[1].up])
        cause = "the class's forward is called, and not the block's own"
        check_same(step(model, lambda: model(x)), step(plain, lambda: plain(x)), cause=cause)
        cause = "a block with a forward of its own is left out"
        check_equal(runs.counts, [2, 2], "runs of each block", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("name", ["debug", "function"])
    def test_keyword_arguments_may_have_any_name(self, answer, device, name):
        """Names that torch.utils.checkpoint.checkpoint() has for arguments of its own.

        And the input comes by keyword too, as layers of the transformers library are often called.
        """
        block = Named().to(device)
        model, x = nn.Sequential(block), draw.randn(3, WIDTH, device=device)
        given = {"that": x, name: 0.5}
        want = block(**given).detach()
        answer.checkpoint_blocks(model, Named)
        refused, got = "", None
        try:
            got = block(**given).detach()
        except (TypeError, ValueError) as error:
            refused = f"{type(error).__name__}: {error}"
        cause = (
            "the block's keyword argument is handed to checkpoint(), which takes it for its own;"
        )
        cause += " or something must come by position"
        check_equal(refused, "", f"error for a block called with {name}=0.5", cause=cause)
        check_equal(got, want, f"output of a block called with {name}=0.5", cause=cause)

    @pytest.mark.survives
    @KEEPS
    def test_a_deep_copy_checkpoints_its_own_blocks(self, answer, device, dear):
        """facebookresearch/fairscale#816: the copy of a patched block calls the original."""
        model, x = host(device)
        plain = copy.deepcopy(model)
        answer.checkpoint_blocks(model, model.mixer, keep=answer.DEAR if dear else ())
        back(model(x))
        model.zero_grad()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
                p.mul_(1.5)
                q.mul_(1.5)
        runs = host_runs(twin)
        model.eval()  # which is no business of the copy
        cause = "a closure, which deepcopy does not copy, still holds the original block"
        got = step(twin, lambda: twin(x), cause=cause)
        check_same(got, step(plain, lambda: plain(x)), cause=cause)
        check(
            all(p.grad is None for p in model.parameters()),
            expected="no gradient on the original",
            got="gradients on the original",
            cause=cause,
        )
        check_equal(runs.counts, 3 * [2], "runs of each block of the copy", cause=cause)

    @pytest.mark.survives
    @KEEPS
    def test_calls_of_a_block_do_not_share_what_they_keep(self, answer, device, dear):
        model, x = host(device)
        plain = copy.deepcopy(model)
        answer.checkpoint_blocks(model, model.mixer, keep=answer.DEAR if dear else ())
        other = x.flip(0) * 0.5
        cause = "calls of a block share their contexts, or overwrite what the first one kept"
        got = step(model, lambda: torch.cat([model(x), model(other)]), cause=cause)
        check_same(got, step(plain, lambda: torch.cat([plain(x), plain(other)])), cause=cause)

    @pytest.mark.survives
    @KEEPS
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_blocks_recompute_in_the_precision_of_their_forward_pass(
        self, answer, device, dtype, dear
    ):
        model, x = transformer(device, 2)
        plain = copy.deepcopy(model)
        answer.checkpoint_blocks(model, Block, keep=answer.DEAR if dear else ())

        def forward(module: nn.Module) -> torch.Tensor:
            with torch.autocast(device.type, dtype):
                return module(x)

        cause = "the recomputation runs without autocast, or with its default dtype"
        found, products = [], []
        for module in (model, plain):
            with Calls() as calls:
                found.append(step(module, lambda m=module: forward(m), cause=cause))
            products.append(calls.counts[torch.ops.aten.addmm.default])
        check_same(*found, cause=cause, within=rounding(device, dtype))
        check(
            (products[0] == products[1]) == dear,
            expected=f"{'as many' if dear else 'more'} matrix products {'as' if dear else 'than'}"
            f" in the plain model, {products[1]}",
            got=products[0],
            cause="keep is not heeded under autocast, or nothing is recomputed there",
        )

    @pytest.mark.survives
    @KEEPS
    @pytest.mark.parametrize("case", ["moving_average", "cumulative", "in_eval_mode", "untracked"])
    def test_batch_normalisation_counts_each_batch_once(self, answer, device, case, dear):
        """Running mean, variance and number of batches, after each pass of two steps, each of them
        with two forward passes.

        pytorch/pytorch#96136: the recomputation counts the batch again. facebookresearch/fairscale
        #1035: it is counted in the backward pass only, which a forward pass in between would miss.
        """
        momentum = None if case == "cumulative" else 0.3
        model = nn.Sequential(*[Normed(momentum, tracked=case != "untracked") for _ in range(2)])
        model.to(device)
        if case == "in_eval_mode":  # frozen statistics that are not the initial ones
            model(draw.randn(7, WIDTH, 3, device=device) + 1)
            for block in model:
                block.norm1.eval()
        plain = copy.deepcopy(model)
        answer.checkpoint_blocks(model, Normed, keep=answer.DEAR if dear else ())
        for number in (1, 2):
            x = draw.randn(4, WIDTH, 5, device=device) * number
            model.zero_grad()
            plain.zero_grad()
            mine, true = (torch.cat([m(x), m(x.flip(0) + 0.5)]) for m in (model, plain))
            cause = "the forward pass does not update the statistics, or not as it should"
            check_same(statistics(model), statistics(plain), cause=cause)
            check_equal(mine.detach(), true.detach(), f"output of step {number}", cause=cause)
            otherwise = "a norm does something else in the recomputation than in the forward pass:"
            otherwise += " it takes running statistics for the batch's, or the batch's in eval"
            otherwise += " mode, or has none, where the forward pass had saved some"
            back(mine, cause=otherwise)
            back(true)
            cause = "the recomputation updates the statistics again, or leaves changed ones behind,"
            cause += " or puts back those of its own forward pass, of which there have been more"
            check_same(statistics(model), statistics(plain), cause=cause)
            grads, wants = (
                {f"gradient of {n}": p.grad for n, p in m.named_parameters()}
                for m in (model, plain)
            )
            check_same(grads, wants, cause=otherwise, within=rounding(device))


_AROUND = ("before", "after")
