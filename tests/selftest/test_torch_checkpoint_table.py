"""Four of PyTorch's own tests that the reference of segment_checkpointing answers in its own way.

Its walk-through says how. Here PyTorch and the reference do what those tests do, in a few lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs

from kit.answers.loading import load
from kit.catalog import find_kata

Checkpoint = Callable[..., Any]
KATA = find_kata("segment_checkpointing")
REENTRANT, HOOKS = (partial(torchs, use_reentrant=reentrant) for reentrant in (True, False))


@pytest.fixture
def ours() -> Checkpoint:
    function: Checkpoint = load(KATA.solution).checkpoint
    return function


@contextmanager
def _none_has_a_gradient() -> Iterator[None]:
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        yield


def _row(test: str) -> str:
    """What the walk-through's table says of a test of PyTorch's."""
    text = KATA.solution.with_suffix(".md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if re.match(rf"\| .*{test}\b.*\|", line)]
    return row.split("|")[2]


def _partial_grad(checkpoint: Checkpoint) -> None:
    """test_checkpoint_partial_grad: what is returned requires no gradient."""
    a, b = torch.randn(1, 4), torch.randn(1, 4, requires_grad=True)
    checkpoint(lambda first, second: first, a, b).sum().backward()


def _detached_tensor(checkpoint: Checkpoint) -> None:
    """test_checkpointing_without_reentrant_detached_tensor."""
    layer, a = nn.Linear(2, 2, bias=False), torch.randn(2, 2, requires_grad=True)
    out = checkpoint(torch.no_grad()(lambda x: layer(x)), a)
    out += a
    out.sum().backward()


@pytest.mark.parametrize("test", [_partial_grad, _detached_tensor], ids=["partial", "detached"])
def test_a_function_without_gradients_stops_the_reentrant_form_only(ours, test) -> None:
    """The contract asks for the opposite of an error."""
    with _none_has_a_gradient():
        test(REENTRANT)
    test(ours)
    assert "opposite" in _row(test.__name__)


def test_a_hook_on_the_graph_runs_once(ours) -> None:
    """test_nested_checkpoint_same_graph."""
    for checkpoint in (HOOKS, ours):
        calls: list[object] = []
        out = checkpoint(lambda a: a.sin().cos().sin(), torch.tensor(1.0, requires_grad=True))
        out.grad_fn.next_functions[0][0].register_hook(lambda *_, calls=calls: calls.append(1))
        out.backward()
        assert len(calls) == 1
    assert "passes" in _row("nested_checkpoint_same_graph")


def test_a_backward_pass_in_a_hook_of_the_node_comes_back_to_it(ours) -> None:
    """test_nested_checkpoint_reentrant_backwards: with one node for all outputs it has no end."""
    for checkpoint, ends in ((HOOKS, True), (ours, False)):
        calls: list[object] = []

        def function(a: Tensor) -> tuple[Tensor, Tensor]:
            x = a.sin().cos()
            return x, x.sin()

        x, out = checkpoint(function, torch.tensor(1.0, requires_grad=True))

        def hook(*_: object, x: Tensor = x, calls: list[object] = calls) -> None:
            calls.append(1)
            if len(calls) > 3:
                raise KeyError("and so on")
            x.backward(retain_graph=True)

        out.grad_fn.register_hook(hook)
        try:
            out.backward(retain_graph=True)
        except KeyError:
            assert not ends
        assert (len(calls) == 1) == ends
    assert "without end" in _row("nested_checkpoint_reentrant_backwards")
