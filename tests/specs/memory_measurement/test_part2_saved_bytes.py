"""Bytes that autograd saves, each compared with a formula."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kit.answers.reset_torch import reset_torch
from kit.laws import draw
from kit.laws.checks import check, check_bar, check_close, check_equal, check_raises
from kit.laws.endings import ENDINGS, check_ending
from kit.laws.scenarios import check_scenarios
from kit.laws.toys import mlp
from specs.memory_measurement import graphs


def check_saved(answer, device, law, cause):
    __tracebackhide__ = True

    def judge(answer, scenario):
        world = scenario(device)
        return answer.saved_bytes(world.forward, world.model), world.want

    check_scenarios(answer, judge, law, "saved bytes", cause=cause)


class TestPart2SavedBytes:
    """Part 2: saved_bytes - what autograd holds between forward and backward"""

    subject = "saved_bytes"

    @pytest.mark.works("saved_bytes", "held")
    def test_counts_what_an_mlp_saves(self, answer, device):
        """The input (11 x 7) for the first weight, the ReLU's result (11 x 13) for the second."""
        model, x = mlp(7, 13, 5, device=device), draw.randn(11, 7, device=device)
        cause = "below: the graph is gone when you count; above: weights or copies are in it"
        got = answer.saved_bytes(lambda: model(x), model)
        check_equal(got, 4 * 11 * (7 + 13), "saved bytes", cause=cause)

    @pytest.mark.exact("saved_bytes", "held")
    def test_counts_what_the_graph_of_the_result_holds(self, answer, device):
        cause = "something else is counted than what a graph has saved"
        check_saved(answer, device, graphs.Held, cause)

    @pytest.mark.exact("saved_bytes", "sharing")
    def test_counts_a_storage_once_and_in_full(self, answer, device):
        cause = "tensors are counted, or the elements of a view, and not the storage that stays"
        check_saved(answer, device, graphs.Sharing, cause)

    @pytest.mark.exact("saved_bytes", "left out")
    def test_never_counts_parameters_or_buffers(self, answer, device):
        cause = "what is saved of a parameter or buffer may be a view of it: ask for its storage"
        check_saved(answer, device, graphs.LeftOut, cause)

    @pytest.mark.exact("saved_bytes", "model")
    def test_counts_the_weights_of_other_models(self, answer, device):
        cause = "parameters are left out whoever owns them"
        check_saved(answer, device, graphs.OtherModels, cause)

    @pytest.mark.exact("saved_bytes", "after")
    def test_lets_the_caller_go_backward(self, answer, device):
        """The pack hook must not change what backward reads: (x e^x)' = e^x (x + 1)."""
        x, results = graphs.leaf(device, 12), []
        answer.saved_bytes(lambda: results.append(x.exp() * x), nn.Module())
        check_equal(len(results), 1, "runs of forward", cause="forward runs again, to look twice")
        results[0].sum().backward()
        want = x.detach().exp() * (x.detach() + 1)
        check_close(x.grad, want, "gradient", cause="the hooks give back another tensor")

    @pytest.mark.exact("saved_bytes", "after")
    @pytest.mark.parametrize("end", ENDINGS)
    def test_leaves_no_hook(self, answer, device, end):
        x = graphs.leaf(device, 12)
        check_ending(lambda forward: answer.saved_bytes(forward, nn.Module()), end, x.exp)
        try:
            with disable_saved_tensors_hooks("a hook is still in force"):  # raises if one is
                left = "none"
        except RuntimeError as error:
            left = str(error)
        cause = "hooks are entered without `with`, or left in one kind of ending only"
        check_equal(left, "none", f"saved-tensor hooks after {end}", cause=cause)

    @pytest.mark.saves("saved_bytes", "held")
    def test_shows_what_checkpointing_saves(self, answer, reference, device):
        """Per block a checkpoint holds its input only: bar = blocks x one input."""
        blocks = nn.ModuleList(mlp(32, 128, 32, device=device) for _ in range(5))
        x = graphs.leaf(device, 24, 32)

        def saved(module, remat):
            def forward():
                y = x
                for block in blocks:
                    y = checkpoint(block, y, use_reentrant=False) if remat else block(y)
                return y

            return module.saved_bytes(forward, blocks)

        one_input, plain, got = 4 * 24 * 32, saved(answer, False), saved(answer, True)
        cause = "something that the graph saves is left out"
        want = 5 * (one_input + 4 * 24 * 128)
        check_equal(plain, want, "saved bytes of five blocks (input + hidden)", cause=cause)
        check_bar(
            "saved with a checkpoint per block",
            got,
            5 * one_input,
            plain=plain,
            reference=saved(reference, True),
            formula="5 blocks x one input",
            cause="what checkpointing drops is counted all the same",
        )
        check_equal(got, 5 * one_input, "saved bytes", cause="the block inputs are left out")

    @pytest.mark.survives("saved_bytes", 1)
    def test_does_not_count_a_graph_that_is_gone(self, answer, device):
        cause = "ask what a graph still holds, and not what was saved, or what storage lives"
        check_saved(answer, device, graphs.Gone, cause)

    @pytest.mark.survives("saved_bytes", 2)
    def test_counts_saved_inputs(self, answer, device):
        check_saved(answer, device, graphs.Leaves, "what was there before is left out")

    @pytest.mark.survives("saved_bytes", 3)
    @pytest.mark.parametrize("function", [torch.exp, torch.relu, torch.square])
    def test_lets_go_of_the_graph(self, answer, device, function):
        """exp saves its own result, whose grad_fn holds what it saved: no cycle may come of it."""
        x, storages = graphs.leaf(device, 32), []

        def forward():
            y = function(x * 2)
            storages.append(ref(y.untyped_storage()))
            return y

        gc.collect()
        gc.disable()
        try:
            answer.saved_bytes(forward, nn.Module())
            gone = storages[0]() is None
        finally:
            gc.enable()
        check(
            gone,
            expected="nothing of the graph alive after the count",
            got=f"the result of {function.__name__} is still alive",
            cause="the pack hook keeps a tensor with its grad_fn, and so the graph holds itself",
        )

    @pytest.mark.survives("saved_bytes", 4)
    def test_puts_the_callers_hooks_back(self, answer, device):
        x, packed = graphs.leaf(device, 12), []
        saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t).__enter__()
        answer.saved_bytes(x.exp, nn.Module())
        packed.clear()
        x.exp()
        reset_torch()
        cause = "hooks are removed that were there before"
        check_equal(len(packed), 1, "calls of the caller's own hook afterwards", cause=cause)

    @pytest.mark.survives("saved_bytes", 5)
    def test_changes_nothing_that_forward_does_not(self, answer, device):
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).to(device)
        x, stale = draw.randn(5, 4, device=device), torch.ones(3, 4, device=device)
        model[0].weight.grad = stale
        draw.seed(5)
        model(x)
        want = draw.next_random(device)
        draw.seed(5)
        answer.saved_bytes(lambda: model(x), model)
        cause = "gradients are cleared, or a backward pass runs"
        kept = model[0].weight.grad is stale and stale.eq(1).all().item()
        check_equal((kept, model[0].bias.grad), (True, None), "stale gradients kept", cause=cause)
        cause = "the random state is set or put back, or forward runs twice"
        check_equal(draw.next_random(device), want, "the next random numbers", cause=cause)
        check_equal(model.training, True, "training flag", cause="train() or eval() is called")
        with torch.no_grad():
            got = answer.saved_bytes(lambda: model(x), model)
        check_equal(got, 0, "saved bytes under the caller's no_grad", cause="gradients are put on")

    @pytest.mark.survives("saved_bytes", "Raises")
    def test_refuses_what_is_no_model(self, answer):
        call = lambda: answer.saved_bytes(lambda: None, [nn.ReLU()])  # noqa: E731
        check_raises(call, TypeError, mentions=["list"], when="for a list as model")
