"""A window of tokens: stale gradients, parameters without any, windows that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kit.laws.checks import check_equal, check_raises
from kit.laws.snapshot import Snapshot
from specs.gradient_accumulation.common import (
    bad_batch,
    check_vector,
    gradient,
    gradient_in,
)
from specs.gradient_accumulation.tokens import UNEQUAL, labelled, language_model, window_loss


def _tokens(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


# The last micro-batch, and what the message must hold of its shapes.
BAD = {
    "no_samples": ((_tokens(0, 3), _tokens(0, 3)), ["0"]),
    "no_length": ((_tokens(3, 0), _tokens(3, 0)), ["0"]),
    "another_length": ((_tokens(2, 5), _tokens(2, 4)), ["5", "4"]),
    "as_many_elements": ((_tokens(2, 6), _tokens(6, 2)), ["2", "6"]),
    "one_for_all": ((_tokens(4, 3), _tokens(1, 3)), ["4", "1"]),
    "triple": ((_tokens(2, 3), _tokens(2, 3), _tokens(2, 3)), []),
    "one_tensor": (_tokens(2, 3), []),  # can be unpacked: it has two rows
}


class TestPart2AccumulateTokensTraps:
    subject = "accumulate_tokens"

    @pytest.mark.survives
    def test_a_window_of_tokens_starts_without_gradients(self, answer, device):
        """Stale gradients of 1000 in the model, and of 1 in a parameter that gets none."""
        model, batches = language_model(device), labelled(UNEQUAL, device)
        want = gradient(model, window_loss(model, batches))
        unused = nn.Parameter(torch.ones(3, device=device))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1000.0)
        unused.grad = torch.ones_like(unused)
        groups = [{"params": list(model.parameters())}, {"params": [unused]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
        answer.accumulate_tokens(model, batches, optimizer)
        check_vector(
            gradient_in(model),
            want,
            "gradient of the window",
            guesses={"gradients from before the window are in it": want + 1000},
            otherwise="gradients are cleared at another place than before the first micro-batch",
        )
        cause = "the gradients of all that the optimizer holds are to be dropped, not zeroed"
        check_equal(unused.detach(), torch.ones_like(unused).detach(), "unused weight", cause=cause)

    @pytest.mark.survives
    def test_runs_the_model_once_on_each_micro_batch_of_tokens(self, answer, device):
        """The one without labels may be left out. The model is in eval mode, and stays in it."""
        model = language_model(device).eval()
        batches = labelled([(1, 4, 2), (2, 3, 0), (3, 2, 5)], device)
        seen: list[tuple[int, ...]] = []
        modes: set[bool] = set()

        def note(layer: nn.Module, args: tuple[torch.Tensor]) -> None:
            seen.append(tuple(args[0].shape))
            modes.add(layer.training)

        model[0].register_forward_pre_hook(note)
        answer.accumulate_tokens(model, batches, torch.optim.SGD(model.parameters(), lr=0.1))
        if (2, 3) in seen:
            seen.remove((2, 3))
        cause = "a forward pass too many, perhaps for the loss; or micro-batches are cut or joined"
        check_equal(sorted(seen), [(1, 4), (3, 2)], "shapes seen by the model", cause=cause)
        cause = "train() is called: whether dropout is on is the caller's business"
        check_equal(modes, {False}, "layer.training in the forward passes", cause=cause)

    @pytest.mark.survives
    @pytest.mark.parametrize("bad", BAD)
    def test_refuses_a_bad_last_micro_batch_of_tokens(self, answer, device, bad):
        model, optimizer, before = _mid_training(device)
        batch, numbers = BAD[bad]
        batch, words = bad_batch(batch, device)
        window = [*labelled(UNEQUAL[:2], device), batch]
        check_raises(
            lambda: answer.accumulate_tokens(model, window, optimizer),
            ValueError,
            mentions=numbers,
            when=f"for a last micro-batch of {words}",
        )
        before.check_unchanged("the refused call", cause="micro-batches are checked too late")

    @pytest.mark.survives
    @pytest.mark.parametrize("ignore_index", [-100, 2])
    def test_refuses_a_window_without_labelled_tokens(self, answer, device, ignore_index):
        model, optimizer, before = _mid_training(device)
        window = labelled([(2, 3, 0), (1, 5, 0)], device, ignore_index)
        check_raises(
            lambda: answer.accumulate_tokens(model, window, optimizer, ignore_index=ignore_index),
            ValueError,
            mentions=["0"],
            when="for a window with 0 labelled tokens",
        )
        before.check_unchanged("the refused call", cause="labelled tokens are counted too late")

    @pytest.mark.survives
    def test_refuses_a_window_without_micro_batches_of_tokens(self, answer, device):
        model, optimizer, before = _mid_training(device)
        check_raises(
            lambda: answer.accumulate_tokens(model, [], optimizer),
            ValueError,
            mentions=["0"],
            when="for a window of 0 micro-batches",
        )
        before.check_unchanged("the refused call", cause="the window is checked too late")


def _mid_training(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Snapshot]:
    """A model that has been trained by a step, with its gradients still there."""
    model = language_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    window_loss(model, labelled(UNEQUAL[:1], device)).backward()
    optimizer.step()
    return model, optimizer, Snapshot(model, optimizer)
